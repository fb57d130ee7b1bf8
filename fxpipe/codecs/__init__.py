"""Codecs by name: they write values in fewer bytes for slow links. Each codec has a file, with its formula."""

from __future__ import annotations

import keyword
from typing import TypeVar

from fxpipe.codecs.casts import Bf16, Fp16
from fxpipe.codecs.codec import Codec, is_without_codecs, without_codecs
from fxpipe.codecs.int4 import Int4
from fxpipe.codecs.int8 import Int8
from fxpipe.codecs.lossless import Bits, Int32
from fxpipe.codecs.lowrank import LowRank
from fxpipe.codecs.sparseloco import SparseLoCo
from fxpipe.codecs.topk import TopK
from fxpipe.errors import CodecError, near

CODECS: dict[str, type[Codec]] = {
    kind.name: kind
    for kind in (
        # Half the bytes of float32, by rounding.
        Bf16,  # for all kinds
        Fp16,  # more precise, and small gradients vanish
        # Whole steps of a scale for each block. Gradients are rounded stochastically, so that errors do not add up.
        Int8,  # 8.25 bits a value
        Int4,  # 4.5 bits, for activations; gradients need more
        # A small part of the value now, and the rest in later messages: for gradients and differences of weights.
        TopK,  # the greatest values
        LowRank,  # the directions in which a matrix is greatest
        SparseLoCo,  # the greatest of each chunk, in 14 bits each: for outer steps
        # The same bits when read back; the compiler chooses these by dtype.
        Bits,  # bool
        Int32,  # int64
    )
}

_WORDS = ("none", "auto")
"""What `--codec` accepts in addition to names of codecs."""

_Kind = TypeVar("_Kind", bound=type[Codec])


def register(kind: _Kind) -> _Kind:
    """A class decorator: from now on, `--codec` and emitted code know this codec by its name.

    If it is in a model file, every worker of a run knows it, because every worker imports that file.

    Raises:
        CodecError: its name is missing, is not a Python identifier, or is used by fxpipe.
    """
    name = getattr(kind, "name", "")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise CodecError(f"{kind.__name__} has no name", hint='name: ClassVar[str] = "…", a Python identifier')
    if name in _WORDS or (name in CODECS and CODECS[name].__module__.startswith(f"{__name__}.")):
        raise CodecError(f"'{name}' already means something else", hint=f"give {kind.__name__} another name")
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
            hint=f"give one of: {', '.join(CODECS)}, or one that the model file registers",
        )
    if not colon:
        return CODECS[name]()
    return CODECS[name].of(option)


__all__ = ["CODECS", "Codec", "codec", "is_without_codecs", "register", "without_codecs"]
