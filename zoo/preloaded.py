"""What every check imports: loaded once, in the process that those of the models are forked from."""

from __future__ import annotations

import contextlib

import check
import check_recipe
from families import define_torchvision_ops

__all__ = ["check", "check_recipe"]

define_torchvision_ops()
with contextlib.suppress(ImportError):
    import transformers.modeling_utils  # noqa: F401
with contextlib.suppress(ImportError):
    import pytorch_optimizer  # noqa: F401
