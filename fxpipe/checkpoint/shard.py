"""One worker's shard of a checkpoint, in memory and as files.

    model-00001-of-00004.safetensors       the parameters and buffers that it saves, by the model's names
    optimizer-00001-of-00004.safetensors   what its optimizer, averages and others keep of each parameter
    pipeline-00001-of-00004.safetensors    what minibatches in flight have read: only for the same cuts
    worker-00001-of-00004.json             everything that is not a tensor, and what each tensor of these two files is

What another replica has in addition to the first is in files of the same kinds, except the model's:

    optimizer-00001-of-00004-replica-1.safetensors

If replicas train separately, the model's files have the common weights, and the state has each replica's own weights.

The model's files have the form of transformers, with `model.safetensors.index.json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict

from msgspec import Meta
from torch import Tensor

from fxpipe.checkpoint.manifest import MANIFEST, FileEntry, Manifest
from fxpipe.checkpoint.safetensors_file import TensorFile, write_bytes, write_tensors
from fxpipe.checkpoint.tree import Decoder, Encoder, said
from fxpipe.errors import CheckpointError
from fxpipe.files import sync_folder
from fxpipe.plan.plan import BufferSpec, Plan
from fxpipe.typed_json import Malformed, convert, explained, parse

INDEX = "model.safetensors.index.json"
DECIDED = "decided"
"""The state of what callbacks have decided and what is yet to be done: (after, at, hook, ends the run)."""

Count = Annotated[int, Meta(ge=0)]
Tensors = dict[str, Tensor]
_NUMBER = re.compile(r"-(\d{5})-of-\d{5}(?:-replica-(\d+))?\.")
Version = tuple[int, int]
"""A version of weights, and how many updates ahead they are predicted."""

Past = Mapping[Version, Mapping[str, Tensor]]
"""The parameters of earlier versions that actions of minibatches in flight read, by name."""

Sent = Mapping[tuple[int, int, int], Mapping[str, Tensor]]
"""A reader's copies of an owner's parameters by name; by version, prediction distance and reader."""


@dataclass
class Shard:
    """A worker's shard of a checkpoint, as copies that no longer change.

    Attributes:
        step: how many updates have been made.
        start: the first minibatch of the present segment.
        parameters: those it owns, by their first names.
        buffers: all that the worker has, by their first names.
        past: what minibatches in flight read of earlier versions of its parameters: on all workers or, if weight copies
            are sent as encoded differences, on this one.
        sent: with encoded differences, what other workers have of these versions and of the live one; later differences
            build on it.
        codecs: by edge, the memory of the codec of a gradient that it sends; only for the same cuts.
        state: of the parts of its updates, by their names, without live tensors; and what was `DECIDED`.
        data: on worker 0, the state of the data, if they have a `state_dict`.
    """

    step: int
    start: int = 0
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    past: dict[Version, dict[str, Tensor]] = field(default_factory=dict)
    sent: dict[tuple[int, int, int], dict[str, Tensor]] = field(default_factory=dict)
    codecs: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    data: Any = None


def write_shard(folder: Path, plan: Plan, worker: int, shard: Shard, replica: int = 0) -> dict[str, FileEntry]:
    """Write the files of a worker, or of another replica of it; returns when they are on the disk."""
    names = {row.name: row.saved for row in plan.tensors}
    answers = {b.name for b in plan.buffers if b.saved and buffer_worker(b) == worker}
    model = {**shard.parameters, **{name: value for name, value in shard.buffers.items() if name in answers}}
    optimizer, pipeline = Encoder(), Encoder()
    body = {
        "start": shard.start,
        "optimizer": optimizer(shard.state),
        "buffers": pipeline({n: b for n, b in shard.buffers.items() if replica or n not in answers}, "buffer"),
        "past": [
            {"version": version, "ahead": ahead, "weights": pipeline(held, f"version {version} + {ahead}")}
            for (version, ahead), held in shard.past.items()
        ],
        "sent": [
            {
                "version": version,
                "ahead": ahead,
                "reader": reader,
                "weights": pipeline(held, f"version {version} + {ahead} on worker {reader}"),
            }
            for (version, ahead, reader), held in shard.sent.items()
        ],
        "codecs": {edge: pipeline(memory, f"codec of {edge}") for edge, memory in shard.codecs.items()},
        "data": pipeline(shard.data, "data"),
    }
    file = _files(worker, plan.workers, replica)
    aliased = {alias: value for name, value in model.items() for alias in names[name]}
    return {
        **({} if replica else {file["model"]: write_tensors(folder / file["model"], aliased)}),
        file["optimizer"]: write_tensors(folder / file["optimizer"], optimizer.tensors),
        file["pipeline"]: write_tensors(folder / file["pipeline"], pipeline.tensors),
        file["worker"]: write_bytes(folder / file["worker"], json.dumps(body).encode()),
    }


class Saves(NamedTuple):
    """What a replica of a worker saves: the first all; another what it has by itself, and no files without any.

    Attributes:
        whole: weights, buffers, and what minibatches in flight have read.
        state: of the parts of its updates.
        files: it writes some.
    """

    whole: bool
    state: bool
    files: bool

    @staticmethod
    def of(plan: Plan, worker: int, replica: int) -> Saves:
        """Replicas that train separately have all by themselves; those that share the optimizer, the state of their
        share; if codecs remember what they left out of gradients, all replicas have such memories."""
        whole = replica == 0 or plan.outer is not None
        remember = any(edge.codec and edge.src_phase == "B" for edge in plan.all_edges)
        return Saves(whole, whole or bool(plan.updaters(worker)), whole or plan.sharded or remember)


Report = dict[str, Any]
"""What other processes must know of a shard: the digests of its files, or the error."""


class CheckpointWriter:
    """Writes checkpoints: each process the shards of its workers into a folder, and one then makes it a checkpoint.

    Attributes:
        places: the workers and replicas that write files.
    """

    def __init__(self, plan: Plan, about: Mapping[str, Any]) -> None:
        self._plan, self._about = plan, about
        places = ((worker, r) for worker in range(plan.workers) for r in range(plan.replicas_of(worker)))
        self.places = [place for place in places if Saves.of(plan, *place).files]

    def write(
        self, opened: AbstractContextManager[Path], worker: int, replica: int, make: Callable[[], Shard]
    ) -> Report:
        """Make a shard, and write it into a folder. Any error is reported, also one of the user's objects: else other
        processes would wait for ever."""
        try:
            with opened as folder:
                files = write_shard(folder, self._plan, worker, make(), replica)
        except Exception as error:
            who = f"worker {worker}" + (f", replica {replica}" if replica else "")
            return {"error": f"{who} cannot write its part of a checkpoint: {said(error)}"}
        return {"files": {name: asdict(entry) for name, entry in files.items()}}

    def complete(self, folder: Path, step: int, start: int, files: Mapping[str, FileEntry]) -> None:
        """Make a checkpoint of the files that all have written into a folder; the index is as transformers has it."""
        owners = {name: p.owner for p in self._plan.parameters for name in p.saved}
        owners |= {name: buffer_worker(b) for b in self._plan.buffers for name in b.saved}
        size = sum(row.tensor.bytes * len(row.saved) for row in self._plan.tensors)
        weight_map = {name: _files(worker, self._plan.workers)["model"] for name, worker in owners.items()}
        index = json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=1)
        files = {**files, INDEX: write_bytes(folder / INDEX, index.encode())}
        manifest = Manifest(step, start, self._plan.workers, **self._about, files=files)
        write_bytes(folder / MANIFEST, manifest.to_json().encode())
        sync_folder(folder)


def files_of(reports: Sequence[Report]) -> dict[str, FileEntry]:
    """The files of all shards.

    Raises:
        CheckpointError: some could not be written.
    """
    if failed := [report["error"] for report in reports if "error" in report]:
        raise CheckpointError("; ".join(failed))
    return {name: FileEntry(**entry) for report in reports for name, entry in report["files"].items()}


def state_files(worker: int, workers: int, replica: int = 0) -> list[str]:
    """The names of a worker's files that `read_shard` reads: all except the model's."""
    return [name for kind, name in _files(worker, workers, replica).items() if kind != "model"]


def replicas_in(files: Iterable[str], worker: int) -> list[int]:
    """The replicas of a worker, except the first, that have files among these."""
    matches = [_NUMBER.search(name) for name in files]
    return sorted({int(m[2]) for m in matches if m is not None and m[2] and int(m[1]) == worker + 1})


def worker_of(name: str) -> int:
    """The worker that wrote a file of a checkpoint; worker 0 for common files."""
    match = _NUMBER.search(name)
    return int(match[1]) - 1 if match else 0


def read_shard(folder: Path, step: int, worker: int, workers: int, forms: Mapping[str, Any], replica: int = 0) -> Shard:
    """The shard of a worker, or of another replica of it, without what is in the model's files.

    Args:
        forms: the type of each part's state, by its name.

    Raises:
        CheckpointError: a file cannot be read, or was not written by `write_shard`.
    """
    file = _files(worker, workers, replica)
    optimizer, pipeline = (Decoder(TensorFile(folder / file[kind])) for kind in ("optimizer", "pipeline"))
    path = folder / file["worker"]
    with explained(path, error=CheckpointError, hint="use another checkpoint: --resume PATH"):
        body = convert(parse(path), _Body)
        if body.start > step:
            raise Malformed(f"it begins with minibatch {body.start}, after step {step}", ", $.start")
        try:
            state = {"optimizer": _by_name(optimizer(body.optimizer))}
            decoded = _Decoded(
                buffers=pipeline(body.buffers),
                past=[pipeline(row.weights) for row in body.past],
                sent=[pipeline(row.weights) for row in body.sent],
                codecs={edge: pipeline(memory) for edge, memory in body.codecs.items()},
            )
            data = pipeline(body.data)
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise Malformed(f"it is not a shard of a checkpoint: {error}") from error
        held = convert(vars(decoded), _Decoded)
        of_all = {**forms, DECIDED: list[tuple[Count, Count, str, bool]]}
        form: Any = dict[str, TypedDict("State", of_all, total=False)]  # type: ignore[misc,operator]
        state = convert(state, form)
        past = {(row.version, row.ahead): weights for row, weights in zip(body.past, held.past, strict=True)}
        sent = {(row.version, row.ahead, row.reader): each for row, each in zip(body.sent, held.sent, strict=True)}
        return Shard(step, body.start, {}, held.buffers, past, sent, held.codecs, state["optimizer"], data)


def _by_name(state: Any) -> dict[str, Any]:
    """The state of each part of an update by its name; in the first format, some were within the updater's."""
    states = dict(state or {})
    if "clip" in (updater := states.get("updater") or {}):
        clip = updater.pop("clip")  # or that of loss scaling, without clipping's
        states |= clip if isinstance(clip, dict) else {"clip": clip}
        states |= {name: updater.pop(name) for name in ("last_updates", "last_steps") if name in updater}
        states["staleness"] = None  # as `rates_known`, not read
        updater.pop("rates_known", None)
        if "heard" in updater:
            updater["metric_due"] = updater.pop("heard")
        states["updater"] = updater if "optimizer" in updater else None
    return {name: value for name, value in states.items() if value is not None}


