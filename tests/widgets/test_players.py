"""Players: what Python computes for the page, and that choices and moments are what they say."""

import json
from base64 import b64decode
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dtlab import Comm, Deadlock, Trace, simulate
from dtlab.collectives import ALGORITHMS, all_reduce
from dtlab.errors import ConfigError
from dtlab.recording import stepper_frames
from dtlab.topology import racks, send_together, uniform
from dtlab.widgets import ScheduleExplorer, Stepper, TimelineExplorer, TopologyExplorer
from dtlab.widgets.player import MIME, Player
from dtlab.widgets.schedule import SCHEDULES


def ring(comm: Comm) -> torch.Tensor:
    with comm.compute("forward", 1e-6 * (1 + comm.rank)):
        pass
    return all_reduce(comm, torch.ones(4000), algorithm="ring")


def timeline(ranks: int = 4) -> TimelineExplorer:
    return TimelineExplorer(simulate(ring, network=uniform(ranks, 5e-6, 1e9)).trace)


MAKE: dict[str, Callable[[], Player]] = {
    "Stepper": Stepper, "TimelineExplorer": timeline, "ScheduleExplorer": ScheduleExplorer,
    "TopologyExplorer": TopologyExplorer}


@pytest.mark.parametrize("name", MAKE)
def test_a_page_gets_a_still_picture_its_words_and_what_it_can_play(name: str) -> None:
    player = MAKE[name]()
    data, about = player._repr_mimebundle_()
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == player.model_id
    assert b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert about["image/png"]["alt"] == player.static().alt != ""
    assert data["text/plain"] == f"{name}: run this cell to use its controls"
    played = json.loads(json.dumps(data[MIME]))  # no NaN, no array
    assert played["show"]["moments"][player.at]["words"] == player.words
    assert "NaN" not in json.dumps(played)
    assert "Infinity" not in json.dumps(played)


def test_a_still_of_a_step_that_is_not_there_says_how_many_there_are() -> None:
    shown = Stepper("all_reduce", "ring", ranks=2)
    assert shown.static(-1).alt == shown.static(2).alt
    with pytest.raises(ConfigError, match=r"static\(step=3\): there are 2 steps"):
        shown.static(3)


@pytest.mark.parametrize("name", MAKE)
def test_players_offer_what_is_chosen_stop_at_both_ends_and_have_words_for_each_moment(
    name: str
) -> None:
    player = MAKE[name]()
    for control in player.show["controls"]:
        chosen = player.choice[control["name"]]
        assert control["kind"] == "text" or chosen in [value for _, value in control["options"]]
    moments = player.show["moments"]
    player.at = 0
    player.back()
    assert player.at == 0
    for _ in range(len(moments) + 2):
        player.forward()
    assert player.at == len(moments) - 1
    assert all({"title", "label", "words"} <= moment.keys() for moment in moments)
    assert len({moment["words"] for moment in moments}) > 1


# ---- stepper ----------------------------------------------------------------------------------


def test_stepper_offers_all_that_is_registered() -> None:
    player = Stepper()
    for collective, algorithms in ALGORITHMS.items():
        player.choose(collective=collective)
        assert player.choice["algorithm"] in algorithms  # not the one of the collective before
        for algorithm in algorithms:
            player.choose(algorithm=algorithm)
            assert player.frame.title == f"{collective}, {algorithm}"
            assert player.words.startswith(f"{collective}, {algorithm}")


@pytest.mark.parametrize("ranks", [1, 2, 5, 9, 13])
def test_the_page_gets_what_the_frames_hold(ranks: int) -> None:
    player, frames = Stepper(ranks=ranks), stepper_frames("all_reduce", "ring", ranks)
    assert len(player.show["moments"]) == len(frames)
    for moment, frame in zip(player.show["moments"], frames, strict=True):
        assert [int(digit) for digit in moment["holds"]] == frame.holds.ravel().tolist()
        assert [sign == "c" for sign in moment["state"]] == frame.complete.ravel().tolist()
        assert [arrow[:2] for arrow in moment["arrows"]] == [[a.src, a.dst] for a in frame.arrows]


