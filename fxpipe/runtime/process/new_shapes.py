"""Shapes of batches that the build has no stages for: worker 0 makes them during the run, and all workers add them.

    worker 0:  reads a batch ── compiles ── sends the texts ── sends the shape's number ──┐
    worker k:                    computes on, then waits            reads its texts ◄─────┘

The number goes from worker to worker like any shape's (`ComingShapes`, `Calls`), before any worker posts a receive for
a minibatch of this shape. A worker that receives an unknown number finds the texts on the board.
"""

from __future__ import annotations

import base64
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import cast

import safetensors.torch
import torch
from torch import Tensor

from fxpipe.errors import BatchError, FxpipeError
from fxpipe.messages import say
from fxpipe.observe.pulse import Pulse
from fxpipe.observe.rates import samples_of
from fxpipe.plan.consistency import check
from fxpipe.plan.plan import BufferSpec, Plan
from fxpipe.random_state import random_state_kept
from fxpipe.runtime.options import PipelineOptions, RunOptions
from fxpipe.runtime.process.minibatch_notes import several_shapes
from fxpipe.runtime.wires.board import Board
from fxpipe.runtime.wires.group import peers
from fxpipe.runtime.worker.assembly import on_engines
from fxpipe.runtime.worker.executor import Executor
from fxpipe.stages.loaded import load_stage_text
from fxpipe.stages.minibatch import ShapedMinibatches
from fxpipe.task.batch import Batch
from fxpipe.task.step_hooks import StepHooks
from fxpipe.typed_json import convert

MOST_SHAPES = 8
"""How many shapes may be made by default."""


@dataclass(frozen=True)
class ShapeOfWorker:
    """What a worker needs for batches of one more shape, as worker 0 sends it: by name, the texts of its files (its
    stage, and on worker 0 what computes totals), and the new constants that it reads."""

    files: Mapping[str, str]
    tensors: Mapping[str, Tensor]

    def to_text(self) -> str:
        """As text; `of_text` is its inverse."""
        tensors = safetensors.torch.save({name: tensor.cpu().contiguous() for name, tensor in self.tensors.items()})
        return json.dumps({"files": dict(self.files), "tensors": base64.b64encode(tensors).decode()})

    @staticmethod
    def of_text(text: str) -> ShapeOfWorker:
        """Read `to_text`'s text."""
        body = json.loads(text)
        return ShapeOfWorker(body["files"], safetensors.torch.load(base64.b64decode(body["tensors"])))


def plan_of_text(text: str) -> Plan:
    """Read the text of a plan (`Plan.to_json`) that another worker of this run has written."""
    body = json.loads(text)
    plan = convert({name: value for name, value in body.items() if name not in ("format", "digest")}, Plan)
    check(plan)
    return plan


def of_run(options: RunOptions, plan: Plan) -> RunOptions:
    """Options of a run: by default a build of one shape gets no new ones, since its workers send no shapes."""
    return options if several_shapes(plan, options) else replace(options, new_shapes=0)


