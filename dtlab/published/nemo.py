"""Training steps with eight-bit products that NVIDIA has measured on 4 to 1,024 H100, with tensor,
pipeline and context parallelism, each beside the planner's prediction; and DeepSeek-V3's training.

Source: NeMo's documentation, performance summary of release 24.07, and of 24.03 for long contexts.
The nine models gave `NEMO`; Llama 2 7B with contexts of 4,096 to 1,048,576 positions checks it, and
DeepSeek-AI 2024 (table 1; §3.2 and 4.2), with a V of DualPipe and the H100's NVLink for an H800's.
Attention keeps FlashAttention 2's rate. Two rows are said not to fit: that products keep their
inputs in eight bits isn't modelled. Gradients are assumed to be kept in bf16.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from dtlab.models import SHAPES, Shape, gpt_shape
from dtlab.parallel.planner import H100, RECIPES, Layout, Plan, Recipe, Software, predict
from dtlab.parallel.planner.device import servers
from dtlab.published.figure import Published

NVIDIA = "NVIDIA, NeMo's performance summary, 2024"
NEMO = Software(0.74, source="NeMo's steps of nine models")


class NemoRow(NamedTuple):
    """tokens: a second and GPU, as measured."""

    name: str
    shape: Shape
    gpus: int
    batch: int
    micro_batch: int
    tp: int
    pp: int
    cp: int
    chunks: int
    tokens: float


def _gpt(layers: int, hidden: int, heads: int) -> Shape:
    return gpt_shape(layers, hidden, heads, attention="flash")


MODELS = [
    NemoRow("GPT-3 5B", _gpt(24, 4096, 32), 64, 2048, 4, 1, 1, 1, 1, 23406),
    NemoRow("GPT-3 20B", _gpt(44, 6144, 48), 64, 256, 2, 2, 1, 1, 1, 5851),
    NemoRow("GPT-3 175B", _gpt(96, 12288, 96), 128, 256, 1, 4, 8, 1, 6, 716),
    NemoRow("GPT-3 175B", _gpt(96, 12288, 96), 512, 2048, 2, 4, 8, 1, 6, 825),
    NemoRow("Llama 2 7B", SHAPES["Llama 2 7B"], 8, 128, 1, 1, 1, 1, 1, 16934),
    NemoRow("Llama 2 13B", SHAPES["Llama 2 13B"], 16, 128, 1, 1, 4, 1, 10, 8715),
    NemoRow("Llama 2 70B", SHAPES["Llama 2 70B"], 64, 128, 1, 4, 4, 1, 20, 1728),
    NemoRow("Llama 3 8B", SHAPES["Llama 3 8B"], 8, 128, 1, 1, 1, 2, 1, 12273),
    NemoRow("Llama 3 70B", SHAPES["Llama 3 70B"], 64, 128, 1, 4, 4, 2, 5, 1524)]
_LLAMA = SHAPES["Llama 2 7B"]
CONTEXTS = [NemoRow(f"Llama 2 7B, {1024 * k:,} positions", _LLAMA._replace(positions=1024 * k), k,
                    4096 // k, 1, *axes, 1, tokens)
            for k, axes, tokens in (
                (4, (1, 1, 1), 16671), (8, (1, 2, 1), 13907), (16, (2, 1, 1), 10082),
                (32, (2, 1, 2), 6687), (64, (4, 1, 2), 4021), (128, (4, 1, 4), 2260),
                (256, (4, 1, 8), 1214), (512, (8, 1, 16), 635), (1024, (8, 1, 32), 318))]


def nemo_plan(row: NemoRow) -> Plan:
    """Return the predicted plan of a row: activations, keys and values travel beside computation,
    and the loss's kernel is fused."""
    mesh = {"pp": row.pp, "dp": row.gpus // (row.tp * row.pp * row.cp), "cp": row.cp, "tp": row.tp}
    chunks = row.chunks if row.shape.layers % (row.pp * row.chunks) == 0 else 1
    layout = Layout(mesh, row.micro_batch, row.batch // mesh["dp"] // row.micro_batch,
                    "interleaved" if chunks > 1 else "1F1B", chunks, stage=1,
                    sequence=row.tp > 1, regather=False, overlap_tp=True)
    return predict(row.shape, servers("h100", max(1, row.gpus // 8), min(8, row.gpus)), layout,
                   device=H100, precision=Recipe("fp8", loss=0), software=NEMO)


def nemo_tokens(row: NemoRow) -> float:
    """Tokens a second and GPU, predicted."""
    return row.batch * row.shape.positions / nemo_plan(row).step_s / row.gpus


def deepseek_hours() -> float:
    """Return the GPU hours predicted for 14.8 T tokens on 2,048 GPUs."""
    layout = Layout({"pp": 16, "dp": 2, "ep": 64}, 1, 120, "DualPipe-V", 2, 1, "selective",
                    balanced=True, overlap_tp=True)
    found = predict(SHAPES["DeepSeek-V3"], servers("h100", 256), layout, device=H100,
                    precision=RECIPES["fp8"]._replace(loss=0), software=NEMO)
    return 14.8e12 / layout.batch / 4096 * found.step_s * 2048 / 3600


def nemo_rows() -> list[Published]:
    rows = [Published(NVIDIA, f"{row.name} on {row.gpus} H100, tp={row.tp}, pp={row.pp}, "
                              f"cp={row.cp}, predicted", row.tokens, "tokens/s a GPU",
                      partial(nemo_tokens, row), 0.08 * row.tokens)
            for row in [*MODELS, *CONTEXTS]]
    return [*rows, Published(
        "DeepSeek-AI, DeepSeek-V3, 2024, table 1", "14.8 T tokens on 2,048 H800: hours of a GPU, "
        "predicted", 2664, "thousand hours", lambda: deepseek_hours() / 1000, 0.1 * 2664)]
