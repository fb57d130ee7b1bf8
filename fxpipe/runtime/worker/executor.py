"""Runs one worker's actions: reads weights, calls the stage's code, keeps saved values, makes the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.checkpoint.shard import Shard
from fxpipe.observe.watch import Watch
from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import FUNCTIONS
from fxpipe.runtime.wires.transport import Transport
from fxpipe.runtime.worker.between_replicas import OneReplica
from fxpipe.runtime.worker.offload import SavedValues
from fxpipe.runtime.worker.setting import WorkerSetting
from fxpipe.runtime.worker.stage_code import StageOfShape, reseed
from fxpipe.runtime.worker.weights import WeightStore
from fxpipe.schedule.action import Action
from fxpipe.schedule.base import Schedule
from fxpipe.stages.loaded import LoadedStage, explained
from fxpipe.task.reset_buffers import BuffersReset


class MinibatchLoss(NamedTuple):
    """A minibatch, and its loss followed by its metrics."""

    minibatch: int
    value: Tensor


class Executor:
    """Executes the actions of one worker, one after the other.

    Random parts seed torch from the run's seed and the action, so that random numbers do not depend on what ran before.

    Attributes:
        watch: where the worker's time goes.
        shape_of: gives the index of the shape of a minibatch.
        observers: what follows this worker; the list is its setting's.
        as_read: followed buffers of minibatches in flight, as their forwards read them (see `StateOfHooks`).
        resets: the hook `reset(model)`; None without it.
        saved: what actions leave for later ones of the same microbatch.
    """

    def __init__(
        self, setting: WorkerSetting, stages: Sequence[LoadedStage], store: WeightStore, transport: Transport
    ) -> None:
        plan = setting.plan
        self.setting, self.worker, self.replica = setting, setting.worker, setting.replica
        self.store, self.transport = store, transport
        self.observers, self.buffers, self.device = setting.observers, setting.buffers, setting.device
        self.watch = transport.watch = Watch(self.device)
        if setting.collective is not None:
            setting.collective.watch = self.watch
        self.shape_of: Callable[[int], int] = lambda minibatch: 0
        self._stages: list[StageOfShape] = []
        for of_shape, stage in zip(plan.of_shapes, stages, strict=True):
            self.add(of_shape, stage)
        self.saved = SavedValues()
        self.resets: BuffersReset | None = None
        self.as_read: dict[int, dict[str, Tensor]] = {}
        between = store.part(OneReplica)
        assert between is not None
        self._between = between

    @property
    def schedule(self) -> Schedule:
        """Of the run."""
        return self.store.demand.schedule

    @property
    def stages(self) -> list[LoadedStage]:
        """The stages for all shapes of batch."""
        return [stage.code for stage in self._stages]

    @property
    def draws(self) -> bool:
        """Whether a stage draws random numbers."""
        return any(part.random for stage in self._stages for part in stage.parts.values())

    def add(self, of_shape: Plan, stage: LoadedStage) -> None:
        """Add a shape of batch, for which the transport already has messages."""
        added = StageOfShape(of_shape, stage, self.transport, self.setting)
        if self.setting.collective is not None:
            added.comm.reduce = self._reduce
        self._stages.append(added)

    def expect(self, action: Action) -> None:
        """Announce what an action will receive, some actions before it."""
        stage = self._stage(action)
        self.saved.expect(action)
        for part in self._parts(action):
            for edge in stage.incoming[part.phase]:
                self.transport.expect(edge, action.minibatch, action.microbatch)
            self.store.expect(part)

    def leave_out(self, action: Action) -> None:
        """The action will not run: forget what only this action would have read."""
        self.saved.leave_out(action)
        for part in self._parts(action):
            self.store.versions.release(part)

    def execute(self, action: Action, leaves: Sequence[Any] | None = None) -> MinibatchLoss | None:
        """Run one action, and begin the update that is part of it, if one is (`WeightStore.updated_by`).

        Returns:
            On the loss worker, after the last F of a minibatch: its loss (float32, see `Plan.loss.of_microbatches`),
            followed by its metrics (`Plan.metrics`). Where replicas sum their losses, `settle` returns it instead.
        """
        stage = self._stage(action)
        self.saved.begins(action)
        stage.comm.bind(action.minibatch, action.microbatch)
        self.watch.at(action)
        result: MinibatchLoss | None = None
        self.watch.open(action.phase)
        with torch.no_grad():
            if action.phase == "F":
                loss = self._run_forward(stage, action, leaves)
                result = None if loss is None else MinibatchLoss(action.minibatch, loss)
            else:
                for part in self._parts(action):
                    self._run_later(stage, part)
                if self.schedule.ends(action):
                    self.store.close_sum(action.minibatch)
                    for observer in self.observers:
                        observer.ended(action.minibatch)
                    updated = self.store.updated_by(action)
                    if updated is not None:
                        self.store.update(updated)
        self.watch.close()
        self.transport.done(action.phase, action.minibatch, action.microbatch)
        if result is not None:
            for observer in self.observers:
                observer.loss(*result)
        return result

    def compare_batch(self, minibatch: int, number: int) -> None:
        """On worker 0: begin to check that all replicas read the same minibatch; the number is its checksum.

        If they did not, the update of the minibatch or the next outer step raises RunError.
        """
        for part in self.store.parts:
            part.compare_batch(minibatch, number)

    def begin_meeting(self) -> None:
        """The pipeline is empty: begin to make the weights and buffers of separately trained replicas the same."""
        updated = [name for stage in self._stages for name in stage.updates]
        with torch.no_grad():
            for part in self.store.parts:
                part.begin_meeting(self.store.version, updated)

    def end_meeting(self) -> None:
        """Called once all replicas here have begun: afterwards they have the same weights and buffers."""
        with torch.no_grad():
            for part in self.store.parts:
                part.end_meeting(self.store.version)

    def announce(self) -> None:
        """Take the gradients of the update that is due, and send notes of them (`UpdateNotes.announce`)."""
        if (minibatch := self.store.due) is None:
            return
        self.watch.open("update")
        with torch.no_grad():
            self.store.gather()
            self.store.notes.announce(minibatch)
        self.watch.close()

    def settle(self) -> MinibatchLoss | None:
        """Make the update (`WeightStore.settle`); returns the minibatch's loss over all replicas, if they sum it."""
        if self.store.due is None:
            return None
        self.watch.open("update")
        with torch.no_grad():
            minibatch = self.store.settle()
        self.watch.close()
        loss = self._between.losses.pop(minibatch, None)
        return None if loss is None else MinibatchLoss(minibatch, loss)

    def await_losses(self) -> list[MinibatchLoss]:
        """Wait for the losses, summed over replicas, of minibatches whose updates are still to come."""
        return [MinibatchLoss(*each) for each in self._between.take_losses().items()]

    def state(self, version: int) -> dict[str, Tensor]:
        """The parameters it owns, live, and its buffers, which an evaluation after `version` updates reads."""
        self.take_buffers(version)
        return {**{name: parameter.detach() for name, parameter in self.store.parameters.items()}, **self.buffers}

    def codec_memories(self) -> dict[str, dict[str, Tensor]]:
        """By edge, what codecs remember of the gradients that were sent; codecs replace these tensors, never write to
        them."""
        return {edge: dict(memory) for stage in self._stages for edge, memory in stage.comm.memories.items() if memory}

    def load(self, shards: Sequence[Shard], same: bool) -> None:
        """Resume from a checkpoint; the parameters and the model's own buffers have been loaded.

        Args:
            shards: this worker's if the cuts are the `same`, else all workers'.
        """
        for shard in shards:
            for name, value in shard.buffers.items():
                if name in self.buffers:
                    self.buffers[name] = torch.empty_like(self.buffers[name]).copy_(value)
        memories = shards[0].codecs if same else {}
        for stage in self._stages:
            stage.comm.memories = {
                edge: {name: value.to(self.device) for name, value in memories[edge].items()}
                for edge in stage.comm.edges & memories.keys()
            }
        self.store.load([shard.state for shard in shards], shards[0].step, same)

    def reset(self) -> None:
        """Forget what an interrupted segment left."""
        self.saved.clear()
        for part in self.store.parts:
            part.reset()

    def _stage(self, action: Action) -> StageOfShape:
        return self._stages[self.shape_of(action.minibatch)]

    def _parts(self, action: Action) -> list[Action]:
        """One action for each part that an action runs."""
        phases = self._stage(action).run_in[action.phase]
        return [action] if phases == [action.phase] else [replace(action, phase=phase) for phase in phases]

    def _run_forward(self, stage: StageOfShape, action: Action, leaves: Sequence[Any] | None) -> Tensor | None:
        part = stage.parts["F"]
        if action.microbatch == 0:
            self.take_buffers(action.minibatch)
            for observer in self.observers:
                observer.begins(action.minibatch)
            if self.resets is not None and self.resets.due(action.minibatch):
                self.resets(self.buffers, action.minibatch)
            self.store.notes.forward(action.minibatch)
        weights = stage.weights("F", self.store.versions.read(action))
        buffers = self._read(stage.buffers["F"], action)
        for update in self.store.parts if leaves is not None else ():
            leaves = update.leaves(leaves, stage.step)
        batch = tuple([leaves[i] for i in stage.batch]) if leaves is not None else ()
        if part.random:
            self._reseed(action)
        with self._explained(stage, action):
            loss, new, saved = stage.code.functions["F"](weights, buffers, batch, stage.comm)
            self._check(len(new), len(part.updates), "new buffer values")
            self._check(len(saved), len(part.saved), "saved values")
        for name, value in zip(stage.updates, new, strict=True):
            self.buffers[name] = value
        last = self._is_last(action.microbatch)
        if last:
            self._between.hand_out_buffers(stage.updates, action.minibatch)
        self.saved.put(action, saved, set())
        self.store.versions.release(action)
        return self._between.add_loss(action.minibatch, loss, last) if part.loss else None

    def _read(self, names: Sequence[str], action: Action) -> tuple[Tensor, ...]:
        """Buffers, as the minibatch reads them."""
        followed = self.as_read.get(action.minibatch)
        if followed is None:
            return tuple([self.buffers[name] for name in names])
        return tuple([followed[name] if name in followed else self.buffers[name] for name in names])

    def _run_later(self, stage: StageOfShape, action: Action) -> None:
        """The backward or the weight gradients of a microbatch."""
        phase = action.phase
        part, makes_gradients = stage.parts[phase], phase == stage.last
        weights = stage.weights(phase, self.store.versions.read(action))
        buffers = self._read(stage.buffers[phase], action)
        values, taken = self.saved.take(action)
        if part.random:
            self._reseed(action)
        with self._explained(stage, action):
            results = stage.code.functions[phase](weights, buffers, values, stage.comm)
            if makes_gradients:
                self._check(len(results), len(part.gradients), "gradients")
            else:
                self._check(len(results), len(part.deferred), "deferred values")
        del weights, values
        taken = taken | stage.comm.sent
        if makes_gradients:
            self.store.add(phase, stage.gradients(results), taken)
        else:
            self.saved.put(action, list(results), taken | self.store.versions.storages(phase))
        del results
        self.store.versions.release(action)

    def _is_last(self, microbatch: int) -> bool:
        return microbatch + 1 == self.schedule.microbatches

    def _reduce(self, bucket: str, minibatch: int, microbatch: int, gradients: Sequence[Tensor | None]) -> None:
        """The code has made a bucket's gradients: if of the last microbatch, the sums of this replica are complete."""
        if self._is_last(microbatch):
            self.store.reduce(bucket, minibatch, gradients)

    def take_buffers(self, minibatch: int) -> None:
        """Before a minibatch, receive the replicas' common buffers, if the minibatch before changed them."""
        self._between.take_buffers(minibatch)

    def _reseed(self, action: Action) -> None:
        microbatch = self.setting.plan.microbatch(action.microbatch, self.worker, self.replica)
        reseed(self.device, self.setting.options.seed, self.worker, action.phase, action.minibatch, microbatch)

    def _explained(self, stage: StageOfShape, action: Action) -> AbstractContextManager[None]:
        def what() -> str:
            return f"{FUNCTIONS[action.phase]} of step {action.minibatch + 1} ({action})"

        return explained(stage.code.path, self.worker, what, "use more workers, smaller batches or more microbatches")

    def _check(self, count: int, expected: int, what: str) -> None:
        if count != expected:
            raise ValueError(f"returned {count} {what}, the plan has {expected}")
