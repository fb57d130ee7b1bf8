"""The codec of each kind of edge, of weight copies and of outer steps, as `--codec` says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fxpipe.codecs import CODECS, codec
from fxpipe.codecs.accuracy import HARMLESS
from fxpipe.codecs.carry_over import CarryOver
from fxpipe.codecs.codec import KINDS, OUTER
from fxpipe.errors import CodecError, near
from fxpipe.plan.spec import TensorSpec

_WORDS = NONE, AUTO = "none", "auto"
_NAMED = (*KINDS, OUTER)
_LOSSLESS = {"bool": "bits", "int64": "int32"}
_MILDER = {"int4": {"gradient": "int8", "weights": "int8"}}
"""If a codec is given for all kinds, these kinds get another: TAH-Quant's gradients need more bits than activations."""


@dataclass(frozen=True)
class Encoding:
    """A codec for each kind of edge, for copies of weights, and for outer steps.

    Attributes:
        input, activation, saved, gradient, weights: a codec's text; `none` to send values unchanged; '' allows only
            lossless codecs.
        outer: the same for outer steps, for which '' is none.
        auto: the compile chooses the codecs, by the time that they save on the links and cost on the machines.
    """

    LEAST_BYTES: ClassVar[int] = 1024
    """Smaller tensors are sent unchanged: with fewer bytes their messages would not be faster."""

    input: str = ""
    activation: str = ""
    saved: str = ""
    gradient: str = ""
    weights: str = ""
    outer: str = ""
    auto: bool = False

    @classmethod
    def parse(cls, text: str) -> Encoding:
        """Read `--codec`: `none`, `auto`, a codec for all kinds, or `activation=int4,gradient=int8`.

        A codec for all kinds is used for the kinds of edges and the copies of weights that it supports, but with `int4`
        gradients and weights get `int8`. One that is only for outer steps is used for them.
        Codecs of a model file must be registered before.

        Raises:
            CodecError: a kind or a codec does not exist, or they do not fit; lists all problems.
        """
        text = text.strip()
        if text in (NONE, AUTO):
            return cls(auto=text == AUTO)
        if "=" not in text and "," not in text:
            if text.partition(":")[0] not in CODECS:
                raise CodecError(f"there is no codec '{text}'{near(text, [*_WORDS, *CODECS])}", hint=_hint())
            chosen = codec(text)
            kinds = [kind for kind in chosen.kinds if kind != OUTER] or chosen.kinds
            milder = _MILDER.get(chosen.name, {})
            return cls._of({kind: milder.get(kind, chosen.text) for kind in kinds})
        codecs: dict[str, str] = {}
        problems: list[str] = []
        for item in text.split(","):
            kind, equals, name = (part.strip() for part in item.partition("="))
            of_item = _problems(kind, name) if equals else [f"'{item.strip()}' is not KIND=CODEC"]
            if kind in codecs:
                of_item.append(f"{kind} has two codecs")
            problems += of_item
            codecs[kind] = name
        if problems:
            raise CodecError(f"--codec {text}: {'; '.join(problems)}", hint=_hint())
        return cls._of({kind: NONE if name == NONE else codec(name).text for kind, name in codecs.items()})

    @classmethod
    def _of(cls, texts: dict[str, Any]) -> Encoding:
        return cls(**texts)

    @property
    def asks(self) -> bool:
        """Whether any edge or copy is to be packed; if not, every edge is sent unchanged."""
        return self.auto or any(getattr(self, kind) not in ("", NONE) for kind in KINDS)

    @property
    def candidates(self) -> tuple[Encoding, ...]:
        """The encodings that `auto` chooses from, without codecs for weights; only itself without `auto`."""
        return tuple(replace(Encoding.parse(text), weights=NONE) for text in HARMLESS) if self.auto else (self,)

    @property
    def codecs(self) -> tuple[str, ...]:
        """The texts of all codecs that edges may get."""
        if not self.asks:
            return ()
        texts = (getattr(one, kind) for one in self.candidates for kind in KINDS)
        return tuple(dict.fromkeys(text for text in (*texts, *_LOSSLESS.values()) if text not in ("", NONE)))

    @property
    def of_weights(self) -> str:
        """The codec of weight copies; '' if there is none."""
        return "" if self.weights == NONE else self.weights

    @property
    def of_outer(self) -> str:
        """The codec of outer steps; '' if there is none."""
        return "" if self.outer == NONE else self.outer

    @staticmethod
    def carries_over(text: str) -> bool:
        """Whether a text is that of a codec that adds what a message leaves out to the next one."""
        return text not in ("", NONE) and isinstance(codec(text), CarryOver)

    def check_scaled(self) -> None:
        """Refuse a codec that carries over gradients if the loss scale changes, as with float16: scales would be mixed.

        Raises:
            CodecError: the codec of gradients carries over.
        """
        if self.carries_over(self.gradient):
            raise CodecError(
                f"{self.gradient} adds what it left out of one gradient to the next, and with --autocast fp16 the loss "
                "scale may change between them",
                hint="use --autocast bf16, which needs no scale, or --codec gradient=int8, which carries nothing over",
            )

    def ratio(self, kind: str) -> float:
        """How many bytes are sent for each byte of a large float32 value."""
        example = TensorSpec((256, 1024), (1024, 1), "float32")
        text = self.codec_of(kind, example)
        return codec(text).packed(example).bytes / example.bytes if text else 1.0

    def codec_of(self, kind: str, tensor: TensorSpec) -> str:
        """The text of the codec of such an edge; '' to send its value unchanged.

        Values are sent unchanged if they are tokens, have less than 1024 bytes, or no codec saves bytes. Bool and int64
        tensors may get a lossless codec, if any codec is used at all.
        """
        choice = getattr(self, kind) if kind in KINDS else NONE
        if choice == NONE or not self.asks or tensor.bytes < self.LEAST_BYTES:
            return ""
        for text in (choice, _LOSSLESS.get(tensor.dtype, "")):
            if text and _pays(text, tensor):
                return text
        return ""


def _pays(text: str, tensor: TensorSpec) -> bool:
    coder = codec(text)
    return not coder.refusal(tensor) and coder.packed(tensor).bytes < tensor.bytes


def _problems(kind: str, name: str) -> list[str]:
    """What is wrong with one KIND=CODEC."""
    problems = [] if kind in _NAMED else [f"there is no kind of edge '{kind}'{near(kind, _NAMED)}"]
    if name == NONE:
        return problems
    try:
        chosen = codec(name)
    except CodecError as error:
        return [*problems, error.what]
    if kind in _NAMED and kind not in chosen.kinds:
        problems.append(f"{chosen.name} is only for {', '.join(chosen.kinds)}, not for {kind}")
    return problems


def _hint() -> str:
    return f"kinds: {', '.join(_NAMED)}; codecs: {', '.join([NONE, *CODECS])}; for all kinds also {AUTO}"
