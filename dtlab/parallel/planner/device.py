"""The rates of a device, the share of them that software reaches, and clusters of devices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dtlab.checks import check_positive, check_whole, short
from dtlab.errors import ConfigError
from dtlab.topology import Topology, compose, nvswitch, uniform


@dataclass(frozen=True)
class Device:
    """product_flops: by precision, the most floating-point operations a second that a benchmark of
    matrix products has reached. peak_flops: by precision, of the data sheet, which utilizations are
    shares of. attention_flops: that FlashAttention's forward has reached with a causal mask.
    memory_Bps: bytes a second, read or written. memory_bytes: how many it has. source: where the
    numbers are from."""

    name: str
    product_flops: Mapping[str, float]
    peak_flops: Mapping[str, float]
    attention_flops: float
    memory_Bps: float
    memory_bytes: float
    source: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        for name in ("attention_flops", "memory_Bps", "memory_bytes"):
            check_positive(name, getattr(self, name))
        for name in ("product_flops", "peak_flops"):
            if not isinstance(rates := getattr(self, name), Mapping) \
                    or set(rates) != set(self.product_flops):
                raise ConfigError(f"product_flops and peak_flops are two dictionaries of the same "
                                  f"precisions and their rates, not {name}={short(rates)}")
            for precision, rate in rates.items():
                check_positive(f"{name} in {precision}", rate)

    def product_s(self, rows: float, inner: float, columns: float, precision: str = "bf16"
                  ) -> float:
        """Seconds for the product of two matrices, rows × inner and inner × columns: its
        operations, and its reading both and writing the result. So a product cut into t slices
        takes more than a t-th: each still reads all rows, or writes them.

        >>> whole, slice = (A100.product_s(2048, 4096, n) for n in (4096, 512))
        >>> f"{8 * slice / whole:.2f}"
        '1.20'
        """
        itemsize = {"float32": 4, "fp8": 1}.get(precision, 2)
        moved = itemsize * (rows * inner + inner * columns + rows * columns)
        return 2 * rows * inner * columns / self.product_flops[precision] + moved / self.memory_Bps


_SOURCE = "matrix products: Bekman, Machine Learning Engineering, maximum achievable matmul FLOPS; "
_FA2 = "attention: Shah et al. 2024, figure 5, FlashAttention-2, heads of 128, 4,096 positions; "
_REST = "the rest: NVIDIA's data sheets"
_A100 = ({"bf16": 271.2e12, "float32": 19.5e12}, {"bf16": 312e12, "float32": 19.5e12}, 187e12)
_H100 = ({"bf16": 794.5e12, "fp8": 1453.4e12, "float32": 67e12},
         {"bf16": 989e12, "fp8": 1979e12, "float32": 67e12}, 319e12)
A100 = Device("A100 80 GB", *_A100, 2.039e12, 80e9, _SOURCE + "attention: Dao 2023, 50 to 73 % of "
              "the peak, of which the middle; " + _REST)
H100 = Device("H100 80 GB", *_H100, 3.35e12, 80e9, _SOURCE + _FA2 + _REST)
DEVICES = {
    "a100": A100,
    "a100-40": Device("A100 40 GB", *_A100, 1.555e12, 40e9, A100.source),
    "h100": H100,
    "h100-96": Device("H100 96 GB, 500 W", {k: 0.75 * v for k, v in _H100[0].items()}, _H100[1],
                      0.75 * _H100[2], 2.4e12, 102e9,
                      "sizes: torchtitan's benchmarks; rates: three quarters of those of 700 W, "
                      "which one of its rows gave"),
    "h200": Device("H200", *_H100, 4.8e12, 141e9, H100.source),
    "b200": Device("B200", {"bf16": 1745e12, "fp8": 3432.5e12}, {"bf16": 2250e12, "fp8": 4500e12},
                   700e12, 8e12, 180e9, _SOURCE + "attention: assumed, the share of the matrix "
                   "products that it is on an H100; " + _REST),
}


class Software(NamedTuple):
    """A generation of training software, fitted to measurements (see `source`). efficiency: what it
    reaches of a device's rates of matrix products and memory. layer_s: the least that a layer's
    forward takes, however small, because a CPU starts its kernels one by one; backward twice that.
    stall_s: seconds more that this least is, for each tensor-parallel rank, in a pipeline over
    several hosts. early_stop: full recomputation ends before the last product of an MLP, whose
    result no backward needs, as PyTorch's `checkpoint(use_reentrant=False)` does."""

    efficiency: float
    layer_s: float = 0.0
    stall_s: float = 0.0
    early_stop: bool = True
    source: str = ""


MEGATRON = Software(0.89, early_stop=False, source="Korthikanti et al. 2022, table 5, as a whole")
EAGER = Software(0.70, 1.45e-3, 0.8e-3,
                 source="The Ultra-Scale Playbook's layouts of 3 B parameters")
COMPILED = Software(0.83, 0.7e-3, source="with the rates of DEVICES['h100-96'] torchtitan's 8 B on "
                    "8 GPUs; the least time of a layer is assumed: half of eager software's")
SOFTWARE = {"megatron-2021": MEGATRON, "eager": EAGER, "compiled": COMPILED}


class ServerLinks(NamedTuple):
    """The links of a server. nvlink_Bps: of each device, one direction. nic_Bps: of the network
    card that each device has. latency_s: of a message to another server."""

    nvlink_Bps: float
    nic_Bps: float
    latency_s: float


NCCL = 0.8  # the share of NVLink's rate that large collectives reach: assumed; at 256 MB it is less
_HOPPER = ServerLinks(450e9 * NCCL, 50e9, 5e-6)
SERVERS = {"a100": ServerLinks(300e9, 25e9, 3e-6), "a100-40": ServerLinks(300e9, 25e9, 3e-6),
           "h100": _HOPPER, "h100-96": _HOPPER, "h200": _HOPPER,
           "b200": ServerLinks(900e9 * NCCL, 50e9, 5e-6)}


def cluster(text: str) -> tuple[Device, Topology]:
    """The device and the topology of "h100:8x8": 8 servers of 8 H100 each, joined by NVSwitch, with
    a network card for each, on a network without bottleneck. Raises `ConfigError` for others.

    >>> cluster("h100:2x8")[1].ranks
    16
    """
    form = r"([\w-]+):([0-9]{1,9})x([0-9]{1,9})"
    parts = re.fullmatch(form, text.lower()) if isinstance(text, str) else None
    if parts is None or parts[1] not in DEVICES:
        raise ConfigError(f"a cluster is a device, servers and devices in each, such as h100:8x8, "
                          f"with one of the devices {', '.join(DEVICES)}; not {short(text)}")
    return DEVICES[parts[1]], servers(parts[1], int(parts[2]), int(parts[3]))


def servers(device: str, hosts: int, cards: int = 8) -> Topology:
    """Return `hosts` servers of `cards` devices of the name `device`, as in `cluster`."""
    check_whole("servers", hosts, 1, 100_000)
    check_whole("devices a server", cards, 1, 256)
    nvlink_Bps, nic_Bps, latency_s = SERVERS[device]
    inside = nvswitch(cards, bandwidth_Bps=nvlink_Bps)
    if hosts == 1:
        return inside
    return compose(inside, uniform(hosts, latency_s, cards * nic_Bps), nic_Bps=nic_Bps)
