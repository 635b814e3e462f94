"""Widgets: moving a control changes the picture and its words, and nothing else."""

import asyncio
import html
import re
import time
from base64 import b64decode
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

from dtlab import Comm, ConfigError, Result, plots, ps, recording, simulate
from dtlab.collectives import all_reduce
from dtlab.topology import nvswitch, racks, torus, uniform
from dtlab.units import seconds_text
from dtlab.widgets import (
    AlgorithmTopologyExplorer,
    AlphaBetaExplorer,
    ClockExplorer,
    CriticalBatchExplorer,
    FailureExplorer,
    MemoryExplorer,
    OverlapExplorer,
    PlacementExplorer,
    PlanExplorer,
    RankGrid,
    ReplicaExplorer,
    ScheduleExplorer,
    ShardedMatrixExplorer,
    Stepper,
    TopologyExplorer,
    TrainingTimeExplorer,
)
from dtlab.widgets.explorer import Explorer, choice
from dtlab.wires import contest

NETWORK = uniform(4, 5e-6, 1e9)


def ring_run() -> Result:
    return simulate(lambda comm: all_reduce(comm, torch.ones(4000)), network=NETWORK)


def simulated(fn: Callable[..., Any], *, ranks: int, timeout: float, echo: bool) -> Result:
    return simulate(fn, network=uniform(ranks, 1e-6, 1e9), echo=echo)


FEW = {"torus": torus(3, 3), "racks": racks(2, 3), "NVSwitch": nvswitch(4)}
ENTRIES = contest(FEW, [4_000, 64_000, 1_000_000], ["tree", "ring"])
MAKE: dict[str, Callable[[], Explorer]] = {
    "AlphaBetaExplorer": AlphaBetaExplorer,
    "AlgorithmTopologyExplorer": lambda: AlgorithmTopologyExplorer(FEW, ENTRIES),
    "RankGrid": lambda: RankGrid(run=simulated),
    "ReplicaExplorer": ReplicaExplorer,
    "CriticalBatchExplorer": CriticalBatchExplorer,
    "FailureExplorer": FailureExplorer,
    "OverlapExplorer": OverlapExplorer,
    "MemoryExplorer": MemoryExplorer,
    "PlacementExplorer": PlacementExplorer,
    "PlanExplorer": PlanExplorer,
    "ShardedMatrixExplorer": ShardedMatrixExplorer,
    "TrainingTimeExplorer": TrainingTimeExplorer,
    "ClockExplorer": ClockExplorer,
}
MOVES: dict[str, Callable[[Any], None]] = {
    "AlgorithmTopologyExplorer": lambda w: setattr(w.nbytes, "value", 4_000),
    "AlphaBetaExplorer": lambda w: setattr(w.alpha, "value", 1e-4),
    "RankGrid": lambda w: setattr(w.ranks, "value", 6),
    "ReplicaExplorer": lambda w: setattr(w.rule, "value", "leader, answers at once"),
    "CriticalBatchExplorer": lambda w: setattr(w.devices, "value", 64),
    "FailureExplorer": lambda w: setattr(w.answer, "value", "restart, no spare"),
    "OverlapExplorer": lambda w: setattr(w.strategy, "value", "flat"),
    "MemoryExplorer": lambda w: setattr(w.ranks, "value", 8),
    "PlacementExplorer": lambda w: setattr(w.gpus, "value", 8),
    "PlanExplorer": lambda w: setattr(w.memory, "value", 24e9),
    "ShardedMatrixExplorer": lambda w: setattr(w.direction, "value", True),
    "TrainingTimeExplorer": lambda w: setattr(w.devices, "value", 4096),
    "ClockExplorer": lambda w: setattr(w.player.slider, "index", 31),
}


def size(svg: bytes) -> list[bytes]:
    return re.findall(rb'<svg[^>]* (?:width|height)="([^"]+)"', svg) + re.findall(
        rb'<svg[^>]* viewBox="([^"]+)"', svg)


