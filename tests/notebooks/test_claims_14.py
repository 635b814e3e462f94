"""What chapter 14 says in prose is true; each sentence is looked up there, then recomputed."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat

from dtlab.models import SHAPES
from dtlab.parallel import Layout, plan, predict
from dtlab.parallel.planner import wires
from dtlab.published import MEGATRON_TABLE_1, dgx_a100
from dtlab.topology import compose, nvswitch, uniform

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = nbformat.read(ROOT / "notebooks" / "14_all_together.ipynb", as_version=4)


def card_a_server(servers: int):
    return compose(nvswitch(8), uniform(servers, 3e-6, 25e9), nic_Bps=25e9)


def test_the_order_of_axes_makes_a_step_two_to_four_times_as_long(prose: str) -> None:
    assert "C Two to four times as long." in prose
    inside, spread = (predict(SHAPES["Llama 3 8B"], card_a_server(2), Layout(mesh, 1, 8, stage=1))
                      for mesh in ({"dp": 2, "tp": 8}, {"tp": 8, "dp": 2}))
    assert 2 < spread.step_s / inside.step_s < 4


def test_the_slower_network_costs_little_if_the_layout_suits_it(prose: str) -> None:
    assert "costs the small models about 6 % and GPT-3, whose tensor parallelism never leaves a " \
           "server, 1 %" in prose
    for model, percent in (("7.5 B", 6), ("Llama 3 8B", 6), ("GPT-3", 1)):
        best = [plan(SHAPES[model], cluster, 256)[0]
                for cluster in (dgx_a100(64), card_a_server(8))]
        assert round(100 * (best[1].step_s / best[0].step_s - 1)) == percent
    assert list(best[1].layout.mesh)[-1] == "tp"
    assert best[1].layout.tp <= 8
    assert wires(dgx_a100(64))(2, 8).beta * 8 == wires(card_a_server(8))(2, 8).beta


def test_the_pipeline_of_sixteen_is_furthest_off() -> None:
    (output,) = [cell.outputs[0].text for cell in NOTEBOOK.cells if cell.id == "simulated"]
    apart = [abs(float(text)) for text in re.findall(r"([+-]\d+\.\d)%", output)]
    assert len(apart) == 4
    assert apart[-1] == max(apart)


def test_megatrons_148_and_its_largest_model(prose: str) -> None:
    assert "148 TFLOP/s a GPU for this one" in prose
    assert "The largest model of that paper ran with t = 8 and p = 64" in prose
    assert MEGATRON_TABLE_1[6][-1] == 148
    assert "six copies of that: 3072 GPUs for 1008 billion parameters" in prose
    assert MEGATRON_TABLE_1[-1][0] == 1008
    assert MEGATRON_TABLE_1[-1][4:7] == (8, 64, 3072)


def test_all_ways_train_as_one_device(prose: str) -> None:
    assert "five times the same curve" in prose
    (output,) = [cell.outputs[0].text for cell in NOTEBOOK.cells if cell.id == "hybrid-run"]
    assert output.count("as on one device") == 5
