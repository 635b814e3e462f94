"""A layer of a Llama on one GPU, whole and cut for tensor parallelism: what it takes and keeps,
beside what the planner says of it.

    python benchmarks/layer.py ["Llama 3 8B" …]

Times are medians of ten, forward and backward together, eager and compiled, without any messages.
Bytes are what the forward keeps for backward, beside the parameters.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from dtlab.models.shapes import SHAPES, Shape
from dtlab.parallel.planner.device import COMPILED, DEVICES, EAGER, Software
from dtlab.parallel.planner.layout import Layout
from dtlab.parallel.planner.work import RECIPES, work_of

REPEATS = 10
POSITIONS = 4096


class Layer(nn.Module):
    """One of t slices of a layer, as a tensor-parallel rank has it."""

    def __init__(self, shape: Shape, t: int):
        super().__init__()
        h, each = shape.hidden, shape.hidden // shape.heads
        self.heads, self.kv_heads, self.each = shape.heads // t, max(shape.grouped // t, 1), each
        self.norm, self.mlp_norm = nn.RMSNorm(h), nn.RMSNorm(h)
        self.query = nn.Linear(h, self.heads * each, bias=False)
        self.key, self.value = (nn.Linear(h, self.kv_heads * each, bias=False) for _ in range(2))
        self.out = nn.Linear(self.heads * each, h, bias=False)
        self.gate, self.up = (nn.Linear(h, shape.width // t, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.width // t, h, bias=False)
        angles = torch.outer(torch.arange(POSITIONS), 1e4 ** (-torch.arange(0, each, 2) / each))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def rotated(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return torch.cat([left * self.cos - right * self.sin, right * self.cos + left * self.sin],
                         -1)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        normed = self.norm(x)
        q, k, v = (layer(normed).view(b, s, heads, self.each).transpose(1, 2)
                   for layer, heads in ((self.query, self.heads), (self.key, self.kv_heads),
                                        (self.value, self.kv_heads)))
        mixed = scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=True,
                                             enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, -1))
        normed = self.mlp_norm(x)
        return x + self.down(silu(self.gate(normed)) * self.up(normed))


def seconds(call: Callable[[], None]) -> float:
    """Median time of a call on the GPU, after three that warm up."""
    times = []
    for number in range(REPEATS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if number >= 3:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measured(shape: Shape, t: int, b: int, compiled: bool) -> tuple[float, int]:
    """Seconds of forward and backward, and bytes that the forward keeps."""
    torch.manual_seed(0)
    layer = Layer(shape, t).to("cuda", torch.bfloat16)
    run = torch.compile(layer) if compiled else layer
    x = torch.randn(b, POSITIONS, shape.hidden, device="cuda", dtype=torch.bfloat16,
                    requires_grad=True)
    upstream = torch.randn_like(x)

    def step() -> None:
        run(x).backward(upstream)

    took = seconds(step)
    before = torch.cuda.memory_allocated()
    y = run(x)
    kept = torch.cuda.memory_allocated() - before - y.nbytes + x.nbytes  # x is an output, too
    return took, kept


def predicted(shape: Shape, t: int, b: int, software: Software, device: str) -> tuple[float, float]:
    """The same of the planner."""
    layout = Layout({"tp": t}, micro_batch=b)
    work = work_of(shape._replace(positions=POSITIONS), layout, DEVICES[device], RECIPES["bf16"],
                   software)
    took = max(work.forward_s, work.floor_s) + max(work.backward_s, 2 * work.floor_s)
    return took, work.memory["activations"] / shape.layers


def main() -> None:
    gpu = torch.cuda.get_device_name()
    device = "a100" if "A100" in gpu else "h200" if "H200" in gpu else "h100"
    print(f"{gpu}, torch {torch.__version__}, {POSITIONS:,} positions, bf16")
    print("shape          tp  batch  software    measured  predicted  ratio    kept  predicted")
    for name in sys.argv[1:] or ("Llama 3 8B", "Llama 3 70B"):
        shape = SHAPES[name]
        for t in (1, 2, 4, 8):
            for b in (1, 2, 4):
                for label, software in (("eager", EAGER), ("compiled", COMPILED))[: 1 + (b == 1)]:
                    took, kept = measured(shape, t, b, label == "compiled")
                    guess, room = predicted(shape, t, b, software, device)
                    print(f"{name:14} {t:2} {b:6}  {label:10} {took * 1e3:6.2f} ms "
                          f"{guess * 1e3:7.2f} ms {guess / took:6.2f} {kept / 1e6:5.0f} MB "
                          f"{room / 1e6:6.0f} MB", flush=True)


if __name__ == "__main__":
    main()