def test_stepper_shows_a_learners_own_function() -> None:
    def my_ring(comm: Comm, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(comm, x, algorithm="ring")

    player = Stepper(fn=my_ring, ranks=3)
    assert [control["name"] for control in player.show["controls"]] == ["ranks"]
    assert "my_ring" in player.words
    assert "complete: 9 of 9" in player.static(-1).alt.lower()


def test_a_piece_that_holds_a_part_twice_is_spoilt() -> None:
    def twice(comm: Comm, x: torch.Tensor) -> torch.Tensor:
        all_reduce(comm, x)
        return all_reduce(comm, x)

    last = Stepper(fn=twice, ranks=2).show["moments"][-1]
    assert set(last["state"]) == {"w"}
    assert set(last["holds"]) == {"2"}


def test_stepper_tells_of_a_deadlock_in_words_and_keeps_the_last_drawing() -> None:
    def odd_only(comm: Comm, x: torch.Tensor) -> None:
        if comm.size % 2:
            comm.recv(x, (comm.rank + 1) % comm.size)

    player = Stepper(fn=odd_only, ranks=2)
    before = player.show["moments"]
    player.choose(ranks=3)
    assert "deadlock" in player.words
    assert player.show["moments"] == before
    player.choose(ranks=2)
    assert "deadlock" not in player.words
    with pytest.raises(Deadlock):
        Stepper(fn=odd_only, ranks=3)


# ---- timeline ---------------------------------------------------------------------------------


def test_the_words_of_a_moment_say_what_each_rank_does() -> None:
    player = timeline()
    words = {moment["label"]: moment["words"] for moment in player.show["moments"]}
    assert words["1 µs"] == ("At 1 µs: rank 0 waits for 1 and 3; rank 1 does forward; "
                             "rank 2 does forward; rank 3 does forward.")
    assert "rank 3 sends to 0, receives from 2" in words["4 µs"]


def test_a_title_may_hold_a_colon() -> None:
    player = TimelineExplorer(Trace(2), "Step 1: nothing. Yet")
    assert player.show["moments"][0]["title"].startswith("Step 1: nothing. Yet (")
    assert player.show["scene"]["note"].startswith("2 ranks")


def test_an_empty_trace_and_a_long_one_can_be_explored() -> None:
    assert TimelineExplorer(Trace(2)).words.startswith("Timeline")
    long = Trace(2, spans=simulate(ring, network=uniform(2, 5e-6, 1e9)).trace.spans)
    assert TimelineExplorer(long).show["scene"]["messages"] == []
    many = TimelineExplorer(simulate(
        lambda comm: [all_reduce(comm, torch.ones(64)) for _ in range(60)],
        network=uniform(9, 5e-6, 1e9)).trace)
    assert len(many.show["scene"]["bars"]) <= 20_000
    assert "arrows: " in many.show["scene"]["note"]


# ---- schedule ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_ends_when_its_formula_says_and_holds_what_it_says(name: str) -> None:
    player = ScheduleExplorer(name)
    moments = player.show["moments"]
    assert f"elapsed {moments[-1]['time']:.4g} s" in player.words
    most = [max(float(moment["holds"][rank]) for moment in moments) for rank in range(4)]
    assert most == pytest.approx([float(held) for held in player.show["scene"]["most"]], abs=0.01)


def test_a_choice_that_changes_nothing_is_answered_too() -> None:
    player = ScheduleExplorer("GPipe")
    before = player.show
    player.choose(chunks=3)  # which counts for interleaved schedules only
    assert player.show == before
    assert player.answers == 1


def test_an_edited_grid_is_shown_and_one_that_cannot_run_names_its_cell() -> None:
    player = ScheduleExplorer("GPipe", 2, 2)
    grid = player.choice["grid"]
    player.choose(grid=grid.replace("0F0 0F1", "0F1 0F0"))
    assert player.show["scene"]["rows"][0][0][:2] == ["F", 1]
    player.choose(grid=grid.replace("0F0", "0F1", 1))
    assert "can't run" in player.words
    assert "»0F1«" in player.words
    player.choose(ranks=3)  # another grid is made
    assert "can't run" not in player.words


# ---- topology ----------------------------------------------------------------------------------


def two_flows(comm: Comm) -> None:
    send_together(comm, {(0, 2): 1_000_000, (1, 3): 2_000_000})


def two_racks() -> TopologyExplorer:
    cluster = racks(2, 2, oversubscription=2, latency_s=0.25, bandwidth_Bps=1e6)
    return TopologyExplorer({"two racks": cluster}, {"two flows": two_flows})


def test_it_begins_when_bytes_begin_to_move_and_steps_through_all_changes() -> None:
    player = two_racks()
    seen, words = [player.at_s], [player.words]
    for _ in range(4):
        player.forward()
        seen.append(player.at_s)
        words.append(player.words)
    assert seen == [1.0, 3.0, 4.0, 4.0, 4.0]  # first bytes; one has ended; both have
    assert "0 → 2, 1 → 3: 500 kB/s" in words[0]
    assert "full: rack0 → spine, spine → rack1" in words[0]
    assert "1 → 3: 1 MB/s" in words[1]
    assert "no bytes are on the move" in words[2]


def test_every_traffic_runs_on_every_cluster_that_comes_with_it() -> None:
    player = TopologyExplorer()
    for cluster in player.clusters:
        for kind in player.kinds:
            player.choose(cluster=cluster, traffic=kind)
            assert player.words.startswith(f"{cluster} · {kind}")
            loads = [max(moment["loads"].values(), default=0) for moment in player.show["moments"]]
            assert 0 < max(loads) <= 1
            assert len(loads) <= 64


def test_a_choice_seen_before_is_not_simulated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    player = TopologyExplorer()
    first = player.show
    player.choose(traffic="all to rank 0")
    monkeypatch.setattr("dtlab.widgets.topology.simulate", None)
    player.choose(traffic="half to half, unequal")
    assert player.show == first


def test_traffic_that_fails_is_told_in_words_and_the_drawing_stays() -> None:
    def stuck(comm: Comm) -> None:
        comm.recv(torch.empty(1), (comm.rank + 1) % comm.size)

    player = TopologyExplorer({"racks": racks(2, 2)}, {"two flows": two_flows, "stuck": stuck})
    player.choose(traffic="stuck")
    assert "deadlock" in player.words
    player.forward()  # still the run that is there
    assert "racks · two flows" in player.words
    with pytest.raises(Deadlock):
        TopologyExplorer({"racks": racks(2, 2)}, {"stuck": stuck})


def test_its_still_shows_any_time() -> None:
    player = two_racks()
    assert "at 1 s of 4 s" in player.static().alt
    assert "1 → 3: 1 MB/s" in player.static(3.5).alt


# ---- on a page without a kernel ---------------------------------------------------------------


def test_what_a_page_may_choose_is_what_the_kernel_would_answer(
        monkeypatch: pytest.MonkeyPatch) -> None:
    from dtlab.widgets import schedule, stepper, topology

    monkeypatch.setattr(stepper, "ON_A_PAGE", stepper.ON_A_PAGE[1:3])
    modules: tuple[Any, ...] = schedule, stepper, topology
    for module, player in zip(modules, (ScheduleExplorer(), Stepper(), TopologyExplorer()),
                              strict=True):
        runs = module.runs()
        assert len(runs) > 40
        for run in runs[::37]:
            player.choose(**run["choice"])
            assert player.show == run["show"]
