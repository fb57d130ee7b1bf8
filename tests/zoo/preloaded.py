"""What every check imports: loaded once, in the process that those of the models are forked from."""

from __future__ import annotations

import contextlib

import check
from families import define_torchvision_ops

__all__ = ["check"]

define_torchvision_ops()
with contextlib.suppress(ImportError):
    import transformers.modeling_utils  # noqa: F401
