"""`--codec`: which codec each kind of edge gets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fxpipe.codecs import CODECS, codec
from fxpipe.errors import CodecError, near

if TYPE_CHECKING:
    from fxpipe.plan.spec import TensorSpec

KINDS = ("input", "activation", "saved", "gradient", "weights")
"""What may be encoded: the kinds of edges, and replicas of weights."""

LEAST = 1024
"""Bytes. A smaller value takes as long to pack as to send."""

MILDER = {"int4": "int8"}
"""What a codec for all kinds means for gradients and weights: they need milder ones (TAH-Quant)."""

LOSSLESS = {"bool": "bits", "int64": "int32"}
"""By dtype, what packs a value without loss wherever something else has a codec."""


@dataclass(frozen=True)
class Encoding:
    """Which codec each kind of edge gets.

    Attributes:
        by_kind: codecs' texts; kinds that are not named travel as they are.
        is_auto: the choice is left to the compiler, among `candidates`.
    """

    by_kind: Mapping[str, str] = field(default_factory=dict)
    is_auto: bool = False

    @staticmethod
    def read(text: str) -> Encoding:
        """What `--codec` means: `none`, `auto`, a codec for all kinds, or `activation=int4,gradient=int8`.

        Raises:
            CodecError: there is no such codec or kind, or a codec is not for that kind; all problems are named.
        """
        if text in ("none", ""):
            return NONE
        if text == "auto":
            return AUTO
        if "=" not in text:
            made = codec(text)
            every = {kind: MILDER.get(text, text) if kind in ("gradient", "weights") else text for kind in KINDS}
            return Encoding({kind: name for kind, name in every.items() if kind in made.kinds})
        found, problems = {}, []
        for part in text.split(","):
            kind, _, name = part.strip().partition("=")
            if kind not in KINDS:
                problems.append(f"there is no kind of edge '{kind}'{near(kind, KINDS)}")
            elif name != "none":
                try:
                    if kind not in codec(name).kinds:
                        problems.append(f"{name} is for {', '.join(codec(name).kinds)}, not for {kind}")
                    found[kind] = name
                except CodecError as error:
                    problems.append(error.what)
        if problems:
            raise CodecError(
                "; ".join(problems),
                where=f"--codec {text}",
                hint=f"kinds: {', '.join(KINDS)}; codecs: none, {', '.join(CODECS)}",
            )
        return Encoding(found)

    @property
    def is_none(self) -> bool:
        """Whether every value travels as it is."""
        return not self.by_kind and not self.is_auto

    @property
    def candidates(self) -> tuple[Encoding, ...]:
        """What `auto` chooses among: what the accuracy study has found to lose nothing."""
        return tuple(Encoding.read(text) for text in HARMLESS) if self.is_auto else (self,)

    @property
    def texts(self) -> tuple[str, ...]:
        """All codecs that edges may get by it."""
        return tuple(dict.fromkeys(self._texts()))

    def _texts(self) -> Iterator[str]:
        for one in self.candidates:
            yield from one.by_kind.values()
        if not self.is_none:
            yield from LOSSLESS.values()

    @property
    def of_weights(self) -> str:
        """What packs replicas of weights; '' if nothing does."""
        return self.by_kind.get("weights", "")

    def codec_of(self, kind: str, tensor: TensorSpec) -> str:
        """The codec of a value; '' where it is better sent as it is."""
        if self.is_none:
            return ""
        text = LOSSLESS.get(tensor.dtype) or self.by_kind.get(kind, "")
        if not text or kind == "token" or tensor.bytes < LEAST or codec(text).refusal(tensor):
            return ""
        return text if codec(text).packed(tensor).bytes < tensor.bytes else ""

    def ratio(self, kind: str) -> float:
        """How many bytes travel for each byte of a large value in float32."""
        from fxpipe.plan.spec import TensorSpec

        example = TensorSpec((256, 1024), (1024, 1), "float32")
        text = self.codec_of(kind, example)
        return codec(text).packed(example).bytes / example.bytes if text else 1.0


NONE = Encoding()
AUTO = Encoding(is_auto=True)
HARMLESS = ("int8",)
"""What `auto` may take (benchmarks/accuracy)."""
