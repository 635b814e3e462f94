"""What chapter 11 says in prose is true; each sentence is looked up there, then recomputed."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import pytest
import torch

from dtlab import Comm, ConfigError, cost, plots, simulate
from dtlab.collectives import all_reduce
from dtlab.models import GPT, SHAPES, GPTConfig, text_batch
from dtlab.parallel import MemoryMeter, Mesh, tensor
from dtlab.parallel.planner.device import A100
from dtlab.plots.mesh import crossings, machines_of
from dtlab.topology import compose, nvswitch, racks, uniform
from tests.notebooks.chapter import Chapter
from tests.parallel.silent_bugs import BUGS

CHAPTER = Chapter("11")
printed = CHAPTER.printed
CLUSTER = compose(nvswitch(8, bandwidth_Bps=300e9), racks(1, 2, bandwidth_Bps=12.5e9))


def ran(*cells: str) -> dict[str, Any]:
    """The names that the chapter's setup and these cells leave."""
    with contextlib.redirect_stdout(io.StringIO()):
        return CHAPTER.defined("setup", *cells)


def test_the_order_of_the_axes_is_all_that_changes(prose: str) -> None:
    assert "one port of 12.5 GB/s for all eight GPUs of a machine" in prose

    def a_layer(comm: Comm, axes: dict[str, int]) -> None:
        x = torch.empty(2048 * 8192, dtype=torch.bfloat16, device="meta")
        all_reduce(Mesh(comm, **axes)["tp"], x, algorithm="ring")

    near, far = (simulate(a_layer, axes, network=CLUSTER, trace=False).elapsed_s
                 for axes in ({"dp": 2, "tp": 8}, {"tp": 8, "dp": 2}))
    assert far > 20 * near
    assert "each group lies half here and half there" in prose
    assert machines_of(CLUSTER) == [list(range(8)), list(range(8, 16))]
    assert crossings({"tp": 8, "dp": 2}, machines_of(CLUSTER)) == {"tp": (0, 2), "dp": (8, 0)}
    assert crossings({"dp": 2, "tp": 8}, machines_of(CLUSTER)) == {"tp": (2, 0), "dp": (0, 8)}


def test_a_mesh_is_drawn_on_the_machines_that_there_are() -> None:
    picture = plots.mesh({"pp": 2, "dp": 2, "tp": 4}, CLUSTER)
    texts = [text.get_text() for text in picture.axes[0].texts]
    assert texts[:2] == ["0", "0,0,0"]
    assert texts[-2:] == ["15", "1,1,3"]
    with pytest.raises(ConfigError, match=r"has 4 ranks, but .* has 16"):
        plots.mesh({"tp": 4}, CLUSTER)


def test_four_all_reduces_a_layer(prose: str) -> None:
    assert "Four all-reduces a layer, of b·s·h elements" in prose
    for t in (2, 4, 8):
        one = 2 * (t - 1) / t * 3 * 16 * 64
        assert cost.tensor_parallel_bytes(t, 3, 16, 64, itemsize=1) == 4 * one


def test_the_parts_of_a_layer_that_tensor_parallelism_leaves(prose: str) -> None:
    assert "10 of the 34 bytes that a layer keeps for each element of b·s·h" in prose
    assert "besides attention's scores, which are cut by heads" in prose
    for t in (1, 8):
        plain, selective = (cost.activation_bytes(1, 100, 64, 8, tensor=t, recompute=how)
                            for how in ("none", "selective"))
        assert plain - selective == pytest.approx(5 * 8 * 100**2 / t)
        assert selective == pytest.approx((10 + 24 / t) * 100 * 64)


def test_numbers_of_real_models(prose: str) -> None:
    assert "128,256 of them for Llama 3" in prose
    assert SHAPES["Llama 3 70B"].vocab == 128_256


def test_what_the_loss_sends(prose: str) -> None:
    gathered, three = (int(line.partition(" B sent")[0].split()[-1].replace(",", ""))
                       for line in printed("vocab-bytes").splitlines())
    assert "each rank would send (t−1)/t · b·s·v numbers" in prose
    assert gathered == 3 / 4 * 64 * 32_000 * 4
    assert "The cell counts 24 B besides: how many logits each rank has" in prose
    assert three == 2 * 3 / 4 * 3 * 64 * 4 + 24


def test_what_an_a100_reaches(prose: str) -> None:
    assert "271 TFLOP/s a GPU (what an A100 reaches in bf16)" in prose
    assert A100.product_flops["bf16"] / 1e12 == pytest.approx(271, abs=0.5)


