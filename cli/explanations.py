"""The pages of `docs/errors`, which `fxpipe explain` shows; an installation has them next to this file."""

from __future__ import annotations

from pathlib import Path

from fxpipe.errors import FxpipeError, near

_UP = Path(__file__).parents[1]
FOLDER = _UP / "pages" if (_UP / "pages").is_dir() else _UP / "docs" / "errors"


def titles() -> dict[str, str]:
    """Every page's title, by the page's name."""
    pages = sorted(path for path in FOLDER.glob("*.md") if path.stem != "README")
    return {path.stem: path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for path in pages}


def page(name: str) -> str:
    """A page's text.

    Raises:
        FxpipeError: there is no such page.
    """
    known = titles()
    if name not in known:
        raise FxpipeError(f"there is no page {name!r}{near(name, known)}", hint=f"pages: {', '.join(known)}")
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")
