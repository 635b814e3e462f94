"""What chapter 14 says in prose is true; each sentence is looked up there, then recomputed."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat

from dtlab.models import SHAPES
from dtlab.parallel import Layout, predict
from dtlab.parallel.planner import COMPILED, H100, HEADROOM, MEGATRON, cluster, wires
from dtlab.parallel.planner.wires import wire_of
from dtlab.published import MEGATRON_TABLE_1, MEGATRON_TABLE_2, megatron_plan
from dtlab.published.layouts import measured_layouts
from dtlab.topology import compose, nvswitch, uniform

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = nbformat.read(ROOT / "notebooks" / "14_all_together.ipynb", as_version=4)
LLAMA, LARGE, HUGE = (SHAPES[f"Llama 3 {size}"] for size in ("8B", "70B", "405B"))


def output(name: str) -> str:
    """What the cell of this name prints."""
    (text,) = [cell.outputs[0].text for cell in NOTEBOOK.cells if cell.id == name]
    return str(text)


def numbers(name: str, pattern: str) -> list[float]:
    return [float(text.replace(",", "")) for text in re.findall(pattern, output(name))]


def test_the_order_of_axes_makes_a_step_three_times_as_long(prose: str) -> None:
    assert "C Two to four times as long." in prose
    shared = compose(nvswitch(8), uniform(2, 3e-6, 25e9), nic_Bps=25e9)
    inside, spread = (predict(LLAMA, shared, Layout(mesh, 1, 8, stage=1))
                      for mesh in ({"dp": 2, "tp": 8}, {"tp": 8, "dp": 2}))
    assert f"{spread.step_s / inside.step_s:.1f}" == "3.1"
    assert round(spread.terms["tensor parallel"] / inside.terms["tensor parallel"]) == 23
    (answers,) = [cell.source for cell in NOTEBOOK.cells if cell.id == "guess-compare"]
    assert answers.count("3.1 times") == 5
    assert "Messages take 23 times as long" in answers


def test_the_interleaved_sum_is_furthest_off(prose: str) -> None:
    assert "The interleaved one: its last rank has the output layer as well" in prose
    apart = [abs(percent) for percent in numbers("simulated", r"([+-]\d+\.\d)%")]
    assert len(apart) == 4
    assert apart[2] == max(apart) < 5


def test_megatrons_148_and_its_largest_model(prose: str) -> None:
    assert "148 TFLOP/s a GPU for this one" in prose
    assert "The largest model of Megatron-LM's paper ran with t = 8 and p = 64" in prose
    assert MEGATRON_TABLE_1[6][-1] == 148
    assert "six copies of that: 3072 GPUs for 1008 billion parameters" in prose
    assert MEGATRON_TABLE_1[-1][0] == 1008
    assert MEGATRON_TABLE_1[-1][4:7] == (8, 64, 3072)


def test_all_ways_train_as_one_device(prose: str) -> None:
    assert "seven times the same curve" in prose
    assert output("hybrid-run").count("as on one device") == 7


def test_flash_attention_halves_the_step_and_keeps_an_eighth(prose: str) -> None:
    assert "the step takes half the time, and the activations an eighth of the memory" in prose
    device, box = cluster("h100:8x8")
    stored, flash = (predict(LLAMA._replace(attention=kind), box, Layout({"dp": 64}, 1, 4, stage=3),
                             device=device) for kind in ("stored", "flash"))
    assert round(stored.step_s / flash.step_s, 1) == 2.1
    assert round(stored.memory["activations"] / flash.memory["activations"]) == 8
    assert "eight billion parameters don't fit into 80 GB without recomputation" in prose
    assert stored.why_not
    assert not flash.why_not


def test_the_spread_of_all_layouts_and_the_ties(prose: str) -> None:
    assert "The best is thirty times as fast as the worst." in prose
    steps = numbers("plan", r": ([\d.e+]+) s,")
    assert round(max(steps) / min(steps)) == 30
    assert "the best 24 are a tie" in prose
    assert "24 are within 10%" in output("plan")
    assert f"{HEADROOM:.0%}".replace("%", " %") + " of the memory stay free" in prose


def test_who_trains_alone(prose: str) -> None:
    lines = output("table").splitlines()
    rates = [float(found[1].replace(",", "")) if (found := re.search(r"(?:alone|cut) +([\d,]+)",
             line)) else None for line in lines]
    small, large = rates[1:7], rates[8:]
    assert all(alone > cut for alone, cut in zip(small[::2], small[1::2], strict=True))
    assert "alone it fits only with full recomputation, which costs 14 %" in prose
    assert all("full recomputation" in line for line in lines[8:13:2])
    assert round(100 * (large[1] / large[0] - 1)) == 14
    assert "1,024 GPUs can't share 512 samples alone" in prose
    assert large[6] is None
    assert large[7]


def test_what_the_network_buys(prose: str) -> None:
    assert "An eighth of the network costs 3 to 5 %, if the layout is chosen for it" in prose
    best = numbers("network", r"network: +([\d.]+) s")
    alone = numbers("network", r"FSDP alone +([\d.]+) s")
    for first in (0, 5):
        assert 2 < 100 * (best[first + 2] / best[first] - 1) < 5
    assert "at a thirty-second FSDP alone takes more than three times as long for 70 B" in prose
    assert alone[9] > 3 * best[9]


def test_why_llama_3_is_laid_out_as_it_is(prose: str) -> None:
    lines = {line[:27].strip(): line for line in output("llama-405b").splitlines()[1:]}
    flops = {name: float(line[27:].split()[0]) for name, line in lines.items()}
    assert "The prediction for theirs is 420 TFLOP/s where they measured 430." in prose
    theirs = flops.pop("theirs: pp 16, dp 64, tp 8")
    assert theirs == 420
    fits = [name for name in flops if "does not fit" not in lines[name]]
    assert {"tp 4", "pp 8"} == {*flops} - {*fits}
    assert all(flops[name] < theirs for name in fits)
    assert "gathering a layer takes longer than computing it forward (22 ms against 12)" in prose
    _, topology = cluster("h100:1024x8")
    layout = Layout({"dp": 1024, "tp": 8}, 1, 2, stage=3, recompute="selective", sequence=True)
    found = predict(HUGE, topology, layout, device=H100, software=COMPILED)
    assert found.work is not None
    gather_s = wire_of(layout.mesh, "dp", wires(topology)).ring_s(
        1024, 2 * found.work.layer_parameters)
    assert (round(gather_s * 1e3), round(found.work.forward_s * 1e3)) == (22, 12)


def test_rails_and_overlap_would_make_zero_3_of_2021_too_fast(prose: str) -> None:
    assert "would be predicted two to four times as fast" in prose
    for row in (row for row in MEGATRON_TABLE_2 if row[9]):
        _, topology = cluster(f"a100:{row[6] // 8}x8")
        shown = megatron_plan(*row[:-1])
        assert shown.work is not None
        today = predict(_shape(row), topology, shown.layout._replace(overlap=True),
                        software=MEGATRON)
        assert 1.7 < today.device_flops / shown.device_flops < 4.2


def _shape(row: tuple[object, ...]):  # type: ignore[no-untyped-def]
    from dtlab.models import gpt_shape

    return gpt_shape(*row[1:4])  # type: ignore[arg-type]


def test_how_many_layouts_were_measured(prose: str) -> None:
    rows = measured_layouts()
    assert "286 layouts of two Llama-like models" in prose
    assert sum(row.clean for row in rows) == 286
    assert len(rows) == 887
    assert "the 22 rows of Megatron-LM's tables" in prose
    assert len([*MEGATRON_TABLE_1, *MEGATRON_TABLE_2]) == 22
