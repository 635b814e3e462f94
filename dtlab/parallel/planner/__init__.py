"""The planner: every way to lay a transformer on a cluster, what a step of it would take, and what
it would occupy.

A layout is predicted in three steps, each of which you can read by itself:

1. `wires`: what the groups of one mesh axis get from the topology, if all of them send at once;
2. `work_of`: what one rank computes, sends and holds, from the device and the model's shape;
3. `predict`: the times of these, added up, by name.

`plan` predicts all layouts, and sorts. `Plan.step` is the same step as a program of messages and
computation: simulate it to see whether the sum is right.

Not in it: what waits for a slow rank; how two kinds of messages on one wire delay each other; what
overlapping costs the computation; that stages which share a wire use it at different times; trees
and other collectives than rings; experts with more tokens than others; reading data. Chapter: 14.
"""

from dtlab.parallel.planner.device import (
    A100,
    COMPILED,
    DEVICES,
    EAGER,
    H100,
    MEGATRON,
    SOFTWARE,
    Device,
    Software,
    cluster,
)
from dtlab.parallel.planner.layout import Layout
from dtlab.parallel.planner.plan import HEADROOM, TIE, Plan, plan, predict, ties
from dtlab.parallel.planner.schedules import GENERATORS
from dtlab.parallel.planner.wires import Wire, wires
from dtlab.parallel.planner.work import RECIPES, RankWork, Recipe, work_of

__all__ = ["A100", "COMPILED", "DEVICES", "EAGER", "GENERATORS", "H100", "HEADROOM", "MEGATRON",
           "RECIPES", "SOFTWARE", "TIE", "Device", "Layout", "Plan", "RankWork", "Recipe",
           "Software", "Wire", "cluster", "plan", "predict", "ties", "wires", "work_of"]
