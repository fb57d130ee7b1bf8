"""Flags of torch on which the bits of its kernels depend: TF32 and the like, and deterministic algorithms."""

from __future__ import annotations

from operator import attrgetter

import torch

_IEEE = "ieee"  # full precision; 'none' is the same

_DEFAULTS: dict[str, dict[str, str]] = {
    "cpu": {"backends.mkldnn.matmul.fp32_precision": _IEEE, "backends.mkldnn.conv.fp32_precision": _IEEE},
    "cuda": {
        "backends.cuda.matmul.fp32_precision": _IEEE,
        "backends.cuda.matmul.allow_fp16_reduced_precision_reduction": "True",
        "backends.cuda.matmul.allow_bf16_reduced_precision_reduction": "True",
        "backends.cudnn.conv.fp32_precision": "tf32",
        "backends.cudnn.rnn.fp32_precision": "tf32",
        "backends.cudnn.deterministic": "False",
        "backends.cudnn.benchmark": "False",
    },
}
_OF_ALL = {"are_deterministic_algorithms_enabled": "False"}


def precision_flags(device: str) -> dict[str, str]:
    """The flags of torch unlike its defaults, by name, that kernels on 'cpu' or 'cuda' look at."""
    found = {}
    for name, default in {**_DEFAULTS.get(device, {}), **_OF_ALL}.items():
        value = attrgetter(name)(torch)
        text = str(value() if callable(value) else value).replace("none", _IEEE)
        if text != default:
            found[name] = text
    return found


def cudnn_takes_tf32() -> bool:
    """Whether layers of cuDNN may."""
    return any(
        attrgetter(name)(torch.backends.cudnn) == "tf32" for name in ("conv.fp32_precision", "rnn.fp32_precision")
    )


def precision_text(flags: dict[str, str]) -> str:
    """Flags for a message."""
    return ", ".join(f"torch.{name} = {value}" for name, value in flags.items()) or "torch's defaults"
