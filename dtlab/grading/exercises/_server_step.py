"""What the exercises on parameter servers share: one step of SGD over them, and what goes wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtlab.grading.exercise import Verdict

EXACT = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}


def numbers(n: int, dtype: torch.dtype, random: torch.Generator) -> torch.Tensor:
    """Whole numbers from 1 to 9."""
    return torch.randint(1, 10, (n,), generator=random).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal but for rounding, in shape and dtype as well."""
    exact = EXACT[b.dtype]
    return (a.dtype == b.dtype and a.shape == b.shape
            and bool(torch.allclose(a.double(), b.double(), rtol=exact, atol=exact)))


def wanted(before: torch.Tensor, grads: Sequence[torch.Tensor], lr: float) -> torch.Tensor:
    """before − lr · the mean of the workers' gradients."""
    mean = torch.stack([g.double() for g in grads]).mean(0)
    return (before.double() - lr * mean).to(before.dtype)


def judge_vector(name: str, x: torch.Tensor, right: torch.Tensor) -> Verdict | None:
    """None if `x` is right, else what came and what was expected, without a clue."""
    if same(x, right):
        return None
    if x.shape != right.shape or x.dtype != right.dtype:
        return Verdict(False, f"{name} has become {x.dtype} {tuple(x.shape)}",
                       f"{right.dtype} {tuple(right.shape)}",
                       clue="Write the new values into the tensor; keep its shape and dtype.")
    off = (x.double() - right.double()).abs() > EXACT[right.dtype] * (1 + right.double().abs())
    place = int(off.nonzero()[0])
    return Verdict(False, f"{name}[{place}] = {x[place].item():g}", f"{right[place].item():g}")


def step_clue(after: Sequence[torch.Tensor], before: torch.Tensor,
              grads: Sequence[torch.Tensor], lr: float, ranks: int) -> str:
    """Which mistake makes just these vectors of all workers? "" if none that is known."""
    summed = torch.stack([g.double() for g in grads]).sum(0)
    mean = summed / len(grads)
    right = wanted(before, grads, lr)

    def all_are(x: torch.Tensor) -> bool:
        return all(same(one, x.to(before.dtype)) for one in after)

    if all(same(x, before) for x in after):
        return ("The weights are as they were on every worker: write the new ones into the tensors "
                "that were given (w.sub_(…), w.copy_(…)), don't make new ones.")
    if all_are(before.double() - lr * summed):
        return ("The step is taken with the sum of the gradients: divide by the number of workers, "
                "servers not counted.")
    if all_are(before.double() - lr * summed / ranks):
        return ("The sum is divided by the number of all ranks: divide it by the number of "
                "workers; servers have no gradient.")
    if all_are(before.double() - mean):
        return "The learning rate is missing: the new weights are weights − lr · mean."
    if all_are(summed) or all_are(mean):
        return ("The workers end with gradients, not with weights: the new weights are "
                "weights − lr · mean.")
    if all_are(before.double() + lr * mean):
        return "That goes uphill: the new weights are weights − lr · mean."
    if all(same(x, wanted(before, [g], lr)) for x, g in zip(after, grads, strict=True)):
        return "Each worker steps with its own gradient only: the gradients were never averaged."
    share = [same(x, right) for x in after]
    if any(share) and not all(share):
        return (f"{sum(share)} of {len(share)} workers have the new weights: send them to all the "
                "others, too.")
    return ""
