"""The contents of a checkpoint: what a rank saves, whether it fits a model, and how that is filled.

A rank's contents are pieces of flattened tensors by kind and name, such as ("exp_avg", "0.weight");
the kind of the model's own is "".
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.parallel import checkpoint_files as files
from dtlab.parallel import random_numbers
from dtlab.parallel.hybrid import Hybrid
from dtlab.parallel.sharded import parts_of, share
from dtlab.parallel.synchronized import DistributedModule, SteppedPart

PER_PARAMETER = {"step", "eta", "mu", "mu_product"}  # of torch's optimizers, even if it's a scalar
COMPILED = "_orig_mod."  # in names that torch.compile gives
Optimizer = torch.optim.Optimizer


# ---- what is saved -------------------------------------------------------------------------------


def replicated(model: DistributedModule) -> dict[str, Any]:
    """Return what all ranks hold: persistent buffers, parameters that are frozen, extra state."""
    trained = set(model.trained)
    return {name: value for name, value in own_state(model.module).items()
            if not (isinstance(value, nn.Parameter) and value in trained)}


def own_state(module: nn.Module) -> dict[str, Any]:
    """The tensors of `state_dict` themselves, which its hooks may have cast, copied or left out."""
    state: dict[str, Any] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        part._save_to_state_dict(state, f"{name}." if name else "", keep_vars=True)
    return state


def shapes_of(model: DistributedModule) -> dict[str, tuple[int, ...] | None]:
    """Return the shapes of the whole tensors that this rank has a part of; None: no tensor."""
    return {part.name: tuple(part.shape) for part in model.stepped_parts()} | {
        name: tuple(value.shape) if isinstance(value, Tensor) else None
        for name, value in replicated(model).items()}


def places_of(model: DistributedModule) -> dict[str, tuple[int, int]]:
    """Return the (rank, size) of each parameter that is a part of a tensor-parallel layer."""
    parts = {} if isinstance(model, Hybrid) else parts_of(model.module)  # it names their wholes
    return {name: (int(comm.rank), comm.size) for name, (comm, _) in parts.items()}


def names_by_group(comm: Comm, model: DistributedModule, optimizer: Optimizer | None
                   ) -> list[list[str]]:
    """The names of all ranks' parameters in each parameter group."""
    names = defaultdict(list)
    for part in model.stepped_parts():
        names[part.tensor].append(part.name)
    mine = [[name for p in group["params"] for name in names[p]]
            for group in getattr(optimizer, "param_groups", [])]
    everyone = zip_longest(*comm._all_gather_objects(mine), fillvalue=())
    return [sorted(set().union(*of_ranks)) for of_ranks in everyone]


def contents_of(model: DistributedModule, optimizer: Optimizer | None, groups: list[list[str]],
                extra: Any) -> dict[str, Any]:
    """Copy what this rank saves. values: the state that is not one number for each element."""
    pieces: dict[tuple[str, str], list[tuple[int, Tensor]]] = defaultdict(list)
    values: dict[tuple[str, str], Any] = {}
    for part in model.stepped_parts():
        state = optimizer.state.get(part.tensor, {}) if optimizer else {}
        for kind, value in {"": part.tensor, **state}.items():
            if not (isinstance(value, Tensor) and value.shape == part.tensor.shape
                    and (value.dim() or kind not in PER_PARAMETER)):
                _check_value(kind, value, part)
                values[kind, part.name] = value
                continue
            flat = value.detach().reshape(-1)
            for start, at, length in part.runs if part.original else ():
                own = range(length) if model.sharded else share(length, model.comm)
                piece = flat[at + own.start : at + own.stop].to("cpu", copy=True)
                pieces[kind, part.name].append((start + own.start, piece))
    for name, value in replicated(model).items() if model.comm.rank == 0 else ():
        if isinstance(value, Tensor):
            pieces["", name].append((0, value.detach().reshape(-1).to("cpu", copy=True)))
        else:
            values["", name] = value
    lists = "params", "param_names"
    options = {name: {key: value for key, value in group.items() if key not in lists}
               for names, group in zip(groups, optimizer.param_groups if optimizer else [],
                                       strict=False) for name in names}
    return {"pieces": dict(pieces), "shapes": shapes_of(model), "places": places_of(model),
            "optimizer": type(optimizer).__name__ if optimizer else None,
            "values": files.readable("the optimizer's state", values),
            "options": files.readable("an option of the optimizer", options),
            "extras": {model.comm.rank: files.readable("extra", extra)},
            "random": {model.comm.rank: random_numbers.get_state()}}