def buffer_worker(buffer: BufferSpec) -> int:
    """The worker that saves a buffer: its home, else its first reader, else worker 0."""
    return buffer.home if buffer.home is not None else min(buffer.workers, default=0)


@dataclass(frozen=True)
class _Decoded:
    """The contents with tensors."""

    buffers: Tensors
    past: list[Tensors]
    sent: list[Tensors]
    codecs: dict[str, Tensors]


@dataclass(frozen=True)
class _Past:
    version: Count
    ahead: Count
    weights: dict[str, Any]


@dataclass(frozen=True)
class _PastOfReader(_Past):
    reader: Count


@dataclass(frozen=True)
class _Body:
    """The contents of `worker-….json`."""

    start: Count
    optimizer: Any
    buffers: dict[str, Any]
    past: list[_Past]
    data: Any
    sent: list[_PastOfReader] = field(default_factory=list)  # earlier versions of fxpipe wrote neither this nor codecs
    codecs: dict[str, Any] = field(default_factory=dict)


def _files(worker: int, workers: int, replica: int = 0) -> Mapping[str, str]:
    number = f"{worker + 1:05d}-of-{workers:05d}" + (f"-replica-{replica}" if replica else "")
    return {
        "model": f"model-{number}.safetensors",
        "optimizer": f"optimizer-{number}.safetensors",
        "pipeline": f"pipeline-{number}.safetensors",
        "worker": f"worker-{number}.json",
    }
