"""Every picture is honest, legible and complete, for all that it may be asked to show."""

import subprocess
import sys
from collections.abc import Callable

import matplotlib as mpl
import numpy as np
import pytest

from dtlab import (
    ConfigError,
    Deadlock,
    RankFailed,
    Trace,
    goodput,
    plots,
    ps,
    recording,
    simulate,
)
from dtlab.errors import RankDied, Waiting
from dtlab.parallel.pipeline import one_f_one_b, zb_v
from dtlab.plots import Picture
from dtlab.plots.memory import KINDS
from dtlab.ps.gpu_placement import GPU_PLACEMENTS
from dtlab.recording import placements
from dtlab.topology import (
    Topology,
    compose,
    dragonfly,
    fat_tree,
    nvswitch,
    racks,
    send_together,
    torus,
    uniform,
    v100_nvlink,
)
from dtlab.units import bytes_text, seconds_text
from dtlab.widgets import FailureExplorer, OverlapExplorer
from dtlab.widgets.overlap import train_step
from dtlab.wires import contest, winners
from tests.plots.layout import off_page, overlaps, pixels, texts_of, title_of
from tests.plots.samples import overlapped_trace, ring_trace

SIZES = [2**k for k in range(6, 24, 2)]
HELD_OUT = [2**k for k in range(7, 25, 4)]


def times(sizes: list[int]) -> list[list[float]]:
    return [[(2e-5 + n * 2e-10) * (1 + 0.1 * k) for k in range(5)] for n in sizes]


def rows(count: int, name: str = "ring") -> list[tuple[str, float, list[float]]]:
    return [(f"{name}, {k} kB", 1e-5 * 10**k, [1.1e-5 * 10**k, 2e-5 * 10**k])
            for k in range(count)]


def to_half(cluster: Topology, at: float, title: str = "") -> Picture:
    """All of the first half send to the second, unequal amounts; `at`: share of the time."""
    half = cluster.ranks // 2
    pairs = {(rank, rank + half): 10**6 * (rank + 1) for rank in range(half)}
    run = simulate(send_together, pairs, network=cluster)
    return plots.flows(cluster, run.trace, at * run.elapsed_s, title=title)


def step_of(collective: str, algorithm: str, *which: int, step: int) -> Picture:
    """One frame of an algorithm on some ranks, with some root."""
    return plots.stepper(recording.stepper_frames(collective, algorithm, *which)[step])


UNEQUAL = racks(2, 4, latency_s=0)
UNEQUAL_RUN = simulate(send_together, {(r, r + 4): 10**6 * (r + 1) for r in range(4)},
                       network=UNEQUAL).trace
LEDGER = [(0.1 * t, dict.fromkeys(KINDS, 10**5 * (3 + t % 3))) for t in range(30)]
LONG = "a rather long name that nobody would give to an algorithm of theirs, or would they"
FLAT = simulate(train_step, "flat", 1, network=uniform(2, 1e-5, 1e9)).trace
LOSSES = {name: [[(t / 10, 2.0 / (1 + k + t)) for t in range(20)] for k in range(3)]
          for name in ("BSP", "ASP", "SSP")}
CLUSTERS = {"servers": compose(nvswitch(4), racks(2, 2)), LONG[:40]: v100_nvlink(),
            "grid": torus(3, 3), "alone": uniform(1, 5e-6, 1e10)}