# ---- checks --------------------------------------------------------------------------------------


def check_optimizer(model: DistributedModule, optimizer: Any) -> None:
    """Raise `ConfigError` unless `optimizer` steps parameters of `model`, and nothing else."""
    if optimizer is None:
        return
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"an optimizer is a torch.optim.Optimizer, not {optimizer!r:.80}")
    own = {part.tensor for part in model.stepped_parts()}
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    others = [p for p in stepped.union(optimizer.state) - own
              if not isinstance(p, Tensor) or (p.requires_grad and p.numel() and not model.sharded)]
    if others or (own and stepped.isdisjoint(own)):
        raise ConfigError("the optimizer doesn't step this model's parameters, or more than those; "
                          "make it of model.parameters(), or use the one that zero returned")


def _check_value(kind: str, value: Any, part: SteppedPart) -> None:
    """Raise `ConfigError` if `value` is of a whole parameter, and this rank has a part."""
    number = value is None or isinstance(value, (int, float)) or (
        isinstance(value, Tensor) and value.dim() == 0)
    if not number and sum(length for *_, length in part.runs) < part.shape.numel():
        raise ConfigError(f"the optimizer's {kind!r} is neither a number nor of the shape of "
                          f"{part.name!r}, of which a rank has a part; use DataParallel for it")


def check_contents(model: DistributedModule, saved: dict[str, Any], needed: set[str]) -> None:
    """Raise `ConfigError` unless the checkpoint is complete, and of such a model."""
    shapes = saved["shapes"]
    if any(p.is_meta for p in model.parameters()):
        raise ConfigError("the model is on the device meta, where it can't have values; make it on "
                          "another one, or call its to_empty(device=…) before wrapping it")
    plain = {name.replace(COMPILED, "") for name in shapes}
    for name, shape in shapes_of(model).items():
        if name not in shapes and name.replace(COMPILED, "") in plain:
            raise ConfigError(f"there is no {name!r}: torch.compile(module) renames parameters; "
                              f"compile as when it was saved, and from now on by module.compile(), "
                              f"which keeps the names")
        if name not in shapes:
            raise ConfigError(f"there is no {name!r}; the model has one of shape {shape}")
        if shapes[name] != shape:
            raise ConfigError(f"{name!r} has shape {shapes[name]}, but the model's is {shape}")
    for name, place in places_of(model).items():
        rank, ranks = saved.get("places", {}).get(name, place)
        if (rank, ranks) != place:
            raise ConfigError(f"it holds the part of {name!r} of tensor-parallel rank {rank} of "
                              f"{ranks}; save each of these ranks in a folder of its own, or use "
                              f"hybrid, which saves the whole model in one")
    for name in sorted(set(shapes) - needed):
        raise ConfigError(f"it has {name!r} of shape {shapes[name]}, but the model has none")
    whole = dict.fromkeys(("", name) for name, shape in shapes.items() if shape is not None)
    for kind, name in whole | saved["pieces"]:
        there = sum(len(values) for _, values in saved["pieces"].get((kind, name), []))
        if there < math.prod(shapes[name]):
            raise ConfigError(f"{' of '.join(filter(None, (kind, repr(name))))} has {there} of its "
                              f"{math.prod(shapes[name])} elements")


def check_optimizer_state(model: DistributedModule, optimizer: Optimizer,
                          groups: list[list[str]], saved: dict[str, Any]) -> None:
    """Raise `ConfigError` unless the checkpoint is of such an optimizer, and equal for parameters
    that have their options or their state in common now."""
    before, now = saved["optimizer"] or "no optimizer", type(optimizer).__name__
    if before != now:
        raise ConfigError(f"it holds the state of {before}, not of {now}; load the model alone")
    for names in groups:
        for name in names:
            if name not in saved["options"]:
                raise ConfigError(f"{name!r} was saved in no parameter group; load the model alone")
            _check_group(names[0], name, saved["options"])
    state: dict[str, dict[str, Any]] = defaultdict(dict)
    for (kind, name), value in saved["values"].items():
        state[name][kind] = value
    for part in model.stepped_parts():
        for kind, value in state[part.name].items():
            _check_value(kind, value, part)


