"""What was saved loads again: into any of the wrappers, onto any number of ranks, or not at all."""

from __future__ import annotations

import builtins
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dtlab
from dtlab.collectives import barrier
from dtlab.models import GPT, GPTConfig
from dtlab.parallel import DataParallel, Mesh, full_state_dict, load, save, zero
from dtlab.parallel.checkpoint import read_extra
from dtlab.parallel.tensor import ColumnLinear
from tests.parallel.training import difference, on, one_device, one_step, wrapped

HALF = 3  # steps


def first_half(comm: dtlab.Comm, folder: Path, stage: int, kind: str = "mlp") -> None:
    model, optimizer = wrapped(comm, stage, kind)
    for step in range(HALF):
        one_step(model, optimizer, step, kind)
    save(folder, model, optimizer)


def second_half(comm: dtlab.Comm, folder: Path, stage: int, kind: str = "mlp") -> dict[str, Any]:
    model, optimizer = wrapped(comm, stage, kind)
    optimizer.param_groups[0]["lr"] = 1.0  # the checkpoint knows better
    load(folder, model, optimizer)
    for step in range(HALF, 2 * HALF):
        one_step(model, optimizer, step, kind)
    return full_state_dict(model)


ONTO = [((0, 3), (3, 2)), ((3, 4), (0, 3)), ((1, 5), (2, 3)), ((3, 2), (3, 5)), ((2, 3), (1, 1))]


@pytest.mark.parametrize(("kind", "before", "after"), [
    *(("mlp", *pair) for pair in ONTO), *(("cnn", *pair) for pair in ONTO[::3]),
    *(("gpt", *pair) for pair in ONTO[1:3])])
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
        files = sorted((tmp_path / "c" / ("2" if stage else "1")).glob("rank*.pt"))
        sizes = [file.stat().st_size for file in files]
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
    (lambda folder: (folder / "index.json").unlink(), "is incomplete: there is no index.json"),
    (lambda folder: (folder / "../latest").unlink(), "holds no checkpoint: there is no latest"),
    (lambda folder: (folder / "../latest").write_text("?"), r"latest is corrupt; .* one of 1"),
    (lambda folder: (folder / "index.json").write_text("{"), "index.json is corrupt"),
    (lambda folder: (folder / "index.json").write_text('{"files": {}}'), "index.json is corrupt"),
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
    damage(tmp_path / "c/1")
    for message in on("simulator", attempt, ranks=2).values:
        assert re.search(sentence, message)


def test_a_layer_may_have_two_names() -> None:
    def trained(comm: dtlab.Comm, stage: int) -> dict[str, torch.Tensor]:
        layer = torch.nn.Linear(2, 2)
        model, _ = zero(torch.nn.Sequential(layer, torch.nn.Tanh(), layer), comm, stage)
        state = full_state_dict(model)
        model(torch.ones(1, 2))  # still the module that was wrapped
        return state

    for stage in (1, 3):
        for state in on("simulator", trained, stage, ranks=2).values:
            assert list(state) == ["0.weight", "0.bias", "2.weight", "2.bias"]
            assert torch.equal(state["0.weight"], state["2.weight"])


def test_a_part_of_a_tensor_parallel_layer_goes_to_its_rank_only(tmp_path: Path) -> None:
    def fn(comm: dtlab.Comm) -> None:
        mesh = Mesh(comm, dp=2, tp=2)
        model = DataParallel(ColumnLinear(mesh["tp"], 4, 4), mesh["dp"])
        if mesh.coordinates["tp"]:
            save(tmp_path / "one", model)
        save(tmp_path / str(mesh.coordinates["tp"]), model)
        load(tmp_path / str(mesh.coordinates["tp"]), model)
        barrier(comm)
        load(tmp_path / "one", model)

    with pytest.raises(dtlab.ConfigError, match=r"part of 'weight' of tensor-parallel rank "
                                                r"1 of 2; save each of these ranks in a folder"):
        on("simulator", fn, ranks=4)


def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(dtlab.RankFailed, match="exists and is not a checkpoint"):
        on("simulator", first_half, tmp_path, 0, ranks=2)
    assert (tmp_path / "thesis.tex").exists()


