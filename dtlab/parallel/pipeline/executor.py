"""Runs any schedule: each rank does its actions in order, whatever they are. Chapter: 12."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dtlab.collectives import all_reduce, broadcast
from dtlab.collectives.registry import check_comm
from dtlab.comm import Comm, Send, Work
from dtlab.errors import ConfigError, DtlabError
from dtlab.parallel.memory import mark
from dtlab.parallel.pipeline.action import Action
from dtlab.parallel.pipeline.schedule import Schedule
from dtlab.parallel.types import known_letters

Message = Action  # what an F (activations) or a B or I (their gradients, here always "B") hands on
Extras = tuple[Any, ...]


class Pipeline:
    """The stages of this rank, run by `schedule` over the ranks of `comm`.

    stages: a module, or one for each stage that the schedule gives this rank, in order; each takes
    what the stage before returned, one tensor. recompute: keep only a stage's inputs, and run it
    again in backward. tied: parameters by name; those that several ranks call the same are equal
    at the start, and their gradients are added up. seconds: an action's virtual time.
    Raises `ConfigError` if the schedule can't run, doesn't fit the ranks, or differs among them.
    """

    def __init__(self, stages: nn.Module | Sequence[nn.Module], schedule: Schedule, comm: Comm, *,
                 recompute: bool = False, tied: Mapping[str, nn.Parameter] | None = None,
                 seconds: Callable[[Action], float] = lambda action: 0.0):
        check_comm(comm, "Pipeline(stages, schedule, comm)")
        if not isinstance(schedule, Schedule):
            raise ConfigError(f"Pipeline takes a schedule, such as one_f_one_b(4, 8), not "
                              f"{type(schedule).__name__}")
        schedule.check()
        if schedule.ranks != comm.size:
            raise ConfigError(f"the schedule is for {schedule.ranks} ranks, but there are "
                              f"{comm.size}")
        if len(set(comm._all_gather_objects(schedule))) > 1:
            raise ConfigError("ranks hold different schedules")
        numbers = schedule.stages_of(comm.rank)
        modules = [stages] if isinstance(stages, nn.Module) and len(numbers) == 1 else list(stages)  # type: ignore[arg-type]
        if len(modules) != len(numbers) or not all(isinstance(m, nn.Module) for m in modules):
            raise ConfigError(f"rank {comm.rank}: the schedule gives this rank the stages "
                              f"{numbers}, but {len(modules)} modules came")
        self.modules = dict(zip(numbers, modules, strict=True))
        self.schedule, self.comm = schedule, comm
        self.recompute, self.seconds = recompute, seconds
        self.row = schedule.rows[comm.rank]
        # The messages from each other rank, in the order in which it sends them.
        self.coming = {rank: [message for action in row if (message := self._handed_on(action))
                              and schedule.rank_of[message.stage] == comm.rank]
                       for rank, row in enumerate(schedule.rows) if rank != comm.rank}
        self.tied = self._tie(tied or {})

    # ---- who hands what to whom ------------------------------------------------------------------

    def _handed_on(self, action: Action) -> Message | None:
        """What the action makes for the stage after or before: named by the stage that gets it."""
        stage, kind, micro = action
        if kind == "F" and stage < self.schedule.stages - 1:
            return Action(stage + 1, "F", micro)
        if kind in "BI" and stage:
            return Action(stage - 1, "B", micro)
        return None

    def _needed(self, action: Action) -> Message | None:
        stage, kind, micro = action
        if kind == "F":
            return action if stage else None
        last = stage == self.schedule.stages - 1
        return None if kind == "W" or last else Action(stage, "B", micro)

    # ---- a step ----------------------------------------------------------------------------------

    def step(self, inputs: Tensor, targets: Any, loss_fn: Callable[[Tensor, Any], Tensor],
             *extras: Tensor, total: float | None = None) -> Tensor:
        """Forward and backward of a batch: its gradients are added to the parameters' `grad`.

        All ranks get the whole batch; the first stage's uses `inputs`, the last one's `targets`.
        `loss_fn(output, targets)` is the mean over what counts in its micro-batch: targets other
        than −100, torch's `ignore_index`, if they are whole numbers, else all elements. Returns the
        mean over what counts in the batch, on every rank, whose gradient it is; total: divide the
        sum by this instead. extras: handed to every stage's module, cut like the batch.
        Raises `ConfigError` unless the schedule's micro-batches divide the batch.
        """
        m = self.schedule.micro_batches
        size = tuple(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
        if not isinstance(size, tuple) or not size or not size[0] or size[0] % m:
            raise ConfigError(f"{m} micro-batches need inputs whose first dimension they divide, "
                              f"not {size}")
        cut = [torch.as_tensor(x).chunk(m) for x in (inputs, targets, *extras)]
        self.batch = [(x, y, tuple(more)) for x, y, *more in zip(*cut, strict=True)]
        self.loss_fn = loss_fn
        self.loss = torch.zeros((), dtype=torch.float64, device=self.comm.device)
        self.saved: dict[tuple[int, int], Any] = {}  # by (stage, micro-batch)
        self.got: dict[Message, Tensor] = {}
        self.shapes: dict[int, tuple[torch.Size, torch.dtype, dict[str, str]]] = {}  # of inputs
        self.under_way: dict[int, list[tuple[Message, Tensor, Work]]] = defaultdict(list)
        self.left = {rank: list(messages) for rank, messages in self.coming.items()}
        self.sends: list[Work] = []
        for number, action in enumerate(self.row):
            self._expect(action, now=True)
            for soon in self.row[number + 1 : number + 2]:
                self._expect(soon, now=False)
            message = self._needed(action)
            if message is not None:
                self._receive(message)
            with self.comm.compute(str(action), self.seconds(action)):
                result = self._run(action)
            if result is not None:
                self._send_result(action, result)
        for work in self.sends:
            work.wait()
        self._reduce_tied()
        last = self.schedule.rank_of[self.schedule.stages - 1]
        return broadcast(self.comm, self.loss, root=last)

    def _run(self, action: Action) -> Tensor | None:
        """Compute; returns what the next stage needs: the output, or the gradient of the input."""
        stage, kind, micro = action
        if kind == "F":
            return self._forward(stage, micro)
        module = self.modules[stage]
        if kind == "W":
            gradient, groups, x, y = self.saved.pop((stage, micro))
            if groups is None:
                torch.autograd.backward(y, gradient)
            else:
                halved_backward().stage_backward_weight(trained(module), groups)
            return None
        x, y = self.saved.pop((stage, micro))
        gradient = self.got.pop(Action(stage, "B", micro), None)
        if kind == "B":
            torch.autograd.backward(y, gradient)
        elif stage == 0:  # whose input needs no gradient: W does it all
            self.saved[stage, micro] = gradient, None, x, y
            return None
        else:
            _, groups = halved_backward().stage_backward_input(
                [y], None if gradient is None else [gradient], [x], trained(module))
            self.saved[stage, micro] = None, groups, None, None
        return x.grad if stage else None

    def _forward(self, stage: int, micro: int) -> Tensor | None:
        inputs, targets, extras = self.batch[micro]
        x = self.got.pop(Action(stage, "F", micro)).requires_grad_() if stage else inputs
        module = self.modules[stage]
        try:
            y = (checkpoint(module, x, *extras, use_reentrant=False) if self.recompute
                 else module(x, *extras))
        except RuntimeError as error:
            if not stage or isinstance(error, DtlabError):
                raise
            raise ConfigError(f"stage {stage} fails on what stage {stage - 1} hands on, of shape "
                              f"{tuple(x.shape)}: {error}") from error
        if not isinstance(y, Tensor):
            raise ConfigError(f"stage {stage} must return one tensor, not {type(y).__name__}")
        if stage < self.schedule.stages - 1:
            y = y.clone() if y._is_view() else y  # a view can't be detached: see below
            self.saved[stage, micro] = x, y
            return y.detach()
        loss = self.loss_fn(y, targets) / self.schedule.micro_batches
        self.loss += loss.detach()
        self.saved[stage, micro] = x, loss
        return None

    # ---- messages --------------------------------------------------------------------------------

    def _send_result(self, action: Action, result: Tensor) -> None:
        message = self._handed_on(action)
        assert message is not None
        rank = self.schedule.rank_of[message.stage]
        if rank == self.comm.rank:
            self.got[message] = result
            return
        comm = self.comm.labelled(str(message))
        if message.kind == "F" and message.stage not in self.shapes:
            self.shapes[message.stage] = (result.shape, result.dtype,
                                          known_letters.get(result, {}))
            self.sends.append(comm.isend(self.shapes[message.stage], rank))
        self.sends.append(comm.post(Send(result.contiguous(), rank))[0])

    def _expect(self, action: Action, now: bool) -> None:
        """Begin to receive what the action needs, and what its sender sends before that. Unless it
        is needed `now`, only if its shape is known: that of a stage's inputs comes with the first
        of them, and their gradients have the same."""
        message = self._needed(action)
        if message is None:
            return
        rank = self._sender(message)
        while message in self.left.get(rank, ()):
            coming = self.left[rank][0]
            stage = coming.stage + (coming.kind == "B")  # whose inputs these are, or gradients of
            if stage not in self.shapes:
                if not now:
                    return
                self.shapes[stage] = self.comm.labelled(str(coming)).recv_object(rank)
            shape, dtype, letters = self.shapes[stage]
            x = mark(torch.empty(shape, dtype=dtype, device=self._device()), "activations")
            known_letters[x] = letters if coming.kind == "F" else {}
            work = self.comm.labelled(str(coming)).irecv(x, rank)
            self.under_way[rank].append((self.left[rank].pop(0), x, work))

    def _receive(self, message: Message) -> None:
        while message not in self.got:  # as it is if the stage before or after is here, too
            came, x, work = self.under_way[self._sender(message)].pop(0)
            work.wait()
            self.got[came] = x

    def _sender(self, message: Message) -> int:
        return self.schedule.rank_of[message.stage + (-1 if message.kind == "F" else 1)]

    def _device(self) -> torch.device:
        p = next((p for module in self.modules.values() for p in module.parameters()), None)
        return self.comm.device if p is None else p.device

    # ---- parameters that several stages share ----------------------------------------------------

    def _tie(self, tied: Mapping[str, nn.Parameter]) -> list[tuple[Comm, nn.Parameter]]:
        everyone = self.comm._all_gather_objects(sorted(tied))
        pairs = []
        for name in sorted({name for names in everyone for name in names}):
            ranks = [rank for rank, names in enumerate(everyone) if name in names]
            if len(ranks) > 1 and name in tied:
                group = self.comm.subgroup(ranks)
                broadcast(group, tied[name].detach())
                pairs.append((group, tied[name]))
        return pairs

    def _reduce_tied(self) -> None:
        for group, parameter in self.tied:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            all_reduce(group, parameter.grad)


def halved_backward() -> Any:
    """Torch's backward in two halves, of inputs and of weights. Imported when it is wanted: it
    brings all of torch's compiler, which takes a second."""
    from torch.distributed.pipelining import _backward

    return _backward


def trained(module: nn.Module) -> Any:
    """The parameters of `module` that need gradients, as torch's functions want them."""
    return iter([p for p in module.parameters() if p.requires_grad])