def test_what_sequence_parallelism_sends_besides(prose: str) -> None:
    assert "1,536 B more with t = 2, 2,304 B with t = 4" in prose
    assert "of the gradients of two norms and two biases, 6h elements of 8 bytes" in prose
    for t, more in ((2, 1536), (4, 2304)):
        assert 2 * (t - 1) / t * 6 * 32 * 8 == more
        plain, cut = (cost.tensor_parallel_bytes(t, 2, 16, 32, itemsize=8, sequence=sequence)
                      for sequence in (False, True))
        assert cut - plain == more


def more_than_a_fourth(heads: int) -> float:
    """Bytes of activations that a rank of four keeps of a layer, beside a fourth of one rank's."""
    def kept(comm: Comm, layers: int) -> int:
        gpt = GPT(GPTConfig(layers=layers, hidden=64, heads=heads, context=64))
        tensor.shard(gpt, comm, "regather")
        tokens, targets = text_batch(0, 4, 64)
        with MemoryMeter(gpt) as meter:
            tensor.vocab_cross_entropy(comm, gpt(tokens), targets).backward()
        return max(kinds["activations"] for _, kinds in meter.history)

    one, four = (simulate(kept, 3, network=uniform(t, 5e-6, 10e9)).values[0]
                 - simulate(kept, 2, network=uniform(t, 5e-6, 10e9)).values[0] for t in (1, 4))
    return four - one / 4


def test_what_regathering_keeps_and_sends(prose: str) -> None:
    _, none, kept, again = printed("sequence-memory").splitlines()
    assert "Here ÷ 3.5, not ÷ 4" in prose
    assert "÷ 3.5" in again
    assert "If the gathered inputs stay, it is ÷ 2.9" in prose
    assert "÷ 2.9" in kept
    assert "÷ 2.3" in none
    assert "attention's mask isn't cut, and with one head a rank it keeps two copies more" in prose
    copy, mask = 4 * 64 * 64 * 4 / 4, 64 * 64  # bytes: of b·s·h/t numbers; of s² truth values
    one_head, two_heads = more_than_a_fourth(heads=4), more_than_a_fourth(heads=8)
    assert two_heads == pytest.approx(mask * 3 / 4, abs=1024)  # norms' weights, too
    assert one_head - two_heads == 2 * copy
    assert "that is regather, for a quarter more bytes" in prose
    plain, more = (cost.tensor_parallel_bytes(4, 4, 64, 64, sequence=sequence)
                   for sequence in (True, "regather"))
    assert more / plain == pytest.approx(1.25, abs=0.01)


def test_tensor_parallelism_loses_on_exposure_not_on_bytes(prose: str) -> None:
    data, both, idle, machine = ([float(x) for x in re.findall(r"([\d.]+) (?:GB|ms)", line)]
                                 for line in printed("against-run").splitlines())
    assert "With 16 samples tensor parallelism sends fewer bytes, and is slower" in prose
    assert both[0] < data[0]
    for port in (1, 2):  # milliseconds with one, and with one for each GPU
        assert data[port] < both[port]
        assert 3 * machine[port] < idle[port]  # data parallelism alone leaves 14 of 16 idle
    assert "With 2 samples it can use 2 of the 16 GPUs, and tensor parallelism a whole machine" in (
        prose)
    assert "the messages take four times as long as the products" in prose
    products, *_, far = re.findall(r"([\d.]+) ms", printed("wires-run"))
    assert float(far) / float(products) == pytest.approx(4, abs=0.3)