# ---- a run may die, or a disk be full, at any moment -------------------------------------------


class Killed(BaseException):
    pass


class Files:
    """The file operations that change something, as they happen; `before` is called first."""

    def __init__(self, patch: pytest.MonkeyPatch,
                 before: Callable[[str, str], None] = lambda *_: None):
        self.seen: list[tuple[str, str]] = []
        self.names: dict[int, str] = {}
        self.before, self.open = before, open
        for place, name in ((os, "replace"), (os, "unlink"), (os, "fsync"), (os, "mkdir"),
                            (os, "rmdir")):
            patch.setattr(place, name, self.watched(name, getattr(place, name)))
        patch.setattr(builtins, "open", self.opened)

    def happens(self, what: str, path: object) -> None:
        self.before(what, str(path))
        self.seen.append((what, Path(str(path)).name))

    def watched(self, name: str, call: Any) -> Any:
        def instead(path: Any, *args: Any, **options: Any) -> Any:
            self.happens(name, os.readlink(f"/proc/self/fd/{path}") if name == "fsync" else path)
            return call(path, *args, **options)
        return instead

    def opened(self, path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if "w" in mode:
            self.happens("open", path)
        file = self.open(path, mode, *args, **options)
        return Watched(file, lambda: self.happens("write", path)) if "w" in mode else file


class Watched:
    """A file that calls `before` each time something is written."""

    def __init__(self, file: Any, before: Callable[[], None]):
        self.file, self.before = file, before

    def write(self, data: Any) -> Any:
        self.before()
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def constant(comm: dtlab.Comm, value: float = 0.0) -> DataParallel:
    module = nn.Linear(2, 2)
    nn.init.constant_(module.weight, value)
    return DataParallel(module, comm)


def saved(folder: Path, value: float, keep: int = 2) -> None:
    on("simulator", lambda comm: save(folder, constant(comm, value), extra=value, keep=keep),
       ranks=2)


def loaded(folder: Path) -> float:
    def fn(comm: dtlab.Comm) -> float:
        model = constant(comm)
        load(folder, model)
        return model.module.weight[0, 0].item()

    return float(on("simulator", fn, ranks=2).values[0])


@pytest.mark.parametrize("first", [False, True])
def test_a_run_that_dies_at_any_file_operation_leaves_the_old_or_the_new(
        tmp_path: Path, first: bool) -> None:
    """first: there is no old one."""
    with pytest.MonkeyPatch.context() as patch:
        files = Files(patch)
        saved(tmp_path / "sample", 1.0)
        saved(tmp_path / "sample", 2.0)
    kinds = [what for what, _ in files.seen]
    fatal = [i for i, what in enumerate(kinds) if what != "write" or i % 9 == 0]
    found = set()
    for number in fatal:
        folder, left = tmp_path / str(number), iter(range(number))

        def die(*_: str, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise Killed

        if not first:
            saved(folder, 1.0)
        with pytest.MonkeyPatch.context() as patch, suppress(Killed, dtlab.RankFailed):
            Files(patch, die)
            saved(folder, 2.0)
        if first and not (folder / "latest").exists():
            with pytest.raises(dtlab.ConfigError, match="holds no checkpoint"):
                loaded(folder)
        else:
            found.add(loaded(folder))
        saved(folder, 3.0)
        assert loaded(folder) == 3.0
        inside = [sorted(path.name for path in one.iterdir()) for one in folder.glob("[0-9]*")]
        assert inside in ([["index.json", "rank0.pt", "rank1.pt"]] * n for n in (1, 2))
        assert len(list(folder.iterdir())) == len(inside) + 1  # no leftovers
    assert found == ({2.0} if first else {1.0, 2.0})


def test_what_is_renamed_is_on_the_disk_and_so_is_the_renaming(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "c", 1.0)
    saved(tmp_path / "c", 2.0)
    files = Files(monkeypatch)
    saved(tmp_path / "c", 3.0)
    at = files.seen.index(("replace", "latest"))
    for name in ("rank0.pt", "rank1.pt", "index.json", "latest"):
        writes = [i for i, seen in enumerate(files.seen) if seen == ("write", name)]
        assert max(writes) < files.seen.index(("fsync", name)) < at
    assert files.seen.index(("fsync", "3")) < at
    assert files.seen[at - 1] == files.seen[at + 1] == ("fsync", "c")
    removed = [i for i, seen in enumerate(files.seen) if seen[0] in ("unlink", "rmdir")]
    assert files.seen[removed[0]] == ("unlink", "index.json")
    assert len(removed) == 4
    assert min(removed) > at + 1


def test_all_ranks_say_why_one_cannot_write(tmp_path: Path) -> None:
    def fn(comm: dtlab.Comm) -> str:
        with pytest.raises(dtlab.ConfigError) as error:
            save(tmp_path / "c", constant(comm, 2.0))
        return str(error.value)

    left = iter(range(4))

    def full(what: str, path: str) -> None:
        if (what, Path(path).name) == ("write", "rank1.pt") and next(left, None) is None:
            raise OSError(28, "No space left on device")

    saved(tmp_path / "c", 1.0)
    with pytest.MonkeyPatch.context() as patch:
        Files(patch, full)
        for message in on("simulator", fn, ranks=2).values:
            assert re.fullmatch(r"save: rank 1: .*c: No space left on device", message)
    assert loaded(tmp_path / "c") == 1.0
    with pytest.MonkeyPatch.context() as patch:
        files = Files(patch)
        saved(tmp_path / "c", 2.0)
    assert files.seen.index(("rmdir", "2")) < files.seen.index(("mkdir", "3"))  # it filled the disk


def test_a_link_is_followed(tmp_path: Path) -> None:
    for number, there in enumerate((True, False)):
        if there:
            saved(tmp_path / "run0", 1.0)
        (tmp_path / f"latest{number}").symlink_to(tmp_path / f"run{number}")
        saved(tmp_path / f"latest{number}", 2.0)
        assert (tmp_path / f"latest{number}").is_symlink()
        assert loaded(tmp_path / f"run{number}") == 2.0


def test_a_relative_folder_is_that_of_the_call(tmp_path: Path) -> None:
    def fn(comm: dtlab.Comm) -> None:
        model = constant(comm, 3.0)
        os.chdir(tmp_path)
        save("c", model)
        work = save("c", model, wait=False)
        os.chdir("/")
        assert work is not None
        work.wait()

    dtlab.run(fn, ranks=1)
    assert loaded(tmp_path / "c") == 3.0
    assert (tmp_path / "c" / "latest").read_text() == "2"


# ---- any model, any optimizer ------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters of all kinds: a scalar, an empty one, tied, frozen, in other orders of memory;
    buffers, one of which isn't saved; and a hook that makes copies for `state_dict`."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.zeros(0))
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.transposed = nn.Parameter(torch.randn(3, 16).t())
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0]), persistent=False)
        self.register_state_dict_post_hook(lambda _, state, *rest: state.update(
            {name: x.clone() for name, x in state.items()}))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).flatten(2).mean(1) @ self.transposed
        return self.frozen(self.b(self.a(x).tanh())) * self.scale.exp() * self.mask


