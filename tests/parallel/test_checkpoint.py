"""What was saved loads again: into any of the wrappers, onto any number of ranks, or not at all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import dtlab
from dtlab.models import MLP
from dtlab.parallel import DataParallel, full_state_dict, load, save, zero
from tests.parallel.training import MODELS, batch_of, difference, loss_of, on, one_device, shard_of

HALF = 3  # steps


def wrapped(comm: dtlab.Comm, stage: int, model: str = "mlp") -> Any:
    module = MODELS[model](torch.float64)
    if stage:
        return zero(module, comm, stage, torch.optim.Adam, lr=1e-3)
    return DataParallel(module, comm), torch.optim.Adam(module.parameters(), lr=1e-3)


def train(model: Any, optimizer: Any, kind: str, steps: range) -> None:
    for number in steps:
        shard = shard_of(batch_of(kind, number), model.comm.rank, model.comm.size)
        model.backward(loss_of(model, shard), len(shard[-1]))
        optimizer.step()
        optimizer.zero_grad()


def first_half(comm: dtlab.Comm, folder: Path, stage: int, kind: str = "mlp") -> None:
    model, optimizer = wrapped(comm, stage, kind)
    train(model, optimizer, kind, range(HALF))
    save(folder, model, optimizer)


def second_half(comm: dtlab.Comm, folder: Path, stage: int, kind: str = "mlp") -> dict[str, Any]:
    model, optimizer = wrapped(comm, stage, kind)
    optimizer.param_groups[0]["lr"] = 1.0  # the checkpoint knows better
    load(folder, model, optimizer)
    train(model, optimizer, kind, range(HALF, 2 * HALF))
    return full_state_dict(model)


@pytest.mark.parametrize(("before", "after"), [((0, 3), (3, 2)), ((3, 4), (0, 3)), ((1, 5), (2, 3)),
                                               ((3, 2), (3, 5)), ((2, 3), (1, 1))])
@pytest.mark.parametrize("kind", MODELS)
def test_training_goes_on_as_if_it_had_never_stopped(
        tmp_path: Path, kind: str, before: tuple[int, int], after: tuple[int, int]) -> None:
    on("simulator", first_half, tmp_path / "c", before[0], kind, ranks=before[1])
    states = on("simulator", second_half, tmp_path / "c", after[0], kind, ranks=after[1]).values
    for state in states:
        assert difference(state, one_device(kind, "adam", 2 * HALF)) < 1e-12


def test_on_processes(tmp_path: Path) -> None:
    dtlab.run(first_half, tmp_path / "c", 3, ranks=3)
    state = dtlab.run(second_half, tmp_path / "c", 2, ranks=2).values[0]
    assert difference(state, one_device("mlp", "adam", 2 * HALF)) < 1e-12


def test_each_rank_writes_its_share(tmp_path: Path) -> None:
    for stage in (0, 3):
        on("simulator", first_half, tmp_path / "c", stage, "gpt", ranks=4)
        sizes = [file.stat().st_size for file in sorted((tmp_path / "c").glob("rank*.pt"))]
        assert len(sizes) == 4
        assert max(sizes) < 1.5 * min(sizes)


# ---- damaged, or another's ---------------------------------------------------------------------


def flip_a_byte(folder: Path) -> None:
    data = bytearray((folder / "rank1.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "rank1.pt").write_bytes(data)


def forget_a_shard(folder: Path) -> None:
    """The index agrees, but the elements are not there."""
    index = json.loads((folder / "index.json").read_text())
    del index["files"]["rank2.pt"]
    (folder / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(("damage", "sentence"), [
    (lambda folder: (folder / "rank1.pt").unlink(), r"the shard .*rank1.pt is missing"),
    (flip_a_byte, r"the shard .*rank1.pt is corrupt"),
    (forget_a_shard, r"has \d+ of its \d+ elements"),
    (lambda folder: (folder / "index.json").unlink(), "holds no checkpoint"),
    (lambda folder: (folder / "index.json").write_text("{"), "index.json is corrupt"),
])
def test_a_damaged_checkpoint_is_named_and_changes_nothing(
        tmp_path: Path, damage: Any, sentence: str) -> None:
    def attempt(comm: dtlab.Comm) -> str:
        model, optimizer = wrapped(comm, 3)
        before = full_state_dict(model)
        with pytest.raises(dtlab.ConfigError) as error:
            load(tmp_path / "c", model, optimizer)
        assert difference(before, full_state_dict(model)) == 0
        return str(error.value)

    on("simulator", first_half, tmp_path / "c", 3, ranks=3)
    damage(tmp_path / "c")
    for message in on("simulator", attempt, ranks=2).values:
        assert re.search(sentence, message)


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    def attempt(comm: dtlab.Comm) -> None:
        load(tmp_path / "c", DataParallel(MLP((64, 16, 10)).module(), comm))

    on("simulator", first_half, tmp_path / "c", 1, ranks=2)
    with pytest.raises(dtlab.RankFailed, match=r"'0.weight' has shape \(32, 64\)"):
        on("simulator", attempt, ranks=2)


def test_a_rank_that_dies_while_saving_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    def dying(comm: dtlab.Comm) -> None:
        model, optimizer = wrapped(comm, 3)
        if comm.rank == 1:
            torch.save = None  # type: ignore[assignment]
        save(tmp_path / "c", model, optimizer)

    dtlab.run(first_half, tmp_path / "c", 3, ranks=2)
    with pytest.raises(dtlab.RankFailed):
        dtlab.run(dying, ranks=2)
    state = dtlab.run(second_half, tmp_path / "c", 3, ranks=3).values[0]
    assert difference(state, one_device("mlp", "adam", 2 * HALF)) < 1e-12


def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(dtlab.RankFailed, match="exists and is not a checkpoint"):
        on("simulator", first_half, tmp_path, 0, ranks=2)
    assert (tmp_path / "thesis.tex").exists()