def _check_group(a: str, b: str, found: dict[str, dict[str, Any]]) -> None:
    of_a, of_b = (tree_map_only(Tensor, Tensor.tolist, found[name]) for name in (a, b))
    for key in of_a | of_b:
        if of_a.get(key) != of_b.get(key):
            raise ConfigError(f"{a!r} was saved with the {key} {of_a.get(key)}, {b!r} with "
                              f"{of_b.get(key)}, but this optimizer has them in one parameter "
                              f"group; make it as it was when it was saved")


# ---- reading -------------------------------------------------------------------------------------


def read_shards(paths: list[Path]) -> dict[str, Any]:
    """Return the contents of these shards, merged."""
    return merged([torch.load(path, mmap=True, weights_only=True, map_location="cpu")
                   for path in paths])


def merged(contents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge what several ranks have saved; the first one's is what all have in common."""
    by_name = "values", "shapes", "extras", "random"
    saved = contents[0] | {"pieces": defaultdict(list)} | {kind: {} for kind in by_name}
    for theirs in contents:
        for key, pieces in theirs["pieces"].items():
            saved["pieces"][key] += pieces
        for kind in by_name:
            saved[kind] |= theirs[kind]
    return saved


@torch.no_grad()
def fill(model: DistributedModule, optimizer: Optimizer | None, groups: list[list[str]],
         saved: dict[str, Any]) -> None:
    """Set parameters, buffers, and the optimizer's state and options to the `merged` contents."""
    group_of: dict[Tensor, dict[str, Any]] = {}
    if optimizer is not None:
        optimizer.state.clear()
        for names, group in zip(groups, optimizer.param_groups, strict=True):
            group.update(copy.deepcopy(saved["options"][names[0]]) if names else {})
            group_of |= dict.fromkeys(group["params"], group)
    kinds = sorted({kind for kind, _ in saved["pieces"] | saved["values"]} - {""})
    for part in model.stepped_parts():
        _fill_tensor(part.tensor.detach(), "", part, saved)
        if optimizer is not None and part.tensor in group_of:
            for kind in kinds:
                _fill_state(optimizer.state[part.tensor], kind, part, saved,
                            group_of[part.tensor])
    for name, value in replicated(model).items():
        if isinstance(value, Tensor):
            value.copy_(_joined(saved["pieces"]["", name]).view(value.shape))
        else:
            model.module.load_state_dict({name: saved["values"]["", name]}, strict=False)
    model.share_parameters()


def _fill_state(state: dict[str, Any], kind: str, part: SteppedPart, saved: dict[str, Any],
                group: dict[str, Any]) -> None:
    key = kind, part.name
    if key in saved["values"]:
        everything = group.get("capturable") or group.get("fused")  # else numbers stay on the CPU
        state[kind] = tree_map_only(
            Tensor, lambda x: x.to(part.tensor.device) if x.dim() or everything else x,
            copy.deepcopy(saved["values"][key]))
    elif key in saved["pieces"]:
        dtype, before = (saved["pieces"][k, part.name][0][1].dtype for k in (kind, ""))
        dtype = part.tensor.dtype if dtype == before else dtype
        state.setdefault(kind, torch.zeros_like(part.tensor, dtype=dtype))
        _fill_tensor(state[kind], kind, part, saved)


def _fill_tensor(tensor: Tensor, kind: str, part: SteppedPart, saved: dict[str, Any]) -> None:
    whole, flat = _joined(saved["pieces"][kind, part.name]), tensor.reshape(-1)
    for start, at, length in part.runs:
        flat[at : at + length] = whole[start : start + length]
    tensor.copy_(flat.view(tensor.shape))  # not contiguous: `flat` is a copy


def _joined(pieces: list[tuple[int, Tensor]]) -> Tensor:
    """The whole, flattened."""
    whole = pieces[0][1].new_empty(max(first + len(values) for first, values in pieces))
    for first, values in pieces:
        whole[first : first + len(values)] = values
    return whole