def images(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 2, 6, 6, dtype=torch.float64, generator=generator)


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    model.eval()
    for number in numbers:
        optimizer.zero_grad()
        model(images(number)).square().mean().backward()
        optimizer.step()


def odd(comm: dtlab.Comm, stage: int, make: Any, seed: int) -> Any:
    if stage:
        return zero(Odd(seed), comm, stage, make, lr=0.05)
    model = DataParallel(Odd(seed), comm)
    return model, make(model.parameters(), lr=0.05)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.NAdam,
                                  torch.optim.ASGD])
@pytest.mark.parametrize("steps", [0, 2])
def test_any_parameter_and_any_state_goes_on_as_on_one_device(
        tmp_path: Path, make: Any, steps: int) -> None:
    def write(comm: dtlab.Comm, stage: int) -> None:
        model, optimizer = odd(comm, stage, make, 0)
        steps_of(model, optimizer, range(steps))
        model.module.norm.requires_grad_(False)  # for a while
        save(tmp_path / f"{stage}", model, optimizer, {"step": steps})

    def read(comm: dtlab.Comm, before: int, stage: int) -> dict[str, Tensor]:
        model, optimizer = odd(comm, stage, make, 1)
        assert load(tmp_path / f"{before}", model, optimizer) == {"step": steps}
        steps_of(model, optimizer, range(steps, steps + 2))
        return full_state_dict(model)

    one = Odd()
    steps_of(one, make([p for p in one.parameters() if p.requires_grad], lr=0.05), range(steps + 2))
    for before, after in ((0, 3), (1, 0), (2, 2)):
        on("simulator", write, before, ranks=3)
        for state in on("simulator", read, before, after, ranks=2).values:
            Odd(2).load_state_dict(state, strict=True)
            for name, expected in one.state_dict().items():
                torch.testing.assert_close(state[name], expected, rtol=0, atol=1e-12)