ENTRIES = contest(CLUSTERS, [4000])
PICTURES: dict[str, Callable[[], Picture]] = {
    **{f"timeline {p}": lambda p=p: plots.timeline(ring_trace(p)) for p in (1, 2, 4, 5, 8, 16, 64)},
    **{f"timeline of {t} s": lambda t=t: plots.timeline(ring_trace(4, t))
       for t in (1e-12, 3.7e-3, 1.0, 1e5)},
    **{f"timeline with streams {p}": lambda p=p: plots.timeline(overlapped_trace(p))
       for p in (2, 3, 8, 32)},
    "timeline empty": lambda: plots.timeline(Trace(4)),
    "timeline long title": lambda: plots.timeline(ring_trace(4), LONG),
    "timeline window": lambda: plots.timeline(ring_trace(8), window=(2e-5, 5e-5)),
    **{f"ring {p}": lambda p=p: step_of("all_reduce", "ring", p, step=-1)
       for p in (1, 2, 4, 5, 8, 13, 16, 32)},
    **{f"{name} {p}": lambda name=name, p=p, step=step: step_of("all_reduce", name, p, step=step)
       for name, p, step in (("tree", 2, 1), ("tree", 5, 1), ("tree", 16, 1),
                             ("halving_doubling", 8, 1), ("halving_doubling", 6, 1),
                             ("binary_blocks", 12, 4), ("binary_blocks", 7, 3),
                             ("double_tree", 8, 1), ("double_tree", 13, 3))},
    **{f"double tree {p}": lambda p=p: plots.double_tree(p) for p in (1, 2, 8, 13, 32)},
    "flat broadcast": lambda: step_of("broadcast", "flat", 4, 2, step=0),
    "barrier": lambda: step_of("barrier", "dissemination", 8, step=1),
    **{f"cost {p}": lambda p=p: plots.cost_curves("all_reduce", ranks=p) for p in (1, 2, 8, 1024)},
    "cost measured": lambda: plots.cost_curves(
        "all_reduce", ranks=4, gamma=1e-11, measured={"ring": {4096: [3e-5, 4e-5], 10**6: [1e-3]}}),
    **{f"sheet {p}": lambda p=p: plots.before_and_after(p, p - 1) for p in (2, 4, 8)},
    **{f"{c} {p}": lambda c=c, p=p: step_of(*c.split(), p, p // 2, step=2)
       for p in (5, 9) for c in ("all_to_all bruck", "all_gather bruck", "broadcast chain",
                                 "reduce rabenseifner", "reduce_scatter recursive_halving",
                                 "scan recursive_doubling", "all_reduce double_tree")},
    "sweep": lambda: plots.sweep(lambda k: 1e-3 * k + 1 / k, {1: 1.001, 100: 0.11, 1000: 1.001},
                                 best=31.6, bound_s=0.05),
    "cost barrier": lambda: plots.cost_curves("barrier"),
    "cost slow": lambda: plots.cost_curves("broadcast", ranks=8, alpha=0.0, beta=1e-3),
    "fit": lambda: plots.fit(2e-5, 2e-10, SIZES, times(SIZES), (HELD_OUT, times(HELD_OUT))),
    "fit one": lambda: plots.fit(1e-4, 0.0, [1000], [1e-4]),
    "rows": lambda: plots.predicted_vs_measured(rows(6)),
    "rows long": lambda: plots.predicted_vs_measured(rows(2, LONG)),
    "rows one": lambda: plots.predicted_vs_measured([("x", 1e-6, 2e-6)]),
    **{f"grid {p}": lambda p=p: plots.rank_grid(p) for p in (1, 2, 4, 5, 7, 8, 16, 33, 64)},
    "grid values": lambda: plots.rank_grid([{"loss": 0.125, "name": LONG}, None, 3, LONG]),
    "topology 1": lambda: plots.topology(uniform(1, 5e-6, 1e10)),
    "topology 16": lambda: plots.topology(uniform(16, 5e-6, 1e10)),
    "torus": lambda: plots.topology(torus(4, 6)),
    "torus 3D": lambda: plots.topology(torus(3, 3, 2)),
    "V100": lambda: plots.topology(v100_nvlink()),
    "fat tree": lambda: plots.topology(fat_tree(4)),
    "dragonfly": lambda: plots.topology(dragonfly(4, 3, 2)),
    "servers in racks": lambda: plots.topology(compose(nvswitch(4), racks(2, 2))),
    "contest": lambda: plots.contest_table(ENTRIES),
    "contest of one": lambda: plots.contest_table(ENTRIES[:1], LONG),
    **{f"contest on {name[:8]}": lambda name=name: plots.contest_on(
        CLUSTERS[name], [e for e in ENTRIES if e.cluster == name], "torus") for name in CLUSTERS},
    "by ranks": lambda: plots.times_by_ranks(
        {"ring": {2: 1e-5, 64: 1e-3}, "tree": {2: 2e-5, 64: 1e-4}}, {"ring": {2: 1.1e-5}}),
    "by ranks, one": lambda: plots.times_by_ranks({"x": {3: 2.0}}, title=LONG, subtitle=LONG),
    **{f"flows {kind.__name__} {at}": lambda kind=kind, sizes=sizes, at=at: to_half(
           kind(*sizes), at) for kind, sizes in (
               (racks, (2, 4)), (fat_tree, (4,)), (torus, (4, 4)), (nvswitch, (8,)),
               (v100_nvlink, ()), (uniform, (5, 1e-6, float("inf"))), (racks, (4, 16)))
       for at in (0.01, 0.6, 1.0)},
    "flows long title": lambda: to_half(racks(2, 2), 0.5, LONG),
    "flows of servers": lambda: to_half(compose(nvswitch(4), racks(2, 2)), 0.5),
    "flows none": lambda: plots.flows(racks(2, 2), Trace(4, virtual=True)),
    "loads": lambda: plots.link_loads(UNEQUAL, UNEQUAL_RUN),
    "loads chosen": lambda: plots.link_loads(
        UNEQUAL, UNEQUAL_RUN, [("rack0", "spine"), (3, "rack0"), ("spine", "rack0")], title=LONG),
    "loads of many": lambda: plots.link_loads(UNEQUAL, UNEQUAL_RUN, list(UNEQUAL.graph().edges)),
    "loads none": lambda: plots.link_loads(racks(2, 2), Trace(4, virtual=True)),
    **{f"replicas {name}": lambda fates=fates: plots.replicas(recording.replica_run(**fates))
       for name, fates in {
           "calm": {"rule": ps.Chain()}, "killed": {"rule": ps.Leader(), "victim": 0, "event": 60},
           "cut": {"rule": ps.Chain(), "cut_s": 0.05},
           "healed": {"rule": ps.Leader(sync=False), "cut_s": 0.05, "healed_s": 0.1},
           "long title": {"rule": ps.Chain(), "name": LONG}}.items()},
    **{f"ring {servers} {v}": lambda servers=servers, v=v: plots.hash_ring(servers, v, ["a", "b"])
       for servers, v in ((1, (1, 2)), (4, (1, 16)), (6, (64, 256)))},
    "overlap": lambda: OverlapExplorer(ranks=2).static(),
    "overlap of two": lambda: plots.overlap({"flat": FLAT, LONG[:20]: FLAT}, note=LONG),
    "schedule": lambda: plots.schedule(one_f_one_b(4, 8)),
    "schedule of chunks": lambda: plots.schedule(zb_v(8, 16), title=LONG, comm=0.3),
    **{f"critical batch {critical}, {batch}":
       lambda c=critical, b=batch: plots.critical_batch(30, c, b, {4: 120, 64: 38})
       for critical, batch in ((16, 64), (16, 4), (4, 1 << 20), (1 << 16, 1))},
    "critical batch predicted": lambda: plots.critical_batch(1000, 2048, 2048),
    **{f"failures {answer}, {nodes} nodes": lambda answer=answer, nodes=nodes: plots.failures(
        goodput(nodes, 0.5, 60, 300, 1800, answer=answer, repair_s=7200, duration_s=2 * 86_400))
       for answer in ("restart", "shrink", "replicas") for nodes in (1, 8, 100)},
    "failures of seconds": lambda: plots.failures(goodput(4, 3000.0, 0.5, 2, 9, duration_s=90)),
    "failures, none": lambda: plots.failures(goodput(4, 0.0, 60, 300, 600), 86_400),
    "failures and curve": lambda: FailureExplorer().static(),
    "failures and curve, far off": lambda: FailureExplorer(24 * 3600, 30, 60, 8 * 3600).static(),
    "useful share": lambda: plots.useful_share(10, 300, 8861.5),
    "useful share, slow saves": lambda: plots.useful_share(3600, 60, 3600),
    "training time": lambda: plots.training_time("GPT-3", 300e9, "A100 (312 TFLOP/s, 80 GB)", 9),
    "training time, small": lambda: plots.training_time(1e8, 1e10, "V100 (125 TFLOP/s, 32 GB)", 1),
    "mesh": lambda: plots.mesh({"pp": 2, "dp": 2, "tp": 4}, compose(nvswitch(8), racks(1, 2))),
    "mesh across": lambda: plots.mesh({"tp": 4, "dp": 8}, compose(nvswitch(8), racks(1, 4))),
    "sharded MLP": lambda: plots.sharded_matrix("MLP, sequence parallel", 4),
    "sharded attention": lambda: plots.sharded_matrix("attention", 2, True),
    "server load": lambda: plots.server_load({"before": [900, 10, 0, 90], "after": [250] * 4}),
    "server load of many": lambda: plots.server_load({LONG: list(range(16))}, title=LONG),
    "topology 64": lambda: plots.topology(uniform(64, 0.0, float("inf"))),
    **{f"clocks {name}": lambda name=name, rule=rule, at=at: plots.clocks(
        recording.watch_clocks(rule, recording.PACES[name], name=LONG[:40]), at)
       for name, rule, at in (("uneven", ps.BSP(), None), ("one slow worker", ps.SSP(1), 1.1),
                              ("pauses", ps.BackupWorkers(1), 1.7))},
    "clocks 1": lambda: plots.clocks(recording.watch_clocks(ps.ASP(), lambda *_: 0.1, 1), 0.0),
    "clocks 12": lambda: plots.clocks(
        recording.watch_clocks(ps.BSP(), recording.PACES["pauses"], 12)),
    "loss": lambda: plots.loss_curves(LOSSES, "virtual time (s)"),
    "loss, one seed": lambda: plots.loss_curves({"a": [[(0, 2.0), (9, 1.0)]]}, "(gradients)",
                                                virtual=False),
    "loss sweep": lambda: plots.loss_sweep(
        {"a": {0.1: [0.2, 0.3], 0.4: [float("nan"), 9.0]}, "b": {0.1: [1.0], 0.2: [0.5]}},
        "step size (learning rate)", limits={"a": 0.3}),
    "staleness": lambda: plots.staleness_histograms(
        {f"{n}-softsync": {n: 30, n + 1: 20, 0: 1} for n in (1, 4, 8, 16)}),
    "staleness one": lambda: plots.staleness_histograms({"ASP": {0: 1}}),
    **{f"placement {where}, {gpus} GPUs, {switches} switches":
       lambda w=where, g=gpus, s=switches: plots.placement(placements(g, switches=s), w)
       for where in GPU_PLACEMENTS for gpus, switches in ((1, 1), (4, 1), (8, 1), (8, 2))},
    **{f"memory {model}, stage {stage}": lambda m=model, s=stage: plots.model_memory(m, 8, s)
       for stage, model in enumerate(("GPT-2 small", "7.5 B", "Llama 3 405B", "Llama 3 70B"))},
    "memory with activations": lambda: plots.model_memory(
        "Llama 3 405B", 16_384, 3, "Adam, float32 gradients", 32, "selective", 141e9),
    "memory ledger": lambda: plots.memory_ledger({"one": LEDGER, "two": LEDGER[:1]}),
    "memory ledger wide": lambda: plots.memory_ledger(
        {f"{LONG[:30]} {n}": LEDGER for n in range(4)}),
    "placement wide": lambda: plots.placement(placements(8, 123_456_788, 1.234e9)),
    "servers": lambda: plots.server_times(simulated={8: {1: 0.16, 4: 0.04, 16: 0.02}}),
    "servers predicted": plots.server_times,
    "servers of one": lambda: plots.server_times([1], 4_000, 1e9),
}


# What the title says of where the numbers are from.
SAYS = {
    "timeline 4": "simulated", "timeline empty": "measured", "ring 4": "simulated",
    "cost 8": "predicted", "cost measured": "predicted and measured", "fit": "measured",
    "rows": "measured", "flows racks 0.6": "simulated", "loads": "simulated",
    "replicas cut": "simulated", "server load": "simulated", "failures and curve": "simulated",
    "useful share": "predicted",
}
# Type is large enough for the last row.
LARGE = ("timeline 8", "ring 4", "ring 8", "tree 5", "cost 8", "fit", "rows", "grid 4",
         "flows racks 0.6", "flows torus 0.6", "loads")
assert {*SAYS, *LARGE} <= PICTURES.keys()


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_legible_can_be_read_aloud_and_has_units(name: str) -> None:
    picture = PICTURES[name]()
    data, metadata = picture._repr_mimebundle_()
    assert len(picture.alt) > 15
    assert data["text/plain"] == metadata["image/png"]["alt"] == picture.alt == repr(picture)
    image = pixels(data["image/png"])
    assert image.size == tuple(round(side * 100) for side in picture.get_size_inches())
    assert image.getpixel((0, 0)) == (255, 255, 255)  # solid, whatever the notebook's theme
    assert overlaps(picture) == []  # no text lies on another
    assert off_page(picture) == []
    ticks = " ".join(text for text, _ in texts_of(picture))
    for label in {each for axes in picture.axes for each in (axes.get_xlabel(), axes.get_ylabel())}:
        unit = any(f"({u})" in label for u in ("s", "ms", "µs", "ns", "bytes", "nats", "%",
                                               "updates", "gradients", "min",
                                               "hours", "days", "learning rate", "samples",
                                               "times the least"))
        assert unit or not label or any(f" {u}" in ticks for u in ("s", "ms", "µs", "ns")), label
    if name in SAYS:
        assert SAYS[name] in title_of(picture).lower()
    if name in LARGE:
        for text in picture.findobj(mpl.text.Text):
            assert not text.get_text().strip() or text.get_fontsize() >= 12, text.get_text()


@pytest.mark.parametrize("name", ["fit", "ring 4"])
def test_equal_pictures_have_equal_bytes_and_the_readers_own_style_changes_nothing(
    name: str
) -> None:
    before = PICTURES[name]()
    with mpl.rc_context():
        mpl.rcParams.update({"figure.facecolor": "black", "text.color": "white", "font.size": 5,
                             "axes.labelcolor": "white", "lines.linewidth": 1})
        again = PICTURES[name]()
        assert again.png() == before.png()
        assert again.svg() == before.svg()
        assert mpl.rcParams["font.size"] == 5


def test_pictures_need_no_pyplot() -> None:
    code = "import sys; from dtlab import plots; plots.rank_grid(2).png(); " \
           "sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_rank_has_its_colour_in_every_picture() -> None:
    blue = (0x16, 0x68, 0xE8)
    for name in ("timeline 4", "ring 4", "grid 4", "topology 16", "flows racks 0.6"):
        image = np.asarray(pixels(PICTURES[name]().png()))
        assert (image == blue).all(axis=2).sum() > 50, name


def test_the_grid_tells_what_was_returned_who_failed_and_who_waits() -> None:
    def fail(comm: object) -> None:
        raise ValueError("no luck")

    net = uniform(3, 1e-6, 1e9)
    picture = plots.rank_grid(simulate(lambda comm: comm.rank**2, network=net))
    assert "simulated" in title_of(picture)
    assert "rank 2 returned 4" in picture.alt
    with pytest.raises(RankFailed) as failed:
        simulate(fail, network=net, echo=False)
    assert "rank 0 failed ValueError: no luck" in plots.rank_grid(failed.value, ranks=3).alt
    with pytest.raises(Deadlock) as stuck:
        simulate(lambda comm: comm.recv_object((comm.rank + 1) % 3), network=net, echo=False)
    alt = plots.rank_grid(stuck.value).alt
    assert "rank 0 waiting recv from 1" in alt
    assert "rank 2 waiting recv from 0" in alt
    died = plots.rank_grid(RankDied("rank 1 was killed by SIGKILL", 1, -9), ranks=2)
    assert "rank 0 stopped; rank 1 died" in died.alt
    wait = Deadlock("stuck", [Waiting(0, "send", "1", 4), Waiting(1, "returned")])
    assert "rank 0 waiting send to 1; rank 1 returned" in plots.rank_grid(wait).alt


@pytest.mark.parametrize("bad", [
    lambda: plots.rank_grid(0),
    lambda: plots.rank_grid([]),
    lambda: plots.rank_grid(3, statuses=["idle"]),
    lambda: plots.rank_grid(ValueError("no ranks here")),
    lambda: plots.fit(1e-6, 1e-9, [1, 2], [1.0]),
    lambda: plots.fit(1e-6, 1e-9, [], []),
    lambda: plots.predicted_vs_measured([]),
    lambda: plots.cost_curves("gossip"),
    lambda: plots.before_and_after(1),
    lambda: plots.before_and_after(9),
    lambda: plots.before_and_after(4, collectives=["barrier"]),
    lambda: plots.before_and_after(4, collectives=["gossip"]),
    lambda: plots.sweep(float, {1: 1.0}, best=1, bound_s=1.0),
    lambda: plots.sweep(float, {0: 1.0, 1: 1.0}, best=1, bound_s=1.0),
    lambda: plots.cost_curves("all_reduce", ["telepathy"]),
    lambda: plots.cost_curves("all_reduce", sizes=(10, 5)),
    lambda: plots.timeline(Trace(2), window=(2.0, 1.0)),
    lambda: plots.loss_curves({}, "(s)"),
    lambda: plots.loss_curves({"a": [[]]}, "(s)"),
    lambda: plots.loss_sweep({"a": {}}, "x"),
    lambda: plots.staleness_histograms({"a": {}}),
    lambda: recording.watch_clocks(ps.ASP(), lambda *_: 0.1, workers=0),
    lambda: plots.clocks(recording.watch_clocks(ps.ASP(), lambda *_: 1.0, end_s=1.0), 1.5),
    lambda: plots.model_memory("GPT-9"),
    lambda: plots.model_memory(recipe="telepathy"),
    lambda: plots.memory_ledger({}),
    lambda: plots.memory_ledger({"a": []}),
    lambda: plots.placement(placements(), "on the moon"),
    lambda: plots.placement(placements(9)),
    lambda: placements(3, switches=2),
    lambda: plots.server_times([]),
    lambda: plots.server_times([2], simulated={3: {1: 1.0}}),
    lambda: plots.contest_table([]),
    lambda: plots.contest_table([*ENTRIES, ENTRIES[0]._replace(nbytes=8)]),
    lambda: plots.contest_on(CLUSTERS["grid"], ENTRIES, "ring"),
    lambda: plots.contest_on(CLUSTERS["grid"], ENTRIES[-6:], "telepathy"),
    lambda: plots.contest_on(CLUSTERS["grid"], [], "ring"),
    lambda: plots.times_by_ranks({}),
    lambda: plots.times_by_ranks({"ring": {0: 1.0}}),
    lambda: plots.times_by_ranks({"ring": {4: 0.0}}),
    lambda: plots.flows(racks(2, 2), Trace(4)),
    lambda: plots.flows(racks(2, 2), Trace(3, virtual=True)),
    lambda: plots.link_loads(UNEQUAL, UNEQUAL_RUN, [("rack0", "rack1")]),
    *(lambda s=s, v=v: plots.hash_ring(s, v) for s, v in (
        (4, (1,)), (4, 16), (4, (0, 16)), (0, (1, 16)))),
    lambda: plots.server_load({}),
    lambda: plots.server_load({"x": []}),
    *(lambda fate=fate: recording.replica_run(ps.Chain(), **fate) for fate in (
        {"victim": 3}, {"cut_s": 0.0}, {"cut_s": 0.1, "healed_s": 0.05})),
])
def test_nonsense_is_a_config_error(bad: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        bad()


@pytest.mark.parametrize("switches", [1, 2])
def test_labels_of_links_side_by_side_read_as_several(switches: int) -> None:
    labels = [box for text, box in texts_of(plots.placement(placements(8, switches=switches)))
              if text == "160 MB"]
    gaps = [right.x0 - left.x1 for left in labels for right in labels
            if right.x0 > left.x0 and abs(left.y0 - right.y0) < 5]
    assert min(gaps) > 12  # pixels


def test_the_picture_of_a_double_tree_says_who_is_inside() -> None:
    alt = plots.double_tree(8).alt
    assert alt.endswith("first half: 0, 2, 4, 6; in that of the second: 1, 3, 5, 7.")
    with pytest.raises(ConfigError, match="take 32 or fewer"):
        plots.double_tree(33)


def test_the_table_marks_the_fastest_of_each_cluster_with_a_star() -> None:
    texts = [text for text, _ in texts_of(plots.contest_table(ENTRIES))]
    starred = [text for text in texts if text.startswith("★ ") and "fastest" not in text]
    assert len(starred) == len(winners(ENTRIES))
    for cluster in ("servers", "grid"):
        least = min(e.elapsed_s for e in ENTRIES if e.cluster == cluster)
        assert f"★ {seconds_text(least)}" in starred


def test_the_busiest_link_is_named_with_its_bytes() -> None:
    tree = next(e for e in ENTRIES if (e.cluster, e.algorithm) == ("servers", "tree"))
    a, b = tree.busiest
    alt = plots.contest_on(CLUSTERS["servers"], [tree], "tree").alt
    assert f"busiest link, {a} → {b}" in alt
    assert f"carries {bytes_text(tree.crossed[a, b])}" in alt
    assert f"tree {seconds_text(tree.elapsed_s)}" in alt


@pytest.mark.parametrize("nbytes", [4000, 10**6, 160 * 10**6])
@pytest.mark.parametrize("cluster", [nvswitch(2), v100_nvlink(), racks(4, 8), torus(8, 8)],
                         ids=lambda cluster: str(cluster.ranks))
def test_the_marks_of_a_contest_fill_its_axes(cluster: Topology, nbytes: int) -> None:
    found = contest({"here": cluster}, [nbytes])
    axes = plots.contest_on(cluster, found, "ring").axes[1]
    ends = np.log([t for e in found for t in (e.elapsed_s, max(e.needed_s.values()))])
    low, high = np.log(axes.get_xlim())
    assert high > ends.max()  # each mark is on the axes
    assert min(np.log(e.elapsed_s) for e in found) > low
    assert ends.max() - ends[ends > low].min() > 0.75 * (high - low)


def test_a_schedule_says_which_shade_is_which_chunk_if_there_are_several() -> None:
    one, two = (texts_of_legend(plots.schedule(plan)) for plan in (one_f_one_b(2, 4), zb_v(2, 4)))
    assert not any("chunk" in text for text in one)
    assert two[-2:] == ["chunk 1", "chunk 2 of 2"]


def test_a_schedule_has_seconds_on_its_lowest_axis() -> None:
    for held in (True, False):
        assert plots.schedule(one_f_one_b(2, 4), held=held).axes[-1].get_xlabel() == "time (s)"


def texts_of_legend(picture: Picture) -> list[str]:
    return [text.get_text() for text in picture.legends[0].get_texts()]


def test_a_bucket_has_no_ranks_color_and_the_exposed_part_is_in_the_legend() -> None:
    picture = plots.overlap({"flat": FLAT})
    drawn = {mpl.colors.to_hex(bar.get_facecolor()) for bar in picture.axes[0].patches}
    assert not drawn & {plots.rank_color(rank) for rank in range(32)}
    assert texts_of_legend(picture)[-1] == "exposed: only communication"


def test_a_loss_that_hardly_falls_has_three_ticks_or_more() -> None:
    axes = plots.loss_curves({"a": [[(0, 5.4), (1, 4.6), (2, 3.9)]]}, "steps").axes[0]
    low, high = axes.get_ylim()
    assert sum(low <= tick <= high for tick in axes.get_yticks()) >= 3


def test_the_words_of_a_machine_write_a_slow_byte_in_microseconds() -> None:
    picture = plots.cost_curves("broadcast", ranks=4, alpha=1e-5, beta=1e-6)
    assert "β = 1 µs/B (1 MB/s)" in picture.alt
