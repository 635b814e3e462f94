"""Chapter 14: the fastest layout of a model that fits, found with few predictions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

from dtlab.errors import ConfigError
from dtlab.grading.case import Case, Outcome
from dtlab.grading.draws import scale, varied
from dtlab.grading.exercise import Check, Exercise, Judge, Verdict
from dtlab.grading.standard import both
from dtlab.models import gpt_shape
from dtlab.parallel.planner import MEGATRON, Layout, predict, wires
from dtlab.topology import compose, nvswitch, uniform

NAMES = ("pp", "dp", "tp", "micro_batch", "stage", "recompute")
RECOMPUTE = ("none", "selective", "full")
TOO_LARGE = ("That layout takes more than memory_bytes on a device: leave out what doesn't fit, "
             "then take the fastest.")
# (layers, hidden, heads, servers, GPUs of each, batch, bytes of a GPU, bandwidth of a server's NIC)
Question = tuple[Any, ...]


def predictor(question: Question) -> Callable[..., tuple[float, float] | None]:
    """Return the function (pp, dp, tp, micro_batch, stage, recompute) → (seconds a step, bytes a
    device); None for what can't be laid out, for ZeRO on one rank, and for ZeRO 3 in a pipeline,
    which many libraries refuse."""
    layers, hidden, heads, servers, gpus, batch, _, nic_Bps = question
    shape = gpt_shape(layers, hidden, heads)
    topology = compose(nvswitch(gpus), uniform(servers, 3e-6, nic_Bps), nic_Bps=nic_Bps)
    wire = wires(topology)

    @cache
    def predicted(pp: int, dp: int, tp: int, micro_batch: int, stage: int, recompute: str
                  ) -> tuple[float, float] | None:
        if not all(isinstance(each, (int, float)) for each in (pp, dp, tp, micro_batch, stage)):
            return None  # a str times a number could fill the memory
        micro_batches, rest = divmod(batch, dp * micro_batch)
        if rest or not micro_batches or pp * dp * tp != topology.ranks:
            return None
        if (stage and dp == 1) or (stage == 3 and pp > 1):
            return None
        try:
            found = predict(shape, topology, Layout(
                {"pp": pp, "dp": dp, "tp": tp}, micro_batch, micro_batches, stage=stage,
                recompute=recompute, sequence=tp > 1), software=MEGATRON, memory_bytes=1e18,
                wire=wire)
        except ConfigError:
            return None
        return None if found.why_not else (found.step_s, found.memory_bytes)

    return predicted


@cache
def all_of(question: Question) -> dict[tuple[Any, ...], tuple[float, float]]:
    """Map every valid layout to its (seconds a step, bytes a device)."""
    servers, gpus, batch = question[3:6]
    sizes = [n for n in range(1, servers * gpus + 1) if servers * gpus % n == 0]
    micro = [n for n in range(1, batch + 1) if batch % n == 0]
    every, predicted = product(sizes, sizes, sizes, micro, range(4), RECOMPUTE), predictor(question)
    return {layout: found for layout in every if (found := predicted(*layout))}


def oracle(question: Question, rank: int) -> Callable[..., tuple[float, float] | None]:
    """Return the function that predicts in the referee."""
    predicted = predictor(question)
    return lambda comm, *layout: predicted(*layout)


def run_choice(choose: Callable[..., Any], ask: Callable[..., Any], layers: int, heads: int,
               devices: int, batch: int, *memory_bytes: float) -> list[Any]:
    """In the sandbox, let the answer choose. Sizes that don't divide cost no question."""
    def predict(pp: int, dp: int, tp: int, micro_batch: int, stage: int, recompute: str) -> Any:
        if pp * dp * tp != devices or batch % (dp * micro_batch):
            return None
        return ask(pp, dp, tp, micro_batch, stage, recompute)

    chosen = choose(predict, layers, heads, devices, batch, *memory_bytes)
    return [chosen.get(name) for name in NAMES] if isinstance(chosen, dict) else []


