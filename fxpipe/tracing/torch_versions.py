"""The versions of torch that fxpipe is tested with: `make compat` runs them, `fxpipe doctor` names them."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.torch_version import TorchVersion

TESTED = ("2.11.0", "2.13.0", "2.15.0")
"""Releases, oldest first: pyproject.toml allows the first and all later ones. Tracing leans on inner parts of torch,
which any release may change."""


def standing(version: TorchVersion) -> str:
    """`yes` for a tested version, whatever its local label (`+cpu`), else `no: …` with its place among those."""
    if version.partition("+")[0] in TESTED:
        return "yes"
    older = bisect_right(TESTED, version)  # torch orders its versions, pre-releases among them
    if not older:
        return f"no: older than {TESTED[0]}, the oldest that fxpipe supports"
    if older == len(TESTED):
        return f"no: newer than {TESTED[-1]}, the newest that is tested"
    return f"no: between {TESTED[older - 1]} and {TESTED[older]}, which are tested"
