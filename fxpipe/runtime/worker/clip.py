"""Clips by the norm of all workers' gradients; workers exchange their norms by `UpdateNotes`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import reduce
from math import isfinite, prod
from typing import Annotated, Any

import torch
from msgspec import Meta
from torch import Tensor, nn

from fxpipe.device_copies import widest
from fxpipe.runtime.worker.part import UpdatePart
from fxpipe.runtime.worker.setting import WorkerSetting
from fxpipe.torch_private import foreach_norm

Square = Annotated[list[Annotated[float, Meta(ge=0)]], Meta(min_length=2, max_length=2)]
"""The square of a norm, and of how many elements."""


class Clip(UpdatePart):
    """Scales one worker's gradients so that the norm over all workers' is at most a limit.

    Attributes:
        norm: of all gradients, as this worker knew it at its last update; exact on worker 0.
        not_finite: the first minibatch in which gradients of this worker were not finite, and the indices of their
            parameters; None if all were finite so far.
    """

    entry = "clip"
    form = Annotated[list[Square], Meta(min_length=1)]

    def __init__(self, limit: float, setting: WorkerSetting) -> None:
        self.norm: float | None = None
        self.not_finite: tuple[int, list[int]] | None = None
        self.limit = limit
        self.worker = setting.worker
        self._parameters = list(setting.trained.values())
        self._dtypes = [getattr(torch, p.tensor.dtype) for p in setting.plan.parameters if p.trained]
        # The dtype that torch's own norm of tensors of these dtypes has.
        self._dtype: torch.dtype = reduce(torch.promote_types, (dtype.to_real() for dtype in self._dtypes))
        self._shares = list(setting.shares.values())  # by parameter, the replica that has its gradient
        self._collective = setting.collective

    @classmethod
    def of(cls, setting: WorkerSetting) -> Iterator[UpdatePart]:
        limit = setting.options.clip_norm
        if limit is not None:
            yield (ExactClip if setting.recipe.schedule.synchronous else PipelinedClip)(limit, setting)

    def gathered(self, minibatch: int) -> None:
        """Where replicas share the update, send the others the norms of this one's share of the gradients."""
        if self._shares:
            assert self._collective is not None
            device = self._parameters[0].device
            norms = torch.tensor(norms_of(self._parameters), dtype=widest(device), device=device)
            self._collective.start_gather(("norms", minibatch), norms, [len(norms)] * self._collective.replicas)

    def _norms(self, minibatch: int) -> list[float]:
        """As `norms_of`, including gradients that other replicas hold; waits for these."""
        if self._shares:
            assert self._collective is not None
            flat = self._collective.take(("norms", minibatch)).view(self._collective.replicas, -1)
            norms = flat.gather(0, torch.tensor(self._shares, device=flat.device).unsqueeze(0))[0].tolist()
        else:
            norms = norms_of(self._parameters)
        if self.not_finite is None and not isfinite(sum(norms)):
            grads = [p.grad for p in self._parameters]
            places = [i for i, grad in enumerate(grads) if grad is not None and not grad.isfinite().all()]
            self.not_finite = (minibatch, places) if places else None
        return norms

    def _scale(self, norm: Tensor) -> None:
        self.norm = float(norm)
        torch.nn.utils.clip_grads_with_norm_(self._parameters, self.limit, norm)