def test_options_return_to_the_parameters_by_name(tmp_path: Path) -> None:
    def made(comm: dtlab.Comm, *groups: tuple[str, float]) -> Any:
        model = constant(comm)
        return model, torch.optim.SGD([{"params": [getattr(model.module, name)], "lr": lr}
                                       for name, lr in groups])

    def fn(comm: dtlab.Comm) -> list[float]:
        save(tmp_path / "c", *made(comm, ("weight", 0.5), ("bias", 0.25)))
        model, optimizer = made(comm, ("bias", 1.0), ("weight", 1.0))
        load(tmp_path / "c", model, optimizer)
        return [group["lr"] for group in optimizer.param_groups]

    def one_group(comm: dtlab.Comm) -> None:
        model = constant(comm)
        load(tmp_path / "c", model, torch.optim.SGD(model.parameters(), lr=1.0))

    assert on("simulator", fn, ranks=2).values == [[0.25, 0.5]] * 2
    with pytest.raises(dtlab.ConfigError, match=r"'bias' was saved with the lr 0.25, 'weight' with "
                                                r"0.5, but .* has them in one parameter group"):
        on("simulator", one_group, ranks=2)


def adam(model: DataParallel) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


def in_sequence(comm: dtlab.Comm, layers: int) -> DataParallel:
    return DataParallel(nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers))), comm)


def other_context(comm: dtlab.Comm, folder: Path) -> None:
    for context in (4, 8):
        model = DataParallel(GPT(GPTConfig(layers=1, hidden=8, heads=2, context=context)), comm)
        (save if context == 4 else load)(folder, model)


def other_models(comm: dtlab.Comm, folder: Path) -> None:
    save(folder, in_sequence(comm, 3))
    load(folder, in_sequence(comm, 2))


def other_optimizer(comm: dtlab.Comm, folder: Path) -> None:
    model = constant(comm)
    save(folder, model, adam(model))
    load(folder, *zero(nn.Linear(2, 2), comm, 1, torch.optim.SGD))


def one_compiled(comm: dtlab.Comm, folder: Path) -> None:
    save(folder, in_sequence(comm, 1))
    compiled = torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager")
    load(folder, DataParallel(compiled, comm))


def without_values(comm: dtlab.Comm, folder: Path) -> None:
    save(folder, in_sequence(comm, 1))
    with torch.device("meta"):
        load(folder, in_sequence(comm, 1))


