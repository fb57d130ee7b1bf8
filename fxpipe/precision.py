"""On which flags the bits of kernels depend: TF32 and the like, deterministic algorithms; of torch and of CUDA."""

from __future__ import annotations

import os
from operator import attrgetter

import torch

_IEEE = "ieee"  # full precision; 'none' is the same

_DEFAULTS: dict[str, dict[str, str]] = {
    "cpu": {"backends.mkldnn.matmul.fp32_precision": _IEEE, "backends.mkldnn.conv.fp32_precision": _IEEE},
    "cuda": {
        "backends.cuda.matmul.fp32_precision": _IEEE,
        "backends.cuda.matmul.allow_fp16_reduced_precision_reduction": "True",
        "backends.cuda.matmul.allow_bf16_reduced_precision_reduction": "True",
        "backends.cuda.matmul.allow_fp16_accumulation": "False",
        "backends.cudnn.enabled": "True",
        "backends.cudnn.conv.fp32_precision": "tf32",
        "backends.cudnn.rnn.fp32_precision": "tf32",
        "backends.cudnn.deterministic": "False",
        "backends.cudnn.benchmark": "False",
    },
}
_OF_CUDA = ("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")
"""Environment variables of its libraries, each unlike its default where it is set."""

_OF_ALL = {"are_deterministic_algorithms_enabled": "False"}


def precision_flags(device: str) -> dict[str, str]:
    """The flags unlike their defaults, by name, that kernels on 'cpu' or 'cuda' look at."""
    flags = {name: os.environ[name] for name in _OF_CUDA if device == "cuda" and name in os.environ}
    for name, default in {**_DEFAULTS.get(device, {}), **_OF_ALL}.items():
        value = attrgetter(name)(torch)
        text = str(value() if callable(value) else value).replace("none", _IEEE)
        if text != default:
            flags[name] = text
    return flags


def cudnn_takes_tf32() -> bool:
    """Whether layers of cuDNN may."""
    return any(
        attrgetter(name)(torch.backends.cudnn) == "tf32" for name in ("conv.fp32_precision", "rnn.fp32_precision")
    )


def precision_text(flags: dict[str, str]) -> str:
    """Flags for a message."""
    texts = (f"{name}={value}" if name in _OF_CUDA else f"torch.{name} = {value}" for name, value in flags.items())
    return ", ".join(texts) or "torch's defaults"
