"""Runs any schedule: each rank does its actions in order, whatever they are. Chapter: 12."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from operator import call
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.checkpoint import checkpoint

from dtlab.checks import check_flag, check_positive, short
from dtlab.collectives import broadcast
from dtlab.collectives.registry import check_comm
from dtlab.comm import Comm, Send, Work
from dtlab.errors import ConfigError, DtlabError
from dtlab.parallel.memory import mark
from dtlab.parallel.model_check import check_same_batch, check_whole_batch
from dtlab.parallel.pipeline.action import Action
from dtlab.parallel.pipeline.batch import as_tensor, check_mean, counted, micro_batches, unchanged
from dtlab.parallel.pipeline.halved import backward_of_inputs, backward_of_weights, check_halved
from dtlab.parallel.pipeline.outputs import OutputMeta, Received, joined, taken_apart
from dtlab.parallel.pipeline.schedule import Schedule
from dtlab.parallel.pipeline.tied import reduce_tied, take_gradients, tie
from dtlab.parallel.synchronized import SynchronizedModule
from dtlab.parallel.types import known_letters

Message = Action  # what an F (activations) or a B or I (their gradients, here always "B") hands on


class Pipeline:
    """The stages of this rank, run by `schedule` over the ranks of `comm`.

    stages: a module, or one for each stage that the schedule gives this rank, in order; each takes
    what the stage before returned: a tensor, or a tuple, list or dict of tensors. recompute: keep
    only a stage's inputs, and run it again in backward. tied: parameters by name; those that
    several ranks call the same are equal at the start, and their gradients are added up. seconds:
    an action's virtual time. A layer that looks at the whole batch, as BatchNorm does, sees a
    micro-batch. Clip with `parallel.clip_grad_norm_`: torch's takes the norm of this rank's stages;
    take bfloat16, as GradScaler would look for infinities in these alone.
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
        if len(set(comm.labelled("Pipeline")._all_gather_objects(schedule))) > 1:
            raise ConfigError("ranks hold different schedules")
        check_flag("recompute", recompute)
        if not callable(seconds):
            raise ConfigError(f"seconds is a function of an action, not {short(seconds)}")
        numbers = schedule.stages_of(comm.rank)
        several = isinstance(stages, Iterable) and (len(numbers) != 1
                                                    or not isinstance(stages, nn.Module))
        modules: list[Any] = list(stages) if several else [stages]  # type: ignore[arg-type]
        if len(modules) != len(numbers) or not all(isinstance(m, nn.Module) for m in modules):
            raise ConfigError(f"rank {comm.rank}: the schedule gives this rank the stages "
                              f"{numbers}, but {len(modules)} modules came")
        for module in modules if schedule.micro_batches > 1 else ():
            check_whole_batch(module)
        self.modules = dict(zip(numbers, modules, strict=True))
        self.schedule, self.comm, self.recompute, self.seconds = schedule, comm, recompute, seconds
        self.row = schedule.rows[comm.rank]
        for number in {action.stage for action in self.row if action.kind == "W"} - {0}:
            check_halved(self.modules[number])
        # Stages in DataParallel or zero reduce once a step, at its end: halved backward has no
        # hooks. A single stage reduces as backward computes, so that ZeRO 2 keeps only shards.
        last = schedule.stages > 1 or any(a.kind == "W" for a in self.row)
        self.reduced_last = [m for m in modules if last and isinstance(m, SynchronizedModule)]
        # The messages from each other rank, in the order in which it sends them.
        self.messages_from = {
            rank: [message for action in row if (message := self._output_message(action))
                   and schedule.rank_of[message.stage] == comm.rank]
            for rank, row in enumerate(schedule.rows) if rank != comm.rank}
        self.tied = tie(comm, tied or {})

    # ---- messages between stages -----------------------------------------------------------------

    def _output_message(self, action: Action) -> Message | None:
        """Return the message that `action` sends, named by the stage that receives it, if any."""
        stage = action.neighbour(1, self.schedule.stages)
        return None if stage is None else Action(stage, action.kind.replace("I", "B"), action.micro)

    def _input_message(self, action: Action) -> Message | None:
        """Return the message that `action` needs, if any."""
        stage = action.neighbour(-1, self.schedule.stages)
        return None if stage is None else action._replace(kind=action.kind.replace("I", "B"))

    # ---- a step ----------------------------------------------------------------------------------

    def step(self, inputs: Tensor, targets: Any, loss_fn: Callable[[Tensor, Any], Tensor],
             *extras: Tensor, total: float | None = None) -> Tensor:
        """Forward and backward of a batch: its gradients are added to the parameters' `grad`.

        All ranks get the whole batch; the first stage's uses `inputs`, the last one's `targets`.
        `loss_fn(output, targets)` is the mean over what counts in its micro-batch: targets other
        than −100, torch's `ignore_index`, if they are whole numbers, else all elements. Returns the
        mean over what counts in the batch, on every rank, whose gradient it is; total: divide the
        sum by this instead. extras: handed to every stage's module, cut like the batch.
        Raises `ConfigError` unless the schedule's micro-batches divide the batch; and if one of
        torch's losses is given that has another mean.
        """
        inputs, targets = as_tensor("inputs", inputs), as_tensor("targets", targets)
        check_mean(loss_fn, targets)
        check_same_batch(self.comm.labelled("step"), inputs, targets)
        self._begin(inputs, targets, *extras)
        self.loss_fn: Callable[[Tensor, Any], Tensor] | None = loss_fn
        if total is not None and counted(targets):
            check_positive("total", total)
        self.total = counted(targets) if total is None else total
        self.loss = torch.zeros((), dtype=torch.float64, device=self.comm.device)
        gradients = torch.is_grad_enabled()
        earlier = take_gradients(self.tied) if gradients else []
        with ExitStack() as stack:
            for module in self.reduced_last:
                stack.enter_context(module.no_sync())
            self._run_row([a for a in self.row if gradients or a.kind == "F"])
        if gradients:
            reduce_tied(self.tied, earlier)
            for module in self.reduced_last:
                module.reduce()
        last = self.schedule.rank_of[self.schedule.stages - 1]
        loss = broadcast(self.comm, self.loss, root=last)
        return loss if self.total else loss.fill_(torch.nan)  # nothing counts, as torch's mean

    @torch.no_grad()
    def evaluate(self, inputs: Any, *extras: Tensor) -> Any:
        """The last stage's outputs for the batch, on its rank; None on the others. Only the
        schedule's forward passes run."""
        self._begin(inputs, None, *extras)
        self.loss_fn = None
        self._run_row([action for action in self.row if action.kind == "F"])
        outputs = [self.outputs.pop(micro) for micro in sorted(self.outputs)]
        return tree_map(joined, *outputs) if outputs else None

    def _begin(self, inputs: Any, targets: Any, *extras: Tensor) -> None:
        """Cut the batch."""
        m = self.schedule.micro_batches
        whole = [as_tensor("inputs", inputs), targets,
                 *(x if x is None else as_tensor("extras", x) for x in extras)]
        if m > 1 and torch.is_grad_enabled() and any(x is not None and x.grad_fn for x in whole):
            raise ConfigError("each micro-batch would run backward through what has computed a "
                              "pipeline's inputs, targets or extras; let a stage compute them, or "
                              "detach them")
        sizes = [x.shape[:1].numel() if x.dim() else 0 for x in whole if x is not None]
        if not sizes[0] or sizes[0] % m:
            raise ConfigError(f"{m} micro-batches need inputs whose first dimension they divide, "
                              f"not {tuple(whole[0].shape)}")
        if len(set(sizes)) > 1:
            raise ConfigError(f"inputs, targets and extras must have equally many samples, not "
                              f"{', '.join(map(str, sizes))}")
        cut = [micro_batches(x, m) for x in whole]
        self.batch = [(x, y, tuple(more)) for x, y, *more in zip(*cut, strict=True)]
        self.saved: dict[tuple[int, int], Any] = {}  # by (stage, micro-batch)
        self.outputs: dict[int, Any] = {}  # of the last stage, by micro-batch
        self.received: dict[Message, list[Tensor]] = {}
        self.input_meta: dict[int, OutputMeta] = {}  # by stage
        self.under_way = defaultdict[int, list[tuple[Message, list[Tensor], list[Work]]]](list)
        self.sends: list[Work] = []

    def _run_row(self, row: Sequence[Action]) -> None:
        kinds = {action.kind for action in row}
        self.expected = {rank: [m for m in messages if m.kind == "F" or kinds - {"F"}]
                     for rank, messages in self.messages_from.items()}
        for number, action in enumerate(row):
            self._expect(action, now=True)
            for soon in row[number + 1 : number + 2]:
                self._expect(soon, now=False)
            message = self._input_message(action)
            if message is not None:
                self._receive(message)
            with self.comm.compute(str(action), self.seconds(action)):
                result = self._run(action)
            if result is not None:
                self._send_result(action, result)
        for work in self.sends:
            work.wait()

    def _run(self, action: Action) -> list[Tensor] | None:
        """Compute; returns what the next stage needs: the outputs, or the gradients of the inputs.
        """
        stage, kind, micro = action
        if kind == "F":
            return self._forward(stage, micro)
        if kind == "W":
            gradients, kept, ends = self.saved.pop((stage, micro))
            if kept is None:
                torch.autograd.backward(ends, gradients)
            else:
                backward_of_weights(kept)
            return None
        inputs, ends = self.saved.pop((stage, micro))
        gradients = self.received.pop(Action(stage, "B", micro), None)
        if not ends:  # nothing that this stage hands on is trained
            self.saved[stage, micro] = [], None, []
        elif kind == "B":
            torch.autograd.backward(ends, gradients)
        elif not inputs:  # which need no gradient: W does it all
            self.saved[stage, micro] = gradients, None, ends
        else:
            kept = backward_of_inputs(ends, gradients, inputs)
            self.saved[stage, micro] = None, kept, None
        if any(x.grad is None for x in inputs):
            raise ConfigError(f"stage {stage} gives no gradient to what stage {stage - 1} hands "
                              f"on: it doesn't use it, or detaches it")
        return [x.grad for x in inputs] if stage else None

    def _forward(self, stage: int, micro: int) -> list[Tensor] | None:
        x, targets, extras = self.batch[micro]
        inputs: list[Tensor] = []  # that need gradients
        if stage:
            arrived, meta = self.received.pop(Action(stage, "F", micro)), self.input_meta[stage]
            for place, each in enumerate(meta.tensors):
                if each.requires_grad:
                    x = arrived[place]
                    leaf = x.new_zeros(()).expand(x.shape).requires_grad_()
                    arrived[place] = Received.apply(leaf, x)
                    known_letters[arrived[place]] = each.letters
                    inputs.append(leaf)
            x = tree_map(arrived.__getitem__, meta.places)
        module = self.modules[stage]
        run = self._recomputed if self.recompute and torch.is_grad_enabled() else call
        try:
            with unchanged(extras, f"stage {stage}"):
                y = run(module, x, *extras)
        except RuntimeError as error:
            if not stage or isinstance(error, DtlabError):
                raise
            shapes = ", ".join(str(tuple(t.shape)) for t in arrived)
            raise ConfigError(f"stage {stage} fails on what stage {stage - 1} hands on, of shape "
                              f"{shapes}: {error}") from error
        if stage == self.schedule.stages - 1:
            if self.loss_fn is None:
                self.outputs[micro] = y
                return None
            loss = self._loss(y, targets)
            self.loss += loss.detach()
            self.saved[stage, micro] = inputs, [loss] if loss.requires_grad else []
            return None
        self.output_meta, tensors = taken_apart(y, f"stage {stage}")
        self.saved[stage, micro] = inputs, [t for t in tensors if t.requires_grad]
        return [t.detach() for t in tensors]

    def _recomputed(self, module: nn.Module, *inputs: Any) -> Any:
        """Return the outputs of `module`, but keep only the inputs: copies are changed in place."""
        changes = {name: b._version for name, b in module.named_buffers()}
        y = checkpoint(
            lambda x, *extras: module(tree_map_only(Tensor, cache(torch.clone), x), *extras),
            *inputs, use_reentrant=False)
        for name, b in module.named_buffers():
            if b._version != changes[name]:
                raise ConfigError(f"recompute would change {name!r} twice for each micro-batch: "
                                  f"forward changes it, as BatchNorm changes its statistics; "
                                  f"take recompute=False")
        return y

    def _loss(self, y: Any, targets: Any) -> Tensor:
        """This micro-batch's part of the mean over the batch."""
        count = counted(targets)
        if not count:  # only padding, of which the mean isn't defined
            nothing: Tensor = sum(t.masked_fill(torch.ones_like(t, dtype=torch.bool), 0.0).sum()
                                  for t in tree_leaves(y) if t.is_floating_point())
            return nothing
        assert self.loss_fn is not None
        loss = self.loss_fn(y, targets)
        if not isinstance(loss, Tensor) or loss.dim():
            raise ConfigError(f"loss_fn must return the mean over its micro-batch, a tensor of "
                              f"shape (), not {short(loss)}")
        return loss * (count / self.total)

    # ---- messages --------------------------------------------------------------------------------

    def _send_result(self, action: Action, result: list[Tensor]) -> None:
        message = self._output_message(action)
        assert message is not None
        rank = self.schedule.rank_of[message.stage]
        first = message.kind == "F" and message.stage not in self.input_meta
        if message.kind == "F":
            meta = self.input_meta.setdefault(message.stage, self.output_meta)
            if meta != self.output_meta:
                raise ConfigError(f"stage {action.stage} returns {self.output_meta} of micro-batch "
                                  f"{action.micro}, but {meta} of the first")
        if rank == self.comm.rank:
            self.received[message] = result
            return
        comm = self.comm.labelled(str(message))
        if first:
            self.sends.append(comm.isend(self.output_meta, rank))
        for x in result:
            self.sends.append(comm.post(Send(x.contiguous(), rank))[0])

    def _expect(self, action: Action, now: bool) -> None:
        """Begin to receive what the action needs, and what its sender sends before that. Unless it
        is needed `now`, only if its shapes are known: those of a stage's inputs come with the first
        of them, and their gradients have the same."""
        message = self._input_message(action)
        if message is None:
            return
        rank = self._sender(message)
        while message in self.expected.get(rank, ()):
            expected = self.expected[rank][0]
            stage = expected.stage + (expected.kind == "B")  # these are its inputs, or gradients of
            if stage not in self.input_meta:
                if not now:
                    return
                self.input_meta[stage] = self.comm.labelled(str(expected)).recv_object(rank)
            into, works = [], []
            for meta in self.input_meta[stage].tensors:
                if expected.kind == "F" or meta.requires_grad:
                    x = mark(torch.empty(meta.shape, dtype=meta.dtype, device=self._device()),
                             "activations")
                    known_letters[x] = meta.letters if expected.kind == "F" else {}
                    into.append(x)
                    works.append(self.comm.labelled(str(expected)).irecv(x, rank))
            self.under_way[rank].append((self.expected[rank].pop(0), into, works))

    def _receive(self, message: Message) -> None:
        while message not in self.received:  # as it is if the stage before or after is here, too
            arrived, into, works = self.under_way[self._sender(message)].pop(0)
            for work in works:
                work.wait()
            self.received[arrived] = into

    def _sender(self, message: Message) -> int:
        stage = message.neighbour(-1, self.schedule.stages)
        assert stage is not None
        return self.schedule.rank_of[stage]

    def _device(self) -> torch.device:
        p = next((p for module in self.modules.values() for p in module.parameters()), None)
        return self.comm.device if p is None else p.device