@pytest.mark.parametrize(("mistake", "sentence"), [
    (without_values, r"on the device meta, where it can't have values; make it on another one"),
    (other_context, r"'positions.weight' has shape \(4, 8\), but the model's is \(8, 8\)"),
    (other_models, r"it has '2.bias' of shape \(2,\), but the model has none"),
    (one_compiled, r"no '_orig_mod.0.weight': torch.compile\(module\) renames parameters"),
    pytest.param(lambda comm, folder: save("/proc/c", constant(comm)), "/proc/c can't be made: No",
                 marks=pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")),
    (other_optimizer, r"it holds the state of Adam, not of SGD"),
    (lambda comm, folder: full_state_dict(
        DataParallel(ColumnLinear(comm, 4, 6), comm.subgroup([comm.rank]))),
     "weight is this rank's part of a tensor"),
    (lambda comm, folder: save(folder, constant(comm), adam(constant(comm))),
     r"the optimizer doesn't step this model's parameters"),
    (lambda comm, folder: save(folder, constant(comm), extra={"step": 1, "do": [0.1, abs]}),
     r"extra\['do'\]\[1\] can't be saved: .* no builtins.builtin_function_or_method"),
])
def test_what_does_not_fit_is_said(tmp_path: Path, mistake: Any, sentence: str) -> None:
    with pytest.raises(dtlab.ConfigError, match=sentence):
        on("simulator", mistake, tmp_path / "c", ranks=2)


@pytest.mark.parametrize("backend", ["simulator", "gloo"])
def test_a_call_that_a_rank_leaves_out_is_named(tmp_path: Path, backend: str) -> None:
    def alone(comm: dtlab.Comm) -> None:
        model = constant(comm)
        if comm.rank == 0:  # as one saves with torch.save
            save(tmp_path / "c", model)

    def whole(comm: dtlab.Comm) -> None:
        model = constant(comm)
        if comm.rank == 0:
            full_state_dict(model)

    def unlike(comm: dtlab.Comm) -> None:
        constant(comm) if comm.rank else zero(nn.Linear(2, 2), comm)

    with pytest.raises(dtlab.Deadlock, match="1 returned without calling save") as caught:
        on(backend, alone, ranks=2)
    assert "save" in caught.value.waiting[0].doing
    with pytest.raises(dtlab.Deadlock, match="1 returned without calling full_state_dict"):
        on(backend, whole, ranks=2)
    with pytest.raises(dtlab.ShapeMismatch, match=r"is in (zero|DataParallel), but rank . is in"):
        on(backend, unlike, ranks=2)


# ---- numbered, and beside training -----------------------------------------------------------


def test_the_newest_whole_one_is_loaded_and_torn_ones_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    for value in (1.0, 2.0, 3.0):
        saved(folder, value, keep=3)
    assert loaded(folder) == 3.0
    (folder / "3" / "rank1.pt").write_bytes((folder / "2" / "rank1.pt").read_bytes())
    (folder / "2" / "index.json").unlink()
    with pytest.warns(UserWarning, match=r"loading .*c/1 instead") as warned:
        assert loaded(folder) == 1.0
    assert read_extra(folder) == 1.0
    assert {warning.filename for warning in warned} == {__file__}
    told = " ".join(str(warning.message) for warning in warned)
    assert "c/3/rank1.pt is corrupt" in told
    assert "c/2 is incomplete" in told


@pytest.mark.parametrize("keep", [1, 3])
def test_as_many_are_kept_as_asked_for(tmp_path: Path, keep: int) -> None:
    for value in range(5):
        saved(tmp_path / "c", value, keep)
    left = sorted(path.name for path in (tmp_path / "c").iterdir())
    assert left == [str(n) for n in range(6 - keep, 6)] + ["latest"]


def test_what_is_saved_beside_training_is_what_was_there_at_the_call(tmp_path: Path) -> None:
    """The next steps change parameters, optimizer, buffers and `extra` in place at once; the next
    save waits for the one before."""
    def fn(comm: dtlab.Comm) -> Any:
        module = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)).double()
        model = DataParallel(module, comm)
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
        extra, expected = {"seen": torch.zeros(3)}, []
        mine = [*module.parameters(), *module.buffers()]
        for step in range(4):
            one_step(model, optimizer, step)
            extra["seen"] += 1
            if step in (1, 2):
                expected.append({name: x.clone() for name, x in full_state_dict(model).items()})
                work = save(tmp_path / str(step), model, optimizer, extra, wait=False)
                kept = [x.detach().clone() for x in mine]
                with torch.no_grad():
                    for x in mine:  # at once, before anything is written
                        x.zero_()
                    comm.split(0)
                    for x, before in zip(mine, kept, strict=True):
                        x.copy_(before)
        work.wait()
        found = []
        for step in (1, 2):
            seen = load(tmp_path / str(step), model, optimizer)["seen"].tolist()
            state = full_state_dict(model)
            found.append((seen, all(torch.equal(state[name], expected[step - 1][name])
                                    for name in state)))
        return found

    for backend in ("simulator", "gloo"):
        for values in on(backend, fn, ranks=2).values:
            assert values == [([2.0] * 3, True), ([3.0] * 3, True)]
        for step in ("1", "2"):
            shutil.rmtree(tmp_path / step)


