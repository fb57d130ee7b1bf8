"""A build: the emitted stages, the plan and the initial weights, in memory or in a directory.

build/
    plan.json             what run needs to know: interfaces, edges, owners, digests
    stage_0.py …          the product
    weights.safetensors   initial parameters, buffers and constants, under the model's own names
    costs.json            measured times: not part of the plan, so that it stays the same from compile to compile
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

import fxpipe
from fxpipe.batch import split, tensor_spec
from fxpipe.capture import Loss, capture
from fxpipe.errors import BuildError
from fxpipe.folder import COSTS, PLAN, WEIGHTS, check_target, load_plan, replacing
from fxpipe.plan import BufferSpec, ParameterSpec, Phase, Plan, StageSpec
from fxpipe.program import Program
from fxpipe.summary import WorkerSummary, summarize
from fxpipe.transform import Observer, run_passes

if TYPE_CHECKING:
    from fxpipe.runtime.local import LocalPipeline


@dataclass(frozen=True)
class Build:
    """Stages, plan and initial weights.

    Attributes:
        files: emitted source by file name.
        tensors: initial parameters, buffers and constants by their first name.
        workers: the summary of each worker; empty for a loaded build without `costs.json`.
        folder: where it lies on disk, if it does.
        warnings: what capture wants the user to know.
    """

    plan: Plan
    files: Mapping[str, str]
    tensors: Mapping[str, torch.Tensor]
    workers: tuple[WorkerSummary, ...] = ()
    folder: Path | None = None
    warnings: tuple[str, ...] = ()

    def save(self, folder: str | Path, *, model_file: str | Path | None = None) -> Build:
        """Write the build; an earlier build in its place is replaced, anything else is left alone.

        Args:
            model_file: the user's file, remembered relative to the build.

        Raises:
            BuildError: the folder holds something else, or cannot be written. Nothing is left half-written.
        """
        folder = Path(folder)
        check_target(folder)
        plan = self.plan
        if model_file is not None:
            relative = os.path.relpath(Path(model_file).resolve(), folder.resolve())
            plan = dataclasses.replace(plan, model_file=relative)
        weights = save({name: t.contiguous() for name, t in _unshared(self.tensors).items()})
        plan = dataclasses.replace(plan, weights_digest=hashlib.sha256(weights).hexdigest())
        costs = {"workers": [dataclasses.asdict(w) for w in self.workers]}
        with replacing(folder) as fresh:
            for name, source in self.files.items():
                (fresh / name).write_text(source)
            (fresh / WEIGHTS).write_bytes(weights)
            (fresh / COSTS).write_text(json.dumps(costs, indent=1) + "\n")
            (fresh / PLAN).write_text(plan.to_json())
        return dataclasses.replace(self, plan=plan, folder=folder)

    def local(
        self,
        *,
        optimizer: Callable[[Sequence[tuple[str, nn.Parameter]]], torch.optim.Optimizer] | None = None,
        schedule: str | None = None,
        policy: str | None = None,
        seed: int = 0,
    ) -> LocalPipeline:
        """All workers in this process: for debugging, for accuracy studies of N workers on one machine.

        Args:
            optimizer: made once for each worker, from its own named parameters; default SGD(lr=0.01, momentum=0.9).
            schedule, policy: the build's own where None.
            seed: of dropout and its like.
        """
        from fxpipe.runtime.local import LocalPipeline

        def default(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
            return torch.optim.SGD([p for _, p in named], lr=0.01, momentum=0.9)

        if self.folder is not None:
            return LocalPipeline(self.folder, optimizer or default, schedule=schedule, policy=policy, seed=seed)
        with tempfile.TemporaryDirectory(prefix="fxpipe-") as scratch:
            saved = self.save(Path(scratch) / "build")
            return saved.local(optimizer=optimizer, schedule=schedule, policy=policy, seed=seed)


def compile(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    workers: int = 2,
    microbatches: int = 1,
    schedule: str | None = None,
    policy: str | None = None,
    forward_at: Sequence[str] = (),
    backward_at: Sequence[str] = (),
    autocast: str | None = None,
    cost: Literal["measured", "analytic"] = "measured",
    threads: int | None = None,
    sources: Mapping[str, str] | None = None,
    command: str = "fxpipe.compile(...)",
    observers: Sequence[Observer] = (),
) -> Build:
    """Capture the training step, cut it for `workers`, and emit each worker's stage.

    Args:
        model, loss, batch: `loss(model, batch)` is the step; `batch` is one whole minibatch.
        microbatches: how many each minibatch is cut into.
        schedule: 'async', '1f1b' or 'gpipe'; 'async' by default.
        policy: the schedule's own default where None.
        forward_at, backward_at: module paths to cut before; balanced where empty.
        autocast: 'bf16' for torch.autocast.
        cost: 'measured' on this machine or 'analytic' from shapes.
        threads: CPU threads while measuring.
        sources: digests of the user's files, for the check that a build is not stale.
        command: what is written into the stages' headers.

    Raises:
        FxpipeError: see capture, Cut and the schedules; each names the place and what to do.
    """
    from fxpipe import policy as policies
    from fxpipe import schedule as schedules
    from fxpipe.passes import Options, default_passes
    from fxpipe.schedule.check import check

    chosen = schedules.make(schedule or "async", workers, microbatches)
    policy_name = policy or policies.default_for(chosen)
    policies.make(policy_name).check(chosen)
    program = capture(model, loss, split(batch, microbatches)[0], autocast=autocast)
    options = Options(workers, tuple(forward_at), tuple(backward_at), cost, threads, command)
    program = run_passes(program, default_passes(options), observers)
    plan = _plan(program, chosen.name, policy_name, microbatches, dict(sources or {}))
    in_flight = check(chosen, minibatches=2 * workers + 2).in_flight
    tensors = {p.names[0]: program.values[p.node] for p in (*program.parameters, *program.buffers)}
    return Build(
        plan=plan,
        files=program.files,
        tensors={name: t.detach().clone() for name, t in tensors.items()},
        workers=tuple(summarize(program, plan, in_flight)),
        warnings=program.warnings,
    )


def _plan(program: Program, schedule: str, policy: str, microbatches: int, sources: dict[str, str]) -> Plan:
    assert program.cuts is not None
    cuts = program.cuts
    stages = tuple(
        StageSpec(
            file=f"stage_{s.worker}.py",
            digest=hashlib.sha256(program.files[f"stage_{s.worker}.py"].encode()).hexdigest(),
            forward_units=(cuts.forward[s.worker], cuts.forward[s.worker + 1]),
            backward_units=(cuts.backward[s.worker], cuts.backward[s.worker + 1]),
            forward=s.forward.spec,
            backward=s.backward.spec,
        )
        for s in program.stages
    )
    loss_worker = next(k for k, s in enumerate(stages) if s.forward.loss)
    return Plan(
        fxpipe=fxpipe.__version__,
        torch=torch.__version__.split("+")[0],
        model_file=None,
        sources=sources,
        workers=cuts.workers,
        microbatches=microbatches,
        schedule=schedule,
        policy=policy,
        autocast=program.autocast,
        device=program.device,
        batch=tuple(b.leaf for b in program.batch),
        batch_spec=program.batch_spec,
        units=program.units,
        loss_worker=loss_worker,
        parameters=_parameters(program, stages),
        buffers=_buffers(program, stages),
        edges=_edges(program),
        stages=stages,
        weights_file=WEIGHTS,
        weights_digest="",
    )


def _edges(program: Program) -> tuple[Any, ...]:
    """Every edge once, in the order in which they are sent."""
    return tuple(dict.fromkeys(program.wires[n.name] for n in program if n.name in program.wires))


def _parameters(program: Program, stages: Sequence[StageSpec]) -> tuple[ParameterSpec, ...]:
    readers: dict[str, list[tuple[int, Phase]]] = {}
    owners: dict[str, int] = {}
    for k, stage in enumerate(stages):
        for phase, part in _parts(stage):
            for name in part.weights:
                readers.setdefault(name, []).append((k, phase))
        owners.update(dict.fromkeys(stage.backward.gradients, k))
    rows = []
    for p in program.parameters:
        name = p.names[0]
        read = tuple(readers.get(name, ()))
        owner = owners.get(name, read[0][0] if read else 0)  # frozen: its first reader, or worker 0, keeps it
        rows.append(ParameterSpec(p.names, tensor_spec(program.values[p.node]), owner, p.trained, read))
    return tuple(rows)


def _buffers(program: Program, stages: Sequence[StageSpec]) -> tuple[BufferSpec, ...]:
    workers: dict[str, list[int]] = {}
    homes: dict[str, int] = {}
    for k, stage in enumerate(stages):
        for _, part in _parts(stage):
            for name in part.buffers:
                if k not in workers.setdefault(name, []):
                    workers[name].append(k)
        homes.update(dict.fromkeys(stage.forward.updates, k))
    rows = []
    for b in program.buffers:
        name = b.names[0]
        home = homes.get(name)
        held = tuple(workers.get(name, ())) or ((home if home is not None else 0),)
        spec = tensor_spec(program.values[b.node])
        rows.append(BufferSpec(b.names, spec, b.persistent and not b.constant, home, held))
    return tuple(rows)


def _parts(stage: StageSpec) -> tuple[tuple[Phase, Any], ...]:
    return (("F", stage.forward), ("B", stage.backward))


def load(folder: str | Path) -> Build:
    """Read a build back.

    Raises:
        BuildError: a file is missing, was changed (but for stages, which may be edited), or is of another version.
    """
    folder = Path(folder)
    plan = load_plan(folder)
    try:
        tensors = load_file(folder / plan.weights_file)
    except (SafetensorError, OSError) as error:
        raise BuildError(f"{plan.weights_file} cannot be read: {error}", where=str(folder)) from error
    files = {stage.file: (folder / stage.file).read_text() for stage in plan.stages}
    workers: tuple[WorkerSummary, ...] = ()
    if (folder / COSTS).is_file():
        rows = json.loads((folder / COSTS).read_text())["workers"]
        workers = tuple(
            WorkerSummary(**{k: tuple(v) if isinstance(v, list) else v for k, v in r.items()}) for r in rows
        )
    return Build(plan, files, tensors, workers, folder)


def _unshared(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of tensors that lie in another one's memory: the file format wants each apart."""
    seen: set[int] = set()
    made = {}
    for name, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        made[name] = tensor.clone() if pointer in seen and tensor.numel() else tensor
        seen.add(pointer)
    return made
