"""Sharded checkpoints: each rank writes what it steps, and any number of ranks reads it again.

torch.distributed.checkpoint does the same over torch's process groups; here it has to work over any
`Comm`, also a simulated one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from dtlab.checks import check_whole, short
from dtlab.collectives import broadcast
from dtlab.comm import Comm, Work
from dtlab.errors import ConfigError
from dtlab.parallel import checkpoint_files as files
from dtlab.parallel import random_numbers
from dtlab.parallel.checkpoint_contents import (
    Optimizer,
    check_contents,
    check_optimizer,
    check_optimizer_state,
    contents_of,
    fill,
    names_by_group,
    own_state,
    read_shards,
    shapes_of,
)
from dtlab.parallel.hybrid import Hybrid
from dtlab.parallel.sharded import parts_of
from dtlab.parallel.synchronized import DistributedModule, check_distributed


def save(folder: str | Path, model: DistributedModule, optimizer: Optimizer | None = None,
         extra: Any = None, *, keep: int = 2, wait: bool = True) -> Work | None:
    """Write parameters, persistent buffers, the optimizer's state and options, and the state of
    each rank's random numbers (of torch, NumPy and Python) to `folder`, or where it links to. All
    ranks call it.

    Each call writes a checkpoint of the next number, and makes it the one that counts when it is
    complete on the disk; then it removes all but the newest `keep`. A run that dies at any moment
    leaves the one before or the new one. Each rank writes what it steps: of `DataParallel` its
    share of everything.

    extra: what `load` is to return on this rank, such as {"step": 7, "scheduler":
    scheduler.state_dict(), "sampler": sampler.state_dict()}: tensors, numbers, strings, and lists
    and dicts of them.
    wait: False: copy all of it to the CPU's memory, and write beside what the ranks do next.
    Returns a `Work` to wait for; the next `save` and `load` of `model` wait for it, too.
    Raises `ConfigError` on all ranks if one can't write, or if another run saves here as well.
    """
    check_distributed(model, "save")
    check_whole("save: keep", keep, 1, 2**30)
    comm, folder = model.comm.labelled("save"), files.path_of(folder)
    finish_saving(model)
    groups = names_by_group(comm, model, optimizer)
    with files.on_all_ranks(comm, "save", folder):
        check_optimizer(model, optimizer)
        contents = contents_of(model, optimizer, groups, extra)
    stream = comm.subgroup(range(comm.size))  # beside what has been begun on `comm` itself
    target = folder if wait else folder.absolute()  # the rank may change its folder meanwhile
    work = stream.begin(_write, target, contents, model, keep)
    if wait:
        work.wait()
        return None
    model.saving = work
    return work


def finish_saving(model: DistributedModule) -> None:
    """Wait until the last checkpoint of `model` is on the disk."""
    work, model.saving = model.saving, None
    if work is not None:
        work.wait()


def _write(comm: Comm, folder: Path, contents: dict[str, Any], model: DistributedModule,
           keep: int) -> None:
    target, latest, name = None, None, f"rank{comm.rank}.pt"
    with files.on_all_ranks(comm, "save", folder):
        if comm.rank == 0:
            target = files.prepare(folder, model.checkpoints.get(folder.absolute()))
            latest = files.latest_number(folder)
    target, latest = comm._all_gather_objects((target, latest))[0]
    with files.on_all_ranks(comm, "save", folder):
        digest = files.write_shard(target / name, contents)
    digests = comm._all_gather_objects(digest)
    with files.on_all_ranks(comm, "save", folder):
        if comm.rank == 0:
            files.publish(target, {f"rank{r}.pt": d for r, d in enumerate(digests)}, latest, keep)
    model.checkpoints = {**model.checkpoints, folder.absolute(): int(target.name)}


def load(folder: str | Path, model: DistributedModule, optimizer: Optimizer | None = None) -> Any:
    """Read the checkpoint that `save` wrote last, from any number of ranks, for any of
    `DataParallel`, `zero` and `hybrid`. Returns the `extra` of this rank, or that of rank 0 if
    there were more or fewer ranks.

    Optimizer state and the options of parameter groups are restored by the names of parameters; on
    as many ranks as before, each one's random numbers go on where they were. A checkpoint with a
    file that is missing or corrupt is passed over, with a warning that names it, for the one
    before.
    Raises `ConfigError`, on all ranks and before anything is changed, if none is whole, if it is
    that of another model or optimizer, or if parameters whose options differ are in one parameter
    group now.
    """
    check_distributed(model, "load")
    comm, folder = model.comm.labelled("load"), files.path_of(folder)
    finish_saving(model)
    path, index, latest = files.first_whole(comm, folder)
    extra = restore(model, optimizer, lambda: read_shards([path / name for name in index]),
                    f"load: {path}")
    model.checkpoints = {**model.checkpoints, folder.absolute(): latest}
    return extra


def restore(model: DistributedModule, optimizer: Optimizer | None,
            read_all: Callable[[], dict[str, Any]], call: str) -> Any:
    """Fill model and optimizer with what `read_all` returns: all ranks' contents, `merged`."""
    comm, groups = model.comm, names_by_group(model.comm, model, optimizer)
    needed = set().union(*comm._all_gather_objects(set(shapes_of(model))))
    with files.on_all_ranks(comm, call, None):
        saved = read_all()
        check_contents(model, saved, needed)
        check_optimizer(model, optimizer)
        if optimizer is not None:
            check_optimizer_state(model, optimizer, groups, saved)
    fill(model, optimizer, groups, saved)
    extras, as_before = saved["extras"], len(saved["extras"]) == comm.size
    if as_before:
        random_numbers.set_state(saved["random"][comm.rank])
    return extras[comm.rank if as_before else 0]


