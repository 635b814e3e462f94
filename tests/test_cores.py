"""Several cores go over large memory, one over small; afterwards all is as before."""

from __future__ import annotations

import pytest
import torch

from dtlab import cores


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "CORES", 4)


@pytest.mark.parametrize(("nbytes", "threads"), [(0, 1), (cores.LARGE_BYTES - 1, 1),
                                                 (cores.LARGE_BYTES, 4)])
def test_only_what_is_large_takes_several(nbytes: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with cores.several_cores(nbytes):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 1
        with pytest.raises(ValueError, match="on the way"), cores.several_cores(nbytes):
            raise ValueError("on the way")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_who_has_more_keeps_them() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    try:
        with cores.several_cores(cores.LARGE_BYTES):
            assert torch.get_num_threads() == 6
    finally:
        torch.set_num_threads(before)