def test_what_tensor_parallelism_loses_on(prose: str) -> None:
    assert "Half of the 52 ms that it loses are its own messages" in prose
    assert "All eight samples in one pass: 604 and 187 ms, so with one port it wins" in prose
    chapter = ran("wires-run", "against-run")
    source = CHAPTER.source("against-run").partition("for samples, axes")[0]

    def step(source: str, ports: str, dp: int) -> float:
        scope = dict(chapter)
        exec(source, scope)
        return 1e3 * simulate(scope["step_of"], {"dp": dp, "tp": 16 // dp}, 16,
                              network=chapter[ports], trace=False).elapsed_s

    silent = source.replace("if tp.size > 1", "if False")
    together = source.replace(
        '("forward", 1), ("backward", 2)] * (samples // dp.size)',
        '("forward", samples // dp.size), ("backward", 2 * samples // dp.size)]').replace(
        "activation(), algorithm", "activation().repeat(samples // dp.size), algorithm")
    assert len({source, silent, together}) == 3
    for ports, one_pass in (("CLUSTER", 604), ("EIGHT_PORTS", 187.5)):
        alone, both = (step(source, ports, dp) for dp in (16, 2))
        assert both - alone == pytest.approx(52, abs=0.5)
        assert both - step(silent, ports, 2) == pytest.approx(26, abs=1)
        assert step(together, ports, 2) == pytest.approx(one_pass, abs=0.5)
        assert (step(together, ports, 2) < alone) == (ports == "CLUSTER")


def test_more_replicas_do_not_make_a_model_fit(prose: str) -> None:
    assert "more replicas don't make a model fit into 80 GB" in prose
    whole, replicated, cut = (float(x) for x in re.findall(r"([\d.]+) GB", printed("fit-run")))
    state = cost.model_state_bytes(SHAPES["Llama 3 8B"].parameters)
    assert whole == replicated == pytest.approx(state / 1e9, abs=0.05)
    assert whole > 80 > cut


def test_zero_sends_weights_and_tensor_parallelism_activations(prose: str) -> None:
    assert "So it sends weights, and tensor parallelism activations" in prose
    cut, zero = ([int(x.replace(",", "")) for x in re.findall(r"([\d,]+\d{3})\b", line)]
                 for line in printed("zero-run").splitlines())
    assert len(set(zero)) == 1
    assert cut[2] / cut[0] == pytest.approx(4, rel=0.01)


def test_a_net_of_two_groups_on_two_ranks_is_one_device(prose: str) -> None:
    assert "Three of the five convolutions are grouped" in prose
    chapter = ran("cuts-run", "mlp", "mlp-run", "alexnet-run")
    assert printed("alexnet-run").count("gradient of one device: True") == 4
    assert "half the weights that it would have if each kernel saw all channels" in prose
    _, seen, *_ = chapter["KERNELS"]["second"]
    assert 2 * seen == chapter["KERNELS"]["first"][0]
    # what moves: the crossed layer's input, forward and backward, and the logits; no other layer's
    trace = simulate(chapter["two_groups"], network=chapter["NETWORK"][2]).trace
    crossed, logits = 32 * 16 * 2 * 2, 32 * 10  # elements
    weights = sum(w.numel() for w in simulate(
        chapter["two_groups"], network=chapter["NETWORK"][1]).values[0][1])
    # an all-gather and a reduce-scatter; an all-reduce; the test's own gather of the gradients
    assert trace.sent_bytes(0) == 8 * (crossed / 2 * 2 + logits + weights / 2)


def test_seven_of_ten_bugs_are_silent(prose: str) -> None:
    assert "ten such bugs from public issues" in prose
    assert "Seven are silent: their first loss is right. Three show in the first loss" in prose
    assert [bug.silent for bug in BUGS.values()].count(True) == 7
    assert len(BUGS) == 10


def test_the_lies_have_a_right_forward_pass_and_wrong_gradients(prose: str) -> None:
    assert "On two ranks the loss of both is one device's, and their gradients are not" in prose
    lies = re.findall(r"loss ([\d.]+) and ([\d.]+); \w+'s gradient off by (\d+)%",
                      printed("more-lies"))
    assert [(one == two, int(off)) for one, two, off in lies] == [(True, 100), (True, 40)]
    assert printed("types-declared").startswith("refused: the loss is Replicated")


def test_the_letters_are_introduced_before_a_picture_shows_them() -> None:
    order = list(CHAPTER.cells)
    assert [name for name in order if "**P** Partial" in CHAPTER.source(name)] == ["letters"]
    assert order.index("letters") < order.index("explorer")


def test_the_source_of_an_exercise_is_not_printed() -> None:
    assert not any("source(tensor.vocab_cross_entropy" in source
                   for source in CHAPTER.sources("code"))


def test_the_picture_says_what_moves() -> None:
    forward, backward = (plots.sharded_matrix("MLP", 4, back, 1000, 100).alt
                         for back in (False, True))
    whole = 1000 * 100 * 2
    assert f"{2 * 3 / 4 * whole / 1e3:.0f} kB" in forward
    assert forward.index("copy_to: nothing moves") < forward.index("reduce_from: all-reduce")
    assert backward.index("reduce_from: nothing moves") < backward.index("copy_to: all-reduce")
