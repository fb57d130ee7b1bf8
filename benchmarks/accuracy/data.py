"""Real data that everybody has: scikit-learn's digits, and the source of Python's own standard library.

Everything is read in sorted order and split by a fixed seed, so that one Python version always gives the same tensors.
"""

from __future__ import annotations

import re
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor

SPLIT_SEED = 0

COPIES = 4  # of every digit, each with a shift and noise of its own
NOISE = 0.2  # standard deviation; full ink is 1
MEAN, DEVIATION = 0.3, 0.4  # of the pixels, taken out for the networks' sake

PACKAGES = ("asyncio", "email", "multiprocessing", "unittest", "xml")
VOCABULARY = 1024  # hashed words; 0 fills up short samples
LINES = 3  # of a sample
WORDS = 12  # of a sample, at most

CONTEXT = 32  # bytes of a GPT's sample
HELD_OUT = 512  # images or lines
HELD_WINDOWS = 256


@dataclass(frozen=True)
class Data:
    """Training and held-out samples, inputs and targets apart."""

    inputs: Tensor
    targets: Tensor
    held_inputs: Tensor
    held_targets: Tensor


def digits() -> Data:
    """Images [n, 1, 8, 8], moved by up to a pixel and under noise: otherwise all methods classify nearly all right."""
    found = load_digits()
    images = torch.from_numpy(found.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(found.target).long()
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    order = torch.randperm(len(labels), generator=generator)
    held, kept = order[:HELD_OUT], order[HELD_OUT:].repeat(COPIES)
    return Data(_worsened(images[kept], generator), labels[kept], _worsened(images[held], generator), labels[held])


def lines() -> Data:
    """Hashed words [n, WORDS] of some lines of source, and the number of the package they are from.

    Lines that stand in several packages are left out, others count once: no line is on both sides of the split.
    """
    packages: dict[str, set[int]] = {}
    files = [(label, _lines(file)) for label, package in enumerate(PACKAGES) for file in _sources(package)]
    for label, found in files:
        for line in found:
            packages.setdefault(line, set()).add(label)
    inputs, targets = [], []
    for label, found in files:
        new = [line for line in found if packages.pop(line, set()) == {label}]
        for start in range(0, len(new) - LINES + 1, LINES):
            words = re.findall(r"[^\W\d]\w+", " ".join(new[start : start + LINES]))[:WORDS]
            inputs.append([_token(word) for word in words] + [0] * (WORDS - len(words)))
            targets.append(label)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(SPLIT_SEED))
    x, y = torch.tensor(inputs)[order], torch.tensor(targets)[order]
    return Data(x[HELD_OUT:], y[HELD_OUT:], x[:HELD_OUT], y[:HELD_OUT])


def windows() -> Data:
    """CONTEXT bytes of a top-level module each, and the same windows one byte later; every tenth file is held out."""
    files = sorted(_library().glob("*.py"))
    held = _windows(files[::10])
    kept = _windows([file for number, file in enumerate(files) if number % 10])
    chosen = held[torch.randperm(len(held), generator=torch.Generator().manual_seed(SPLIT_SEED))[:HELD_WINDOWS]]
    return Data(kept[:, :-1], kept[:, 1:], chosen[:, :-1], chosen[:, 1:])


def _worsened(images: Tensor, generator: torch.Generator) -> Tensor:
    moved = torch.stack(
        [image.roll(tuple(torch.randint(-1, 2, (2,), generator=generator).tolist()), (1, 2)) for image in images]
    )
    return (moved + NOISE * torch.randn(moved.shape, generator=generator) - MEAN) / DEVIATION


def _token(word: str) -> int:
    return 1 + zlib.crc32(word.encode()) % (VOCABULARY - 1)


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _sources(package: str) -> list[Path]:
    """A package's files without its tests, which some Python versions keep elsewhere."""
    root = _library() / package
    return [file for file in sorted(root.rglob("*.py")) if not {"test", "tests"} & set(file.relative_to(root).parts)]


def _lines(file: Path) -> list[str]:
    """A file's lines with a word in them, without their indentation."""
    text = file.read_text(encoding="utf-8", errors="replace")
    return [line.strip() for line in text.splitlines() if re.search(r"[^\W\d]\w", line)]


def _windows(files: list[Path]) -> Tensor:
    text = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    return text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
