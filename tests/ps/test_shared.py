"""Wires lie in shared memory between processes, and travel in the simulator: the same arrives."""

from __future__ import annotations

import pytest
import torch

from dtlab import Comm, ps, run, simulate
from dtlab.ps.mail import Mail
from dtlab.topology import uniform

NETWORK = uniform(2, 1e-6, 1e9)


def odd_wires() -> list[torch.Tensor]:
    """Flat tensors that differ in dtype, length and how they lie in memory."""
    wave = torch.tensor([1 + 2j, 3 - 1j])
    return [torch.arange(5.0)[::2], torch.tensor([True, False, True]), torch.zeros(0),
            wave.conj(), wave.conj().imag, torch.ones(1).expand(3), torch.tensor([7]).expand(1),
            torch.arange(3, dtype=torch.bfloat16), torch.arange(9).to(torch.uint16),
            torch.full((2,), 0.5, requires_grad=True)]


def letter(comm: Comm, wires: list[torch.Tensor]) -> list[list[complex]]:
    """What rank 1 has of a letter from rank 0."""
    mail = Mail(comm)
    if comm.rank == 0:
        mail.send(1, ("hello",), wires)
        mail.send(1, ("end",))
        mail.flush()
        return []
    src, body, found, works = mail.receive()
    for work in works:
        work.wait()
    assert (src, body) == (0, ("hello",))
    assert [x.dtype for x in found] == [x.dtype for x in wires]
    assert mail.moved_bytes == (sum(x.nbytes for x in wires), 0)
    mail.receive()
    return [x.tolist() for x in found]


@pytest.mark.parametrize("wires", [odd_wires(), [torch.zeros(0)], [torch.arange(1024.0)],
                                   [torch.arange(1025.0)], [torch.zeros(0), torch.ones(5000)], []])
def test_a_letter_brings_its_wires(wires: list[torch.Tensor]) -> None:
    sent = [x.tolist() for x in wires]
    assert run(letter, wires, ranks=2).values[1] == sent
    assert simulate(letter, wires, network=NETWORK).values[1] == sent


def test_training_is_the_same_bit_for_bit() -> None:
    def train(comm: Comm) -> list[float]:
        node = ps.join(comm, consistency=ps.BSP(), update=ps.Adam(lr=0.1))
        if node.is_server:
            node.serve()
            return []
        node.init({"small": torch.zeros(7), "large": torch.zeros(3000),
                   "half": torch.zeros(2, 3, dtype=torch.bfloat16)})
        for step in range(5):
            w = node.pull(["small", "large", "half"])
            node.push({key: x * 0.5 + step + comm.rank for key, x in w.items()})
            node.clock()
        last = node.pull(["small", "large", "half"])
        node.finish()
        return [x.double().sum().item() for x in last.values()]

    here = run(train, ranks=3).values
    assert here == simulate(train, network=uniform(3, 1e-6, 1e9)).values