@pytest.mark.parametrize("name", MAKE)
def test_moving_a_control_changes_picture_and_words_but_no_size(name: str) -> None:
    widget = MAKE[name]()
    before, words = widget.image.value, widget.words.value
    MOVES[name](widget)
    assert widget.image.value != before
    assert widget.words.value != words
    assert size(widget.image.value) == size(before)


@pytest.mark.parametrize("name", MAKE)
def test_there_are_words_controls_and_a_still_picture_from_the_first_moment(name: str) -> None:
    widget = MAKE[name]()
    assert b"<svg" in bytes(widget.image.value)
    assert size(widget.image.value)
    assert "dtlab-words" in widget.words._dom_classes  # explorer.js makes it a live region
    assert len(widget.image.tooltip) > 5
    assert widget.image.tooltip in widget.words.value
    assert widget.image.description == ""  # the frontend fails on a tooltip without it
    assert widget.controls  # each of which can be reached by keyboard
    assert all(control.tabbable is not False for control in widget.controls)
    shown = [child for row in widget.box.children[1:-2] for child in row.children]
    assert shown == widget.controls
    assert list(widget.box.children[-2:]) == [widget.image, widget.words]
    data, about = widget._repr_mimebundle_()
    view = data["application/vnd.jupyter.widget-view+json"]
    assert view["model_id"] == widget.box.model_id
    assert b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert about["image/png"]["alt"] == widget.static().alt != ""
    assert data["text/plain"] == f"{name}: run this cell to use its controls"


def test_a_picture_seen_before_is_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    widget = ClockExplorer()
    widget.player.step(1)
    first = widget.image.value
    widget.player.step(1)
    monkeypatch.setattr("dtlab.widgets.clocks.clocks", None)  # drawing would fail
    widget.player.step(-1)
    assert widget.image.value == first


def test_pictures_are_drawn_ahead_one_by_one_until_something_else_is_chosen() -> None:
    drawn = []

    class Numbers(Explorer):
        def __init__(self) -> None:
            self.number = choice("number", [(str(n), n) for n in range(9)], 0)
            super().__init__([self.number])

        def _near(self) -> list[tuple[int]]:
            return [(self.number.value + 1,), (self.number.value + 2,)]

        def _draw(self, number: int) -> plots.Picture:
            drawn.append(number)
            return plots.rank_grid(number + 1)

    async def choose() -> None:
        Numbers().number.value = 5
        for _ in range(1000):
            await asyncio.sleep(0.01 if 7 not in drawn else 0)

    asyncio.run(choose())
    assert drawn == [0, 5, 6, 7]