class NewShapes:
    """The shapes made during a run, for the workers in this process.

    On worker 0, `hooks` are what a step is captured from, None without a model or a loss; and the pulse shows what it
    does. `plan` is that of the build with the shapes made so far.
    """

    def __init__(
        self,
        folder: str | Path,
        plan: Plan,
        hooks: StepHooks | None,
        options: PipelineOptions,
        device: torch.device,
        board: Board,
        pulse: Pulse,
    ) -> None:
        self.plan = plan
        self._digest = plan.digest
        self._folder, self._hooks, self._options = Path(folder), hooks, options
        self._most = MOST_SHAPES if options.new_shapes is None else options.new_shapes
        self._device, self._board, self._pulse = device, board, pulse
        self._constants: dict[str, Tensor] = {}
        self._made: list[tuple[Plan, dict[int, ShapeOfWorker]]] = []
        self._executors: Sequence[Executor] = ()
        self._minibatches: ShapedMinibatches | None = None

    def attach(self, executors: Sequence[Executor], minibatches: ShapedMinibatches | None) -> None:
        """Add the shapes made so far, and those made later, to these workers, which know the build's shapes. The
        minibatches are on worker 0."""
        self._executors = executors
        if minibatches is not None:
            minibatches.make = self._make
            self._minibatches = cast(ShapedMinibatches, weakref.proxy(minibatches))  # no cycle holds the workers
        for plan, parts in self._made:
            self._add(plan, parts)

    def prepare(self, shape: int) -> None:
        """Worker 0 has a minibatch of this shape: read what this worker needs for it, unless it has that."""
        while shape >= len(self.plan.steps):
            number, workers = len(self.plan.steps), [executor.worker for executor in self._executors]
            keys = [_key(number, "plan"), *(_key(number, worker) for worker in workers)]
            with peers():
                texts = self._board.wait(keys)
            plan = plan_of_text(texts[0])
            parts = (ShapeOfWorker.of_text(text) for text in texts[1:])
            self._take(plan, dict(zip(workers, parts, strict=True)))

    def _make(self, batch: Batch, minibatch: int, refusal: BatchError) -> None:
        """Compile the shape of a batch, and add it.

        Raises:
            BatchError: that fails, or no more may be made; `refusal` says why the batch fits no known shape.
        """
        self._check_divisible(batch, refusal)
        if not self._most:
            refusal.hint = f"--new-shapes {MOST_SHAPES} (in Python new_shapes=) makes stages for it; or {refusal.hint}"
            raise refusal
        shown = f"the batch of step {minibatch + 1} has a new shape ({batch})"
        if len(self._made) >= self._most:
            raise BatchError(
                f"{shown}, but this run has made stages for {self._most} new shapes: --new-shapes allows no more",
                hint="pad batches to a few lengths (--pad-to; pad_to_multiple_of in a collator), compile with more of "
                f"them (--scan N; in Python shapes=...), or allow more: --new-shapes {2 * self._most}",
                page="batch-shapes",
            )
        if self._hooks is None:
            refusal.hint = f"with model= and loss=, the run can make stages for it; or {refusal.hint}"
            raise refusal
        begin = perf_counter()
        with self._compiling():
            try:
                plan, files, tensors = self._compiled(batch)
            except FxpipeError as error:
                raise _not_made(refusal, error) from error
            self._give(plan, files, tensors)
        left = self._most - len(self._made)
        say(
            f"{shown}: stages for it were made in {perf_counter() - begin:.1f} s, and {left} more may be made "
            "(--new-shapes); compile with --scan N makes them before a run"
        )

    def _check_divisible(self, batch: Batch, refusal: BatchError) -> None:
        """Refuse a batch that cannot be divided into the microbatches: no stages help it."""
        dims = {leaf.name: leaf.dim for leaf in self.plan.step.given if leaf.tensor}
        try:
            batch.check_divisible(self.plan.microbatches, dims, samples_of(self.plan))
        except BatchError as error:
            raise _not_made(refusal, error) from error

    def _compiled(self, batch: Batch) -> tuple[Plan, Mapping[str, str], Mapping[str, Tensor]]:
        """The plan, the files and the tensors of the build with one more shape."""
        from fxpipe.lowering.new_shape import folder_with_new_shape  # tests/test_layout.py says why it may

        assert self._hooks is not None
        with random_state_kept(), torch.enable_grad():
            build = folder_with_new_shape(self._folder, self._digest, self.plan, self._constants, batch, self._hooks)
        for (
            buffer
        ) in build.plan.buffers:  # the build has the values of those that never change and are in no checkpoint
            if buffer.saved and (more := self._new_readers(buffer)):
                raise BatchError(
                    f"worker {min(more)} would read {buffer.name}, which it does not have",
                    hint="compile with a batch of this shape (--scan N; in Python shapes=...)",
                )
        return build.plan, build.files, build.tensors

    def _new_readers(self, buffer: BufferSpec) -> set[int]:
        """The workers that read a buffer for the newest shape alone."""
        return set(buffer.workers).difference(*(b.workers for b in self.plan.buffers if b.name == buffer.name))

    def _give(self, plan: Plan, files: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
        """Add the newest shape of a plan here, and send it to the other workers."""
        of_shape, number = plan.of_shapes[-1], len(plan.steps) - 1
        parts = {}
        for stage, worker in zip(of_shape.stages, range(plan.workers), strict=True):
            names = [stage.file]
            if worker == 0 and of_shape.step.totals is not None:
                names += [share.file for share in of_shape.step.totals.stages]
            read = [b.name for b in plan.buffers if worker in self._new_readers(b)]
            parts[worker] = ShapeOfWorker({f: files[f] for f in names}, {name: tensors[name] for name in read})
        before = {b.name for b in self.plan.buffers}
        self._constants |= {b.name: tensors[b.name] for b in plan.buffers if b.name not in before}
        self._take(plan, parts)
        if others := parts.keys() - {executor.worker for executor in self._executors}:
            with peers():
                for worker in others:
                    self._board.set(_key(number, worker), parts[worker].to_text())
                self._board.set(_key(number, "plan"), plan.to_json())

    def _take(self, plan: Plan, parts: dict[int, ShapeOfWorker]) -> None:
        self._add(plan, parts)
        self.plan = plan
        self._made.append((plan, {executor.worker: parts[executor.worker] for executor in self._executors}))

    def _add(self, plan: Plan, parts: dict[int, ShapeOfWorker]) -> None:
        of_shape = plan.of_shapes[-1]
        loaded = []
        for executor in self._executors:
            worker = executor.worker
            spec = of_shape.stages[worker]
            stage = load_stage_text(parts[worker].files[spec.file], spec)
            loaded.append(on_engines(of_shape, worker, stage, self._folder, self._options, self._device))
        for executor in self._executors:
            executor.transport.add(of_shape.edges)
        for executor, stage in zip(self._executors, loaded, strict=True):
            more = {name: t.to(self._device) for name, t in parts[executor.worker].tensors.items()}
            executor.buffers |= {name: t for name, t in more.items() if name not in executor.buffers}
            executor.add(of_shape, stage)
        if self._minibatches is not None:
            self._minibatches.add(of_shape, parts[0].files)

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Inside, worker 0 shows what the others wait for."""
        before, self._pulse.phase = self._pulse.phase, "compiling a shape"
        try:
            yield
        finally:
            self._pulse.phase = before


def _not_made(refusal: BatchError, error: FxpipeError) -> BatchError:
    """The error for a batch that fits no shape of the build, and for which no stages can be made."""
    return BatchError(
        f"{refusal.what}; and no stages can be made for its shape: {error.what}",
        where=error.where,
        hint=error.hint,
        page=error.page,
    )


def _key(shape: int, what: int | str) -> str:
    return f"shape/{shape}/{what}"