class ExactClip(Clip):
    """`torch.nn.utils.clip_grad_norm_` over all workers, for schedules with a flush.

    The norm of every gradient is passed up to worker 0, which knows the total norm when its last backward is over; the
    total is passed down before the next minibatch's forwards. Worker k holds one number for each parameter of worker k
    and of the workers after it.
    """

    down = 1

    def __init__(self, limit: float, setting: WorkerSetting) -> None:
        super().__init__(limit, setting)
        trained = [p for p in setting.plan.parameters if p.trained]
        self._order = sorted(range(len(trained)), key=lambda i: trained[i].owner)  # stable: each worker's own order
        self.up = sum(p.owner > self.worker for p in trained)

    def measure(self, minibatch: int) -> None:
        self._known = torch.tensor(self._norms(minibatch), dtype=torch.float64)

    def pass_up(self, behind: Tensor) -> Tensor:
        self._known = torch.cat([self._known, behind])
        return self._known

    def pass_down(self, before: Tensor) -> Tensor:
        self._total = before
        if self.worker == 0:
            found = torch.empty_like(self._known)
            found[self._order] = self._known  # in the model's order and dtypes, as clip_grad_norm_ adds them up
            norms = [norm.to(dtype) for norm, dtype in zip(found, self._dtypes, strict=True) if not norm < 0]
            self._total = torch.nn.utils.get_total_norm(norms).reshape(1).double()
        return self._total

    def apply(self, minibatch: int) -> None:
        self._scale(self._total[0].to(self._dtype))


class PipelinedClip(Clip):
    """Clipping without a flush: no worker waits; it uses norms of the workers before it that are some minibatches old.

    The update of minibatch m on worker k uses the norm over

        workers k and later: their gradients of m itself, whose norms came up with the backwards of m;
        each worker j < k: its newest gradients whose norm came down with the forwards; without microbatches these are
        of minibatch m − (k−j) − 1.

    So worker 0 clips exactly as `clip_grad_norm_` would with these gradients; the others use norms from a few
    minibatches ago for the workers before them. Until the first norm of a worker arrives, the mean square of its
    gradients is assumed to equal that of the known gradients.
    """

    up = down = 2
    with_forward = True

    def __init__(self, limit: float, setting: WorkerSetting) -> None:
        super().__init__(limit, setting)
        self._elements = sum(prod(p.tensor.shape) for p in setting.plan.parameters if p.trained)
        self._before = torch.zeros(2, dtype=torch.float64)  # the square of the norm, and the number of elements
        self._own = torch.zeros(2, dtype=torch.float64)
        # How many updates a forward of this worker misses of its own weights.
        self._lag = setting.recipe.demand.versions.lag("F", self.worker, self.worker)
        self._past: deque[Tensor] = deque()  # `_own` after each of the last `lag` updates, and now
        self._again: deque[Tensor] = deque()  # `_own` when the next forwards ran first, before an interruption
        self.emptied()

    def emptied(self) -> None:
        self._past = deque([self._own] * (self._lag + 1), maxlen=self._lag + 1)
        self._again.clear()

    def state(self, version: int) -> Any:
        return [own.tolist() for own in self._past]

    def load(self, states: Sequence[Any], version: int, same: bool) -> None:
        if not same or not states:
            return
        past = [torch.tensor(own, dtype=torch.float64) for own in states[0]]
        self._past.extend(past)
        self._own = past[-1]
        self._again.extend(past[:-1])

    def measure(self, minibatch: int) -> None:
        square = sum(norm * norm for norm in self._norms(minibatch) if not norm < 0)
        self._own = torch.tensor([square, sum(p.numel() for p in self._parameters)], dtype=torch.float64)
        self._past.append(self._own)

    def pass_up(self, behind: Tensor) -> Tensor:
        self._known = self._own + behind
        return self._known

    def pass_down(self, before: Tensor) -> Tensor:
        self._before = before
        return before + (self._again.popleft() if self._again else self._own)

    def apply(self, minibatch: int) -> None:
        square, elements = (float(value) for value in self._known + self._before)
        everything = square * self._elements / elements if elements else 0.0
        self._scale(torch.tensor(everything**0.5, dtype=torch.promote_types(self._dtype, torch.float32)))


def norms_of(parameters: Sequence[nn.Parameter]) -> list[float]:
    """The norm of each parameter's gradient; −1 where there is no gradient."""
    present = [p.grad for p in parameters if p.grad is not None]
    norms = torch.stack([norm.to(widest(norm.device)) for norm in foreach_norm(present)]).tolist() if present else []
    known = iter(norms)
    return [-1.0 if p.grad is None else next(known) for p in parameters]
