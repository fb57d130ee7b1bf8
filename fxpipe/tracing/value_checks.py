"""Leaves torch's own checks of values, which no graph can hold, out of the step.

`torch._check_tensor_all` and `torch._check_tensor_all_with` raise if an element is False. Libraries call them to
inform torch.compile: transformers compares the image tokens of a text with its images. The user gets a note for each.
`torch.distributions` checks its parameters and samples unless the default validate_args is False.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.distributions import Distribution

from fxpipe import user_lines
from fxpipe.torch_private import CHECK_TENSOR, validates_args


@contextlib.contextmanager
def left_out() -> Iterator[list[str]]:
    """Inside, checks of traced values pass; the list gets a note for each place that makes one."""
    notes: list[str] = []
    check: Any = getattr(torch, CHECK_TENSOR, None)
    validates = validates_args(Distribution)

    def passing(error_type: type[Exception], cond: Any, message: Any = None) -> None:
        if not isinstance(cond, torch.Tensor) or cond.dtype != torch.bool:
            check(error_type, cond, message)  # which refuses it
        frame = user_lines.user_frame(sys._getframe(1))
        at = f" ({user_lines.place(frame.f_code.co_filename, frame.f_lineno)})" if frame else ""
        note = f"the step checks values, which the emitted code does not{at}"
        if note not in notes:
            notes.append(note)

    Distribution.set_default_validate_args(False)
    try:
        with mock.patch.object(torch, CHECK_TENSOR, passing, create=True):
            yield notes
    finally:
        Distribution.set_default_validate_args(validates)