@pytest.mark.parametrize("bad", [
    lambda: AlphaBetaExplorer("gossip"), lambda: ClockExplorer("gossip"),
    lambda: ClockExplorer(pace="gossip"),
    lambda: PlacementExplorer("on the moon"), lambda: PlacementExplorer(gpus=99),
    lambda: MemoryExplorer("GPT-9"), lambda: MemoryExplorer(ranks=0),
    lambda: MemoryExplorer(stage=4), lambda: MemoryExplorer(device_bytes=0),
    lambda: PlacementExplorer(nbytes=0), lambda: PlacementExplorer(gpus=3, switches=2),
    lambda: Stepper("gossip"), lambda: Stepper("all_reduce", "telepathy"),
    lambda: Stepper(ranks=0), lambda: TopologyExplorer({}), lambda: ScheduleExplorer("waltz"),
])
def test_what_does_not_exist_is_a_config_error(bad: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        bad()


# ---- critical batch ---------------------------------------------------------------------------


def test_counts_stand_beside_the_critical_batch_that_fits_them_only() -> None:
    widget = CriticalBatchExplorer(30, 13, {4: 122, 64: 38})
    assert "predicted and counted" in widget.words.value
    widget.critical.value = 4096
    assert "counted" not in widget.words.value
    widget.critical.value = 13
    assert "predicted and counted" in widget.words.value


# ---- α–β explorer -----------------------------------------------------------------------------


def test_fitted_values_are_stops_of_the_sliders() -> None:
    widget = AlphaBetaExplorer(ranks=6, alpha=2.37e-5, beta=3.21e-10, gamma=7e-11)
    assert widget._choice() == ("all_reduce", 6, 2.37e-5, 3.21e-10, 7e-11)
    assert "α = 23.7 µs" in widget.words.value


def test_an_explorer_shows_the_algorithms_that_a_chapter_tells_of() -> None:
    widget = AlphaBetaExplorer("all_reduce", ranks=64, algorithms=["tree", "ring"])
    words = widget.static().alt
    assert "tree" in words
    assert "ring overtakes tree" in words
    assert "doubling" not in words
    widget.ranks.value = 128
    assert "doubling" not in widget.static().alt
    widget.collective.value = "broadcast"  # of which nothing was said
    assert "broadcast" in widget.static().alt
    with pytest.raises(ConfigError, match="no closed form"):
        AlphaBetaExplorer("all_reduce", algorithms=["telepathy"])


def test_measured_dots_belong_to_their_own_collective_and_ranks() -> None:
    widget = AlphaBetaExplorer(ranks=4, measured={"ring": {4096: [1e-4, 2e-4]}})
    assert "measured" in widget.words.value
    widget.ranks.value = 8
    assert "measured" not in widget.words.value


# ---- memory -----------------------------------------------------------------------------------


def test_memory_explorer_begins_with_figure_1_of_the_paper_and_takes_numbers_of_one_s_own() -> None:
    widget = MemoryExplorer()
    for stage, nbytes in enumerate(("120 GB a", "31.4 GB a", "16.6 GB a", "1.88 GB a")):
        widget.stage.value = stage
        assert f": {nbytes} rank (predicted)" in widget.words.value
    widget.batch.value = 1
    assert "activations 34.4 GB" in widget.words.value
    assert "billion parameters in bf16 · Adam, bf16 gradients · " in widget.words.value
    mine = MemoryExplorer("GPT-2 XL", 12, 1, batch=3, device_bytes=11e9)
    assert mine._choice() == ("GPT-2 XL", 12, 1, "Adam, bf16 gradients", 3, "none", 11e9)


# ---- placement --------------------------------------------------------------------------------


def test_placement_explorer_begins_with_the_chapter_s_example_and_takes_numbers_of_one_s_own() -> (
    None
):
    widget = PlacementExplorer()
    for where, sum_time in (("on GPU 0", "60 ms"), ("on the CPU", "80 ms"),
                            ("spread over the GPUs", "15 ms"), ("in a ring, no server", "15 ms")):
        widget.where.value = where
        assert f"summed {where}: {sum_time} (simulated)" in html.unescape(widget.words.value)
    mine = PlacementExplorer("on the CPU", 3, 123_456_000, 7.5e9)
    assert mine._choice() == ("on the CPU", 3, 123_456_000, 7.5e9, 1)
    assert "123 MB of gradients on each · 1 PCIe switch, 7.5 GB/s" in mine.words.value


@pytest.mark.parametrize("gpus", [3, 4])
def test_two_switches_take_an_even_number_of_gpus_only(gpus: int) -> None:
    widget = PlacementExplorer(gpus=gpus)
    widget.switches.value = 2
    assert ("pcie1" in widget.static().alt) == (gpus == 4)


# ---- clocks -----------------------------------------------------------------------------------


def test_clocks_step_and_stop_at_both_ends() -> None:
    widget = ClockExplorer()
    widget.player.slider.index = 1
    widget.player.step(-1)
    widget.player.step(-1)
    assert widget.player.at == 0
    assert "after 0.00 s" in widget.words.value
    widget.player.slider.index = len(widget.player.slider.options) - 2
    for _ in range(3):
        widget.player.step(1)
    assert widget.player.slider.label == "2.00 s"
    assert "after 2.00 s" in widget.words.value


@pytest.mark.parametrize("pace", recording.PACES)
def test_clocks_offer_every_rule_at_every_pace(pace: str) -> None:
    widget = ClockExplorer(pace=pace, workers=3, end_s=1.0)
    for rule in widget.rules:
        widget.rule.value = rule
        assert widget.words.value.count("worker ") >= 3
        assert f"Who waits for whom: {rule} (simulated)" in widget.words.value


def test_clocks_take_a_rule_of_the_learners_own_and_simulate_each_choice_once() -> None:
    class Loose(ps.SSP):
        """Twice as loose."""

        def limit(self, clocks: ps.consistency.Clocks) -> float:
            return clocks.slowest + 2 * self.staleness

    widget = ClockExplorer("mine", "one slow worker", rules={"mine": Loose(1), "BSP": ps.BSP()})
    first = widget.run
    assert first.most_ahead(2.0) == 2
    widget.rule.value = "BSP"
    assert widget.run.most_ahead(2.0) == 0
    widget.rule.value = "mine"
    assert widget.run is first


# ---- rank grid --------------------------------------------------------------------------------


def test_processes_start_only_from_the_run_button() -> None:
    calls: list[int] = []

    def run(fn: Callable[..., Any], *, ranks: int, timeout: float, echo: bool) -> Result:
        calls.append(ranks)
        assert widget.buttons.run.disabled
        assert "running" in widget.words.value
        return simulated(fn, ranks=ranks, timeout=timeout, echo=echo)

    widget = RankGrid(lambda comm: comm.rank * 10, run=run)
    widget.ranks.value = 3
    widget.ranks.value = 5
    assert calls == []
    widget.buttons.run.click()
    assert calls == [5]
    assert "rank 4 returned 40" in widget.words.value
    assert not widget.buttons.run.disabled


async def stopped_s(widget: RankGrid | PlanExplorer) -> float:
    """Press Run as in a kernel, then Stop: seconds until the widget can be used again."""
    widget.buttons.run.click()
    await asyncio.sleep(1)
    assert widget.buttons.run.disabled
    assert not widget.buttons.stop.disabled
    begun = time.monotonic()
    widget.buttons.stop.click()
    while widget.buttons.run.disabled:
        await asyncio.sleep(0.01)
    assert widget.buttons.stop.disabled
    return time.monotonic() - begun


def test_stop_ends_a_run_and_the_widget_goes_on_working() -> None:
    widget = RankGrid(lambda comm: time.sleep(60 if comm.size == 2 else 0), ranks=2)
    family = set(psutil.Process().children(recursive=True))
    assert asyncio.run(stopped_s(widget)) < 20
    assert widget.words.value == "Stopped."
    assert "rank 1 stopped" in widget.static().alt
    left = set(psutil.Process().children(recursive=True)) - family
    assert len(left) <= 1  # the server from which ranks are forked
    widget.ranks.value = 3
    widget.run()
    assert "rank 2 returned None" in widget.words.value


def test_stop_ends_a_simulation_and_another_can_begin_which_shows_its_time_and_its_timeline() -> (
    None
):
    widget = PlanExplorer("GPT-3", "64 A100, a card each")
    shown, parts = widget.image.value, len(widget.box.children)
    assert asyncio.run(stopped_s(widget)) < 20
    assert (widget.words.value, widget.image.value) == ("Stopped.", shown)
    widget.cluster.value, widget.model.value = "16 A100, a card each", "GPT-2 small"
    widget.buttons.run.click()
    assert "simulated" in widget.words.value
    (timeline,) = widget.box.children[parts:]
    assert "A step of dp_replicate=2,dp=8" in timeline.words
    widget.memory.value = 24e9  # another limit, another best: nothing is simulated yet
    assert len(widget.box.children) == parts


def test_a_click_on_stop_that_comes_too_late_does_nothing() -> None:
    widget = RankGrid(ranks=2, run=simulated)
    widget.run()
    before = widget.words.value
    widget.buttons.stop.click()
    assert widget.words.value == before


def test_errors_are_shown_on_the_tiles() -> None:
    def fail(comm: Comm) -> None:
        if comm.rank == 1:
            raise ValueError("no luck")

    widget = RankGrid(fail, ranks=3, run=simulated)
    widget.run()
    assert "no luck" in widget.words.value
    assert "rank 1 failed" in widget.static().alt
    assert not widget.buttons.run.disabled
    widget.ranks.value = 4  # and it goes on working
    assert "rank 3 idle" in widget.words.value


def test_any_other_error_is_shown_in_words() -> None:
    def broken(fn: object, **_: object) -> Result:
        raise RuntimeError("the machine is on fire")

    widget = RankGrid(run=broken)
    widget.run()
    assert "the machine is on fire" in widget.words.value
    assert "rank 0 stopped" in widget.static().alt


def test_what_ranks_print_and_return_is_told_and_escaped() -> None:
    def fn(comm: Comm) -> str:
        print(f"hello from {comm.rank}")
        return "<script>"

    widget = RankGrid(fn, ranks=2, run=simulated)
    widget.run()
    assert "hello from 0 | hello from 1" in widget.words.value
    assert "<script>" not in widget.words.value
    assert "&lt;script&gt;" in widget.words.value


# ---- which algorithm on which topology --------------------------------------------------------


def test_each_choice_shows_its_cluster_its_size_and_the_links_of_its_algorithm() -> None:
    widget = AlgorithmTopologyExplorer(FEW, ENTRIES)
    assert widget.nbytes.value == 1_000_000
    widget.cluster.value, widget.algorithm.value, widget.nbytes.value = "racks", "ring", 64_000
    entry = next(e for e in ENTRIES if e[:1] + e[2:4] == ("racks", "ring", 64_000))
    for part in ("64 kB on racks, 6 ranks", f"ring takes {seconds_text(entry.elapsed_s)}",
                 f"busiest link, {entry.busiest[0]} → {entry.busiest[1]}"):
        assert part in widget.words.value
    assert widget.static().alt in html.unescape(widget.words.value)


def test_the_explorer_simulates_nothing_once_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    widget = AlgorithmTopologyExplorer({"NVSwitch": nvswitch(2)})
    monkeypatch.setattr("dtlab.wires.simulate", None)  # simulating would fail
    for nbytes in (value for _, value in widget.nbytes.options):
        widget.nbytes.value = nbytes
    for algorithm in widget.algorithm.options:
        widget.algorithm.value = algorithm


@pytest.mark.parametrize("entries", [[], ENTRIES[1:], ENTRIES[:3]])
def test_an_explorer_wants_the_same_contest_for_all_clusters(entries: list[Any]) -> None:
    with pytest.raises(ConfigError, match="same sizes and algorithms"):
        AlgorithmTopologyExplorer(FEW, entries)


# ---- replicas ----------------------------------------------------------------------------------


def test_the_reader_can_lose_a_push_with_the_weak_leader_only() -> None:
    widget = ReplicaExplorer("leader, answers at once", "kill copy 0", 0)
    lost = []
    for moment in range(23):
        widget.moment.value = moment
        lost.append(widget.run.lost)
    assert set(lost) == {0, 1}
    widget.rule.value = "chain"
    assert widget.run.lost == 0


def test_controls_that_change_nothing_are_off() -> None:
    widget = ReplicaExplorer("chain", "nothing")
    assert widget.moment.disabled
    assert widget.heal.disabled
    widget.fate.value = "cut copy 0 off"
    assert not widget.moment.disabled
    assert not widget.heal.disabled
    healed = widget.run.healed_s
    widget.heal.value = "not in this picture"
    assert widget.run.healed_s > healed


def test_a_fate_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose one of: nothing, kill copy 0"):
        ReplicaExplorer("chain", "flood")