def read_extra(folder: str | Path) -> Any:
    """The `extra` of rank 0 in the checkpoint that `load` would read, without a model."""
    problems = []
    for path in files.candidates(files.path_of(folder)):
        try:
            index = files.read_index(path)
            for name, digest in index.items():
                files.check_shard(path / name, digest)
            return read_shards([path / next(iter(index))])["extras"][0]  # of rank 0's file
        except ConfigError as problem:
            problems.append(problem)
    raise problems[0]


def full_state_dict(model: DistributedModule) -> dict[str, Any]:
    """Return the `state_dict` of the module on one device, in the optimizer's dtype, on every rank;
    all call it: for torch.save, or to load it elsewhere. Buffers, and what is frozen,
    are rank 0's. Memory: all of the model. Raises `ConfigError` for tensor-parallel layers that are
    not in a `hybrid`, of which each rank has a part."""
    check_distributed(model, "full_state_dict")
    if not isinstance(model, Hybrid) and (parts := parts_of(model.module)):
        raise ConfigError(f"full_state_dict: {next(iter(parts))} is this rank's part of a tensor-"
                          f"parallel layer; hybrid puts such layers together again")
    full: dict[str, Any] = model.full_parameters()
    if isinstance(model, Hybrid):  # a GPT, whose parameters are all trained
        return full
    whole: dict[Tensor, Tensor] = {}
    for name, value in (*model.module.named_parameters(), *model.module.named_buffers()):
        if name not in full:
            full[name] = broadcast(model.comm, value.detach().clone(), algorithm="auto")
        whole[value] = full[name]
    tensors = {f"module.{name}": whole[x]  # once for each module: it may have several names
               for prefix, part in model.module.named_modules()
               for named in (part.named_parameters, part.named_buffers)
               for name, x in named(prefix, recurse=False, remove_duplicate=False)}
    state: dict[str, Any] = functional_call(StateDict(model.module), tensors, tie_weights=False)
    return state


class StateDict(nn.Module):
    """`state_dict` of `module`, as its hooks make it, for `functional_call` with other tensors."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self) -> dict[str, Any]:
        return dict(self.module.state_dict())


def load_full_state_dict(model: DistributedModule, state: Mapping[str, Any]) -> None:
    """Set parameters and buffers to those of one device's `state_dict`, the same on all ranks,
    which all call it. The optimizer's state stays.

    Raises `ConfigError`, on all ranks and before anything is changed, if names or shapes differ.
    """
    check_distributed(model, "load_full_state_dict")
    if not isinstance(state, Mapping):
        raise ConfigError(f"load_full_state_dict takes tensors by name, not {short(state)}")
    comm = model.comm.labelled("load_full_state_dict")
    needed = set().union(*comm._all_gather_objects(set(shapes_of(model))))
    other_names = set(own_state(model.module))  # of tied parameters
    found = {name: x for name, x in state.items() if name not in other_names - needed}
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    saved = {"pieces": {("", name): [(0, x.detach().reshape(-1))] for name, x in tensors.items()},
             "values": {("", name): found[name] for name in found.keys() - tensors},
             "shapes": {name: tuple(x.shape) if name in tensors else None
                        for name, x in found.items()}}
    with files.on_all_ranks(model.comm, "load_full_state_dict", None):
        check_contents(model, saved, needed)
    fill(model, None, [], saved)
