"""Digests of what the quick cases train: a change that is to change no number leaves them as they are.

    python tests/law/bits.py write before.json             on the tree as it was
    python tests/law/bits.py compare before.json           on the tree as it is: says which cases differ, and in what

They hold on one machine, with one version of torch; so none are kept in the repository.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

from digests import digest, of_plan, write_or_compare  # noqa: E402


def digests(text: str) -> dict[str, str]:
    """Of a case's plan, emitted files, losses, metrics, weights and averages; or of the error that refuses it."""
    import torch
    from case import of_text
    from product import compiled, run_here, runs_of

    from fxpipe.errors import FxpipeError

    case = replace(of_text(text), stop=0)
    with tempfile.TemporaryDirectory() as folder:
        try:
            compiled(case, Path(folder))
            left = run_here(runs_of(case, Path(folder))[0])
        except FxpipeError as error:
            return {"refused": error.what}
        build = Path(folder) / "build"
        emitted = {"plan": of_plan(build)} | {f.name: digest(f.read_text()) for f in sorted(build.glob("*.py"))}
    weights = [
        (name, digest(value.reshape(-1).view(torch.uint8).numpy().tobytes()))
        for tensors in (left.weights, left.averages)
        for name, value in sorted(tensors.items())
    ]
    trained = {"losses": left.losses, "lines": left.lines, "metrics": left.evaluation, "weights": weights}
    return emitted | {what: digest(repr(value)) for what, value in trained.items()}


def main() -> int:
    import torch
    from choose import quick

    torch.set_num_threads(1)
    return write_or_compare(map(str, quick()), digests)


if __name__ == "__main__":
    sys.exit(main())
