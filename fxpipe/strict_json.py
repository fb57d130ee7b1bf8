"""JSON that every reader takes: it has no name for infinity and for what is not a number."""

from __future__ import annotations

import json
import math
from typing import Any


def dumps(data: Any, indent: int | None = None) -> str:
    """The data as text, with null for what is not finite."""
    try:
        return json.dumps(data, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(data), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
