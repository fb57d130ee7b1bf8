"""Codecs by name: how values are written in fewer bytes to cross slow links. A file a codec, with its formula."""

from __future__ import annotations

from typing import TypeVar

from fxpipe.codecs.codec import Codec, is_without_codecs, without_codecs
from fxpipe.errors import CodecError, near

CODECS: dict[str, type[Codec]] = {}

_Kind = TypeVar("_Kind", bound=type[Codec])


def register(kind: _Kind) -> _Kind:
    """A class decorator: from now on, `--codec` and emitted code know this codec by its name.

    If it is in a model file, every worker of a run knows it, because every worker imports that file.

    Raises:
        CodecError: it has no name that can be one in Python, or that of one of fxpipe's own.
    """
    name = getattr(kind, "name", "")
    if not name.isidentifier():
        raise CodecError(f"{kind.__name__} has no name", hint='name: ClassVar[str] = "…", as a variable may be called')
    if name in CODECS and CODECS[name].__module__.startswith(f"{__name__}."):
        raise CodecError(f"there is a codec '{name}' already", hint=f"another name for {kind.__name__}")
    CODECS[name] = kind
    return kind


def codec(text: str) -> Codec:
    """The codec that a text names, with its option after a colon: `int8`, `topk:0.01`, `lowrank:4`.

    Raises:
        CodecError: no codec has this name, or its option makes no sense.
    """
    name, colon, option = text.partition(":")
    if name not in CODECS:
        raise CodecError(
            f"there is no codec '{name}'{near(name, CODECS)}",
            hint=f"one of: {', '.join(CODECS)}; or one that the build's own model file registers",
        )
    if not colon:
        return CODECS[name]()
    return CODECS[name].of(option)


__all__ = ["CODECS", "Codec", "codec", "is_without_codecs", "register", "without_codecs"]
