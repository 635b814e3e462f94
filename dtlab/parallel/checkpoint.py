"""Sharded checkpoints: each rank writes what it steps, and any number of ranks reads it again.

A folder holds a file a rank, of pieces of flattened tensors, and index.json, which says what there
is and what each file's SHA-256 is. It is written beside its name and then renamed, so that a run
that dies while saving leaves the checkpoint before.

torch.distributed.checkpoint does the same over torch's process groups; here it has to work over any
`Comm`, also a simulated one.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtlab.collectives import barrier
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.parallel.synchronized import DistributedModule, check_distributed

Pieces = dict[str, list[tuple[int, Tensor]]]  # name → (first element, values)
INDEX = "index.json"


def save(folder: str | Path, model: DistributedModule,
         optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write parameters, buffers and optimizer state to `folder`, which is replaced if it is a
    checkpoint. All ranks call it, and return when it is complete.

    Each rank writes what it steps: of `DataParallel` its share of everything.
    """
    check_distributed(model, "save")
    comm, folder = model.comm, _checked(folder)
    partial = folder.with_name(folder.name + ".partial")
    if comm.rank == 0:
        if folder.exists() and not (folder / INDEX).exists():
            raise ConfigError(f"save: {folder} exists and is not a checkpoint; choose another name")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"save: {folder} can't be written: {error.strerror}") from None
    barrier(comm)
    pieces, shapes = _my_pieces(model, optimizer)
    file = partial / f"rank{comm.rank}.pt"
    torch.save(pieces, file)
    everyone = comm._all_gather_objects((file.name, _digest(file), shapes))
    if comm.rank == 0:
        index: dict[str, Any] = {"files": {name: digest for name, digest, _ in everyone},
                                 "shapes": {}, "groups": []}
        for *_, theirs in everyone:
            index["shapes"] |= theirs
        if optimizer is not None:
            index["groups"] = [
                {key: value.item() if isinstance(value, Tensor) else value
                 for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups]
        (partial / INDEX).write_text(json.dumps(index, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    barrier(comm)


def load(folder: str | Path, model: DistributedModule,
         optimizer: torch.optim.Optimizer | None = None) -> None:
    """Read what `save` wrote, from any number of ranks, for any of `DataParallel`, `zero`
    and `hybrid`.

    Raises `ConfigError`, before anything is changed, if the checkpoint is incomplete or corrupt or
    is that of another model.
    """
    check_distributed(model, "load")
    comm, folder = model.comm, _checked(folder)
    problems = [p for p in comm._all_gather_objects(_problem(folder, comm)) if p]
    if problems:
        raise ConfigError(f"load: {problems[0]}")
    index = json.loads((folder / INDEX).read_text())
    found: Pieces = defaultdict(list)
    for name in index["files"]:
        for key, pieces in torch.load(folder / name, mmap=True, weights_only=True).items():
            found[key] += pieces
    mine = _mismatch(model, optimizer, index["shapes"], found)
    problems = [p for p in comm._all_gather_objects(mine) if p]
    if problems:
        raise ConfigError(f"load: {folder}: {problems[0]}")
    _fill(model, optimizer, index, found)


def full_state_dict(model: DistributedModule) -> dict[str, Tensor]:
    """What `state_dict` of the module would be on one device, in the optimizer's dtype, on every
    rank, which all call it: for torch.save, or to load it elsewhere. Memory: all of the model.
    """
    check_distributed(model, "full_state_dict")
    state = {name: tensor.detach().clone() for name, tensor in _replicated(model)}
    return state | model.full_parameters()


# ---- what is saved -------------------------------------------------------------------------------


def _my_pieces(model: DistributedModule, optimizer: torch.optim.Optimizer | None
               ) -> tuple[Pieces, dict[str, list[int]]]:
    """What this rank writes, and the shapes of the whole tensors."""
    comm = model.comm
    pieces: Pieces = defaultdict(list)
    shapes: dict[str, list[int]] = {}

    def add(key: str, start: int, values: Tensor) -> None:
        if not model.sharded:  # everyone has it: each writes its share
            share = [len(part) for part in values.tensor_split(comm.size)]
            begin = sum(share[: comm.rank])
            start, values = start + begin, values[begin : begin + share[comm.rank]]
        pieces[key].append((start, values.cpu().clone()))

    for region in model.regions():
        state = {} if optimizer is None else optimizer.state.get(region.tensor, {})
        named = {"parameter": region.tensor, **state}
        for kind, tensor in named.items():
            key = f"{kind}/{region.name}"
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor) or tensor.shape != region.tensor.shape:
                shapes[key] = []
                if region.original and region.runs[0][0] == 0:
                    pieces[key] = [(0, torch.as_tensor(tensor).reshape(1).clone())]
                continue
            shapes[key] = list(region.shape)
            values = tensor.detach().reshape(-1)
            for start, at, length in region.runs if region.original else ():
                add(key, start, values[at : at + length])
    for name, tensor in _replicated(model):
        shapes[f"replicated/{name}"] = list(tensor.shape)
        if comm.rank == 0:
            pieces[f"replicated/{name}"] = [(0, tensor.detach().reshape(-1).cpu().clone())]
    return dict(pieces), shapes


def _replicated(model: DistributedModule) -> list[tuple[str, Tensor]]:
    """What all ranks hold: buffers, and parameters that are frozen."""
    frozen = [(name, p) for name, p in model.module.named_parameters() if not p.requires_grad]
    return [*frozen, *model.module.named_buffers()]


# ---- checks --------------------------------------------------------------------------------------


def _checked(folder: str | Path) -> Path:
    if not isinstance(folder, (str, Path)) or "\0" in str(folder):
        raise ConfigError(f"a checkpoint's folder is a str or a Path, not {folder!r}")
    return Path(folder)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _problem(folder: Path, comm: Comm) -> str | None:
    """Why `folder` can't be read; each rank looks at its share of the files."""
    try:
        files = json.loads((folder / INDEX).read_text())["files"]
    except OSError:
        return f"{folder} holds no checkpoint: there is no {INDEX}"
    except (ValueError, KeyError, TypeError):
        return f"{folder / INDEX} is corrupt"
    for name in list(files)[comm.rank :: comm.size]:
        if not (folder / name).is_file():
            return f"the shard {folder / name} is missing"
        if _digest(folder / name) != files[name]:
            return f"the shard {folder / name} is corrupt: its SHA-256 is not that in {INDEX}"
    return None


def _mismatch(model: DistributedModule, optimizer: torch.optim.Optimizer | None,
              shapes: dict[str, list[int]], found: Pieces) -> str | None:
    """Why the checkpoint doesn't fit `model`."""
    needed = [(f"parameter/{r.name}", list(r.shape)) for r in model.regions()]
    needed += [(f"replicated/{name}", list(tensor.shape)) for name, tensor in _replicated(model)]
    for key, shape in needed:
        if key not in shapes:
            return f"there is no {key!r}; the model has one of shape {tuple(shape)}"
        if shapes[key] != shape:
            return f"{key!r} has shape {tuple(shapes[key])}, but the model's is {tuple(shape)}"
    for key, shape in shapes.items():
        there = sum(len(values) for _, values in found[key])
        if there < math.prod(shape):
            return f"{key!r} has {there} of its {math.prod(shape)} elements"
    if optimizer is not None and not any(not k.startswith(("parameter", "repl")) for k in shapes):
        return "it holds no optimizer state; save it with the optimizer, or load it without"
    return None


# ---- reading -------------------------------------------------------------------------------------


@torch.no_grad()
def _fill(model: DistributedModule, optimizer: torch.optim.Optimizer | None,
          index: dict[str, Any], found: Pieces) -> None:
    kinds = sorted({key.split("/", 1)[0] for key in found} - {"parameter", "replicated"})
    if optimizer is not None:
        optimizer.state.clear()
        for group, saved in zip(optimizer.param_groups, index["groups"], strict=False):
            group.update(saved)
    for region in model.regions():
        targets = {"parameter": region.tensor.detach()}
        if optimizer is not None:
            state = optimizer.state[region.tensor]
            for kind in kinds:
                key = f"{kind}/{region.name}"
                if key not in found:
                    continue
                if index["shapes"][key] == [] and region.shape != ():
                    state[kind] = found[key][0][1].reshape(()).clone()
                else:
                    state.setdefault(kind, torch.zeros_like(
                        region.tensor, dtype=found[key][0][1].dtype))
                    targets[kind] = state[kind]
        for kind, tensor in targets.items():
            whole = _joined(found[f"{kind}/{region.name}"])
            for start, at, length in region.runs:
                tensor.view(-1)[at : at + length] = whole[start : start + length]
    for name, tensor in _replicated(model):
        tensor.detach().view(-1)[:] = _joined(found[f"replicated/{name}"])
    model.share_parameters()


def _joined(pieces: list[tuple[int, Tensor]]) -> Tensor:
    """The whole, flattened."""
    whole = pieces[0][1].new_empty(max(first + len(values) for first, values in pieces))
    for first, values in pieces:
        whole[first : first + len(values)] = values
    return whole
