"""Digests of what is emitted for models of the zoo: a change that is to change no stage leaves them as they are.

    export PYTHONPATH=tests/support
    python zoo/stages.py write before.json             on the tree as it was
    python zoo/stages.py compare before.json           on the tree as it is: says which differ, and in which files

Each `EACH`th model is cut for two and for four workers, with the same and with separate cuts, and for a schedule that
splits the backward; every second of them has batches of a second shape and an evaluation. Costs are analytic, so all is
the same on each machine. `tests/law/bits.py` does the same for the cases of the law, and trains them.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from check import MICROBATCHES, Failure, both_cuts, captured, lowered, quiet
from digests import Digests, digest, of_plan, write_or_compare
from families import ZOO, ZooModel

import fxpipe
from fxpipe.builds.build import Build
from fxpipe.errors import FxpipeError

EACH = 7
OPTIONS = {"microbatches": MICROBATCHES, "accept_microbatch_loss": True, "cost": "analytic"}


def builds(entry: ZooModel, full: bool) -> Iterator[tuple[str, Build]]:
    """A model's builds by name.

    Args:
        full: with a second shape and an evaluation.
    """
    model, loss, batch = entry.make()
    quiet(model)
    program = captured(entry, model, loss, batch)
    for schedule in ("1f1b", "zb-h1"):
        yield f"two {schedule}", fxpipe.lower(program, workers=2, schedule=schedule, **OPTIONS)
    for direction, cuts in zip(("earlier", "later"), both_cuts(program), strict=True):
        yield f"four {direction}", lowered(program, cuts)
    if full:
        larger = dataclasses.replace(entry, size=2 * entry.size).batches(1)
        evaluation = (lambda model, batch: {"loss": loss(model, batch)}, [batch])
        options = {**OPTIONS, "constant_batch": entry.constant_batch, "schedule": "1f1b", "workers": 2}
        yield "shapes", fxpipe.compile(model, loss, batch, shapes=larger, evaluation=evaluation, **options)


def chosen() -> list[str]:
    """The models, whether all packages are here or not."""
    return [entry.name for entry in ZOO.values() if not entry.refused][::EACH]


def digests(name: str) -> Digests:
    """Of a model's plans and emitted files; or of the error that refuses it."""
    emitted: Digests = {}
    try:
        for label, build in builds(ZOO[name], chosen().index(name) % 2 == 0):
            with tempfile.TemporaryDirectory() as folder:
                saved = Path(folder) / "build"
                build.save(saved)
                emitted[f"{label}: plan"] = of_plan(saved)
                emitted |= {f"{label}: {file.name}": digest(file.read_text()) for file in sorted(saved.glob("*.py"))}
    except (FxpipeError, Failure) as error:
        emitted["refused"] = str(error)
    return emitted


def main() -> int:
    return write_or_compare([name for name in chosen() if not ZOO[name].missing()], digests)


if __name__ == "__main__":
    sys.exit(main())
