"""A build with trained weights instead of its initial ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from fxpipe.builds.build import Build
from fxpipe.checkpoint.safetensors_file import read_digests
from fxpipe.errors import ExportError, listed
from fxpipe.runtime.worker.final_weights import final_tensors


def with_trained(build: Build, file: str | Path) -> Build:
    """The build with the weights of a run's `model.safetensors`, which has all of the model's own names.

    What a run does not write into the file (buffers that are not persistent, constants) stays unchanged. For a tied
    weight, one name is enough.
    """
    file = Path(file)
    try:
        digests = read_digests(file)
        trained = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ExportError(
            f"{file} cannot be read: {error}", hint="--trained takes a run's model.safetensors"
        ) from error
    for name, value in trained.items():
        digests.check(name, value)
    missing, other = [], []
    tensors = dict(build.tensors)
    unknown = set(trained)
    for row in final_tensors(build.plan):
        unknown -= set(row.names)
        rows = [(name, trained[name]) for name in row.names if name in trained]
        if not rows:
            missing.append(row.name)
        for name, value in rows:
            kind, expected = f"{value.dtype}{list(value.shape)}", f"torch.{row.spec.dtype}{list(row.spec.shape)}"
            if kind != expected:
                other.append(f"{name} is {kind}, not {expected}".replace("torch.", ""))
            tensors[row.name] = value
    wrong = [("missing", missing), ("not of the model", sorted(unknown)), ("of another kind", other)]
    lines = [f"{what}: {listed(names, 8)}" for what, names in wrong if names]
    if lines:
        raise ExportError(
            "the trained weights are for another model:\n  " + "\n  ".join(lines),
            where=str(file),
            hint="use the model.safetensors of a run of this build",
        )
    return dataclasses.replace(build, tensors=tensors)
