"""A checkpoint that a run starts from: one safetensors file, or a folder of them, read tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from fxpipe.checkpoint.manifest import MANIFEST, Manifest, check_files, read_manifest
from fxpipe.checkpoint.safetensors_file import DTYPES, read_digests
from fxpipe.checkpoint.shard import INDEX
from fxpipe.errors import BuildError, listed
from fxpipe.plan.packing import Layout
from fxpipe.plan.plan import BufferSpec, ParameterSpec, Plan
from fxpipe.task.wrapped_tensors import SCALES
from fxpipe.typed_json import convert, explained, parse

Row = ParameterSpec | BufferSpec

SINGLE = "model.safetensors"
WHOLE = "copy the whole folder again, as it was written"
FORM = f"give a .safetensors file, or a folder with {SINGLE} or {INDEX}"


@dataclass(frozen=True)
class Checkpoint:
    """The parameters and saved buffers of a build in a checkpoint.

    Attributes:
        path: as the user gave it.
        places: by first name of each parameter or buffer in it: the file, and the name there.
        warnings: about other dtypes and unused tensors.
        manifest: of a checkpoint of fxpipe, with the digests of its files; None for others.
    """

    path: Path
    places: dict[str, tuple[Path, str]]
    warnings: tuple[str, ...]
    manifest: Manifest | None

    @property
    def files(self) -> list[Path]:
        """The files that hold what is read."""
        return sorted({file for file, _ in self.places.values()})

    @staticmethod
    def open(path: str | Path, plan: Plan) -> Checkpoint:
        """Read the headers of its files, and check them against the plan; any name of a tied parameter will do.

        Raises:
            BuildError: it cannot be read or was changed, or parameters are missing or have another shape (lists all).
            CheckpointError: it is a checkpoint of fxpipe, and was changed.
        """
        path = Path(path)
        manifest = read_manifest(path) if (path / MANIFEST).is_file() else None  # written by fxpipe
        if manifest is not None:
            check_files(path, manifest, [INDEX])
        tensors = {name: (file, shape, dtype) for file, name, shape, dtype in _headers(path)}
        places: dict[str, tuple[Path, str]] = {}
        missing, wrong, converted = [], [], []
        rows: list[Row] = [row for row in plan.tensors if row.saved]
        for row in rows:
            name = next((n for n in (*row.saved, *row.names) if n in tensors), None)
            if name is None:
                if isinstance(row, ParameterSpec) or any(end in part for part in row.saved for end in SCALES):
                    missing.append(row.saved[0])
                continue
            file, shape, dtype = tensors[name]
            if shape != row.tensor.shape:
                wrong.append(f"{name} is {list(shape)}, not {list(row.tensor.shape)}")
            elif dtype != DTYPES.get(row.tensor.dtype):
                converted.append(f"{name} ({dtype} to {DTYPES.get(row.tensor.dtype)})")
            places[row.name] = (file, name)
        if missing or wrong:
            raise _unfit(path, missing, wrong, set(tensors))
        names = {name for row in rows for name in (*row.saved, *row.names)}
        unknown = sorted(set(tensors) - names)
        warnings = []
        if converted:
            warnings.append(f"{path}: tensors converted to the build's dtype, {len(converted)}: {listed(converted)}")
        if unknown:
            warnings.append(f"{path}: tensors that are not in the model are ignored, {len(unknown)}: {listed(unknown)}")
        return Checkpoint(path, places, tuple(warnings), manifest)

    def read(self, rows: Iterable[Row], device: torch.device | str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the rows that are in it, by first name, in the plan's dtype and layout."""
        by_file: dict[Path, list[tuple[str, Row]]] = {}
        for row in rows:
            if row.name in self.places:
                file, name = self.places[row.name]
                by_file.setdefault(file, []).append((name, row))
        if self.manifest is not None:  # only these files: each worker reads its own
            check_files(self.path, self.manifest, [path.name for path in by_file])
        for path, entries in by_file.items():
            digests = read_digests(path)
            with _opened(path) as file:
                for name, row in entries:
                    tensor = file.get_tensor(name)
                    digests.check(name, tensor)
                    yield row.name, Layout(row.tensor, name).empty(device).copy_(tensor)


def _headers(path: Path) -> Iterator[tuple[Path, str, tuple[int, ...], str]]:
    """Every tensor of a checkpoint: its file, name, shape and dtype."""
    for file, names in _files(path).items():
        read_digests(file)
        with _opened(file) as opened:
            for name in opened.keys() if names is None else names:
                try:
                    tensor = opened.get_slice(name)
                except SafetensorError as error:
                    raise BuildError(
                        f"{name} is not in {file.name}, as {INDEX} says", where=str(path), hint=WHOLE
                    ) from error
                yield file, name, tuple(tensor.get_shape()), str(tensor.get_dtype())


@dataclass(frozen=True)
class _Index:
    """The contents of `INDEX`: the file of each tensor."""

    weight_map: dict[str, str]


def _files(path: Path) -> dict[Path, list[str] | None]:
    """The files, and the tensors to read from each; None for all."""
    if path.is_file():
        return {path: None}
    if (path / SINGLE).is_file():
        return {path / SINGLE: None}
    if not (path / INDEX).is_file():
        what = f"{path} has no checkpoint" if path.is_dir() else f"there is no {path}"
        raise BuildError(what, where="--weights", hint=FORM)
    with explained(path / INDEX, error=BuildError, hint=FORM):
        index = convert(parse(path / INDEX), _Index, extra=True)
    files: dict[Path, list[str] | None] = {}
    for name, file in index.weight_map.items():
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise BuildError(f"{INDEX} names a file outside of its folder: {file}", where=str(path), hint=WHOLE)
        names = files.setdefault(path / file, [])
        assert names is not None
        names.append(name)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise BuildError(f"the checkpoint is incomplete: {listed(missing)} missing", where=str(path), hint=WHOLE)
    return files


def _opened(file: Path) -> safe_open:
    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError) as error:
        raise BuildError(f"the weights cannot be read: {error}", where=str(file), hint=FORM) from error


def _unfit(path: Path, missing: list[str], wrong: list[str], names: set[str]) -> BuildError:
    lines = [f"missing: {listed(missing)}"] if missing else []
    lines += [f"of another shape: {listed(wrong)}"] if wrong else []
    prefix = min(names, default="").partition(".")[0] + "."  # of a wrapper around the model: "module.", "model."
    if all(name.startswith(prefix) for name in names) and any(prefix + name in names for name in missing):
        hint = f"all names of the checkpoint begin with {prefix!r}: save the state_dict() of the wrapped model"
    else:
        hint = "name tensors as model().named_parameters() does; the checkpoint has " + listed(sorted(names), 5)
    return BuildError("the checkpoint does not fit the model:\n  " + "\n  ".join(lines), where=str(path), hint=hint)