def test_each_rank_has_its_own_extra_and_random_numbers_back(tmp_path: Path) -> None:
    def first(comm: dtlab.Comm) -> Any:
        model = constant(comm)
        torch.rand(3)
        random.seed(comm.rank)
        save(tmp_path / "c", model, extra={"rank": comm.rank})
        return torch.rand(2).tolist(), np.random.rand(), random.random()

    def again(comm: dtlab.Comm) -> Any:
        model = constant(comm)
        extra = load(tmp_path / "c", model)
        return extra["rank"], (torch.rand(2).tolist(), np.random.rand(), random.random())

    callers = random.getstate()
    for backend in ("simulator", "gloo"):
        drawn = on(backend, first, ranks=3).values
        assert len({str(each) for each in drawn}) == 3
        assert on(backend, again, ranks=3).values == [*enumerate(drawn)]
        assert [rank for rank, _ in on(backend, again, ranks=2).values] == [0, 0]
    assert random.getstate() == callers


def test_two_runs_that_share_a_folder_are_told_and_lose_nothing(tmp_path: Path) -> None:
    def fn(comm: dtlab.Comm) -> Any:
        mine, other = constant(comm, 1.0), constant(comm, 2.0)
        save(tmp_path / "c", mine)
        save(tmp_path / "c", other)  # a run that knows nothing of the first may go on from it
        with pytest.raises(dtlab.ConfigError) as error:
            save(tmp_path / "c", mine)
        load(tmp_path / "c", mine)
        save(tmp_path / "c", mine)
        return str(error.value)

    for message in on("simulator", fn, ranks=2).values:
        assert "another run has saved a checkpoint here since this one saved" in message
    assert loaded(tmp_path / "c") == 2.0


def test_a_run_that_has_passed_over_a_torn_checkpoint_goes_on_saving(tmp_path: Path) -> None:
    def fn(comm: dtlab.Comm) -> None:
        model = constant(comm, 3.0)
        load(tmp_path / "c", model)
        save(tmp_path / "c", model, extra=3.0)

    for value in (1.0, 2.0):
        saved(tmp_path / "c", value)
    (tmp_path / "c" / "2" / "rank1.pt").unlink()
    with pytest.warns(UserWarning, match=r"loading .*c/1 instead"):
        on("simulator", fn, ranks=2)
    assert read_extra(tmp_path / "c") == 3.0


def test_a_run_whose_folder_was_removed_makes_it_anew(tmp_path: Path) -> None:
    def fn(comm: dtlab.Comm) -> None:
        model = constant(comm, 1.0)
        save(tmp_path / "c", model)
        if comm.rank == 0:
            shutil.rmtree(tmp_path / "c")
        save(tmp_path / "c", model)

    on("simulator", fn, ranks=2)
    assert loaded(tmp_path / "c") == 1.0


@pytest.mark.parametrize(("moment", "overtaken"), [
    ("rank0.pt", False), ("latest", False), ("latest", True)])
def test_two_runs_that_save_at_the_same_moment_are_told(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, overtaken: bool) -> None:
    """overtaken: the other one began before, and has made its own checkpoint the latest."""
    saved(tmp_path / "c", 1.0)
    begun = []

    def another(what: str, path: str) -> None:
        if (what, Path(path).name) == ("write", moment) and not begun:
            begun.append(True)
            if overtaken:
                shutil.copytree(tmp_path / "c/1", tmp_path / "c/0")
                (tmp_path / "c/latest").write_text("0")
            else:
                saved(tmp_path / "c", 2.0)

    Files(monkeypatch, another)
    with pytest.raises(dtlab.ConfigError, match="saves checkpoints here at the same time"):
        saved(tmp_path / "c", 3.0)
    monkeypatch.undo()
    assert loaded(tmp_path / "c") == (1.0 if overtaken else 2.0)
