"""How a batch is built, for people."""

from __future__ import annotations

from torch.utils import _pytree as pytree


def tree_text(spec: str) -> str:
    """A serialised pytree as torch shows it; as it is written, if torch knows no such type."""
    try:
        return str(pytree.treespec_loads(spec))
    except Exception:  # whatever a plan holds that someone has written
        return spec