def layout_case(tried: str, question: Question, answer: Callable[..., Any], *memory_bytes: float
                ) -> Case:
    """A case whose function asks `answer`. memory_bytes: the last argument, if there is one."""
    layers, _, heads, servers, gpus, batch, *_ = question
    return Case(tried, [(layers, heads, servers * gpus, batch, *memory_bytes)], comm=False,
                harness=run_choice, oracle=partial(answer, question), facts={"question": question})


def _fits(case: Case, outcome: Outcome) -> Verdict:
    """Is the chosen layout valid, and does it fit into memory?"""
    question, chosen = case.facts["question"], outcome.values[0]
    found, limit = all_of(question).get(tuple(chosen)), question[6]
    if found is None:
        return Verdict(False, str(chosen)[:60] if chosen else "no dictionary",
                       "a layout for which predict does not give None", evidence=chosen)
    return Verdict(found[1] <= limit, f"{found[1] / 1e9:.1f} GB", f"≤ {limit / 1e9:.0f} GB",
                   evidence=chosen, clue=TOO_LARGE)


def within(share: float) -> Judge:
    """Does the layout take at most `share` of the fastest one's time?"""
    def judge(case: Case, outcome: Outcome) -> Verdict:
        question, chosen = case.facts["question"], outcome.values[0]
        times_s = {layout: step_s for layout, (step_s, nbytes) in all_of(question).items()
                   if nbytes <= question[6]}
        best, mine = min(times_s, key=times_s.__getitem__), times_s[tuple(chosen)]
        missed = [name for name, a, b in zip(NAMES, chosen, best, strict=True) if a != b]
        limit_s = share * times_s[best]
        return Verdict(mine <= limit_s, f"{mine:.3f} s",
                       f"≤ {limit_s:.3f} s, with other {', '.join(missed)}", evidence=chosen)

    return judge


def _calls(case: Case, outcome: Outcome) -> Verdict:
    calls, allowed = outcome.asked[0], len(all_of(case.facts["question"])) // 2
    return Verdict(calls <= allowed, f"{calls} predictions", f"≤ {allowed}")


def _build(seed: int) -> list[Check]:
    def case(layers: int, hidden: int, heads: int, servers: int, batch: int, gigabytes: float
             ) -> Case:
        gigabytes *= scale(seed, layers, hidden, servers, most=1.1)
        hidden += heads * varied(seed, 9, layers, servers)
        return layout_case(
            f"{layers} layers of {hidden}, {8 * servers} devices of {gigabytes:.3g} GB",
            (layers, hidden, heads, servers, 8, batch, gigabytes * 1e9, 25e9), oracle,
            gigabytes * 1e9)

    batch = 32 + 16 * varied(seed, 4, "batch")
    small = [case(24, 2048, 16, 2, batch, 24), case(24, 2048, 16, 1, 16, 40),
             case(24, 2048, 16, 1, 48, 24), case(6, 4096, 32, 1, 8, 40),
             case(8, 1024, 1, 1, 1, 40)]  # a batch of 1 and one head: only a pipeline is possible
    tight = [case(32, 4096, 32, 2, 32, 14), case(40, 5120, 40, 4, 64, 16)]
    if seed:  # differs from the first only in the width, which answers don't get: no table helps
        tight.append(case(32, 5120, 32, 2, 32, 14))
    # The layout that takes the least memory fits, too, so the first check also limits the time.
    fits_well, best = both(_fits, within(1.5)), within(1.001)
    return [
        Check("fits", 2, "4 models on 8, 16 and 32 devices", [*small, *tight], fits_well),
        Check("good", 2, "within a fifth of the best", [*small, *tight], within(1.2), _fits),
        Check("best", 3, "the best there is", [*small, *tight], best, _fits),
        Check("few predictions", 1, "half of all layouts", tight, _calls, best),
    ]


EXERCISE = Exercise("choose-layout", "Choose a layout", "choose_layout", _build)
