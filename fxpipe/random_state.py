"""The process's random generators: torch's, Python's, and numpy's if it is loaded."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class RandomState(NamedTuple):
    """All generators' states: `device` is that of CUDA's current device, or of MPS, None if neither is in use; `numpy`
    likewise."""

    cpu: torch.Tensor
    device: torch.Tensor | None
    python: Any
    numpy: Any


class TorchState(NamedTuple):
    """The states of torch's generators, as in `RandomState`."""

    cpu: torch.Tensor
    device: torch.Tensor | None


def device_in_use() -> Any:
    """Torch's module of the device in use that has a generator of its own: CUDA, or MPS; None if there is none."""
    if torch.cuda.is_initialized():
        return torch.cuda
    return torch.mps if torch.backends.mps.is_available() else None


def torch_state() -> TorchState:
    """The state now."""
    device = device_in_use()
    return TorchState(torch.get_rng_state(), None if device is None else device.get_rng_state())


def alike(one: TorchState, other: TorchState) -> bool:
    """Whether nothing was drawn between two states."""
    if one.device is not None and other.device is not None and not torch.equal(one.device, other.device):
        return False
    return torch.equal(one.cpu, other.cpu)


def set_torch_state(state: TorchState) -> None:
    """Restore a state; a device that was not in use then is left unchanged."""
    torch.set_rng_state(state.cpu)
    if state.device is not None:
        device_in_use().set_rng_state(state.device)


def random_state() -> RandomState:
    """The state now."""
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    return RandomState(*torch_state(), random.getstate(), numpy)


def set_random_state(state: RandomState) -> None:
    """Restore a state; generators that were not in use then are left unchanged."""
    set_torch_state(TorchState(state.cpu, state.device))
    random.setstate(state.python)
    if state.numpy is not None:
        sys.modules["numpy"].random.set_state(state.numpy)


@contextmanager
def torch_state_kept() -> Iterator[None]:
    """Afterwards torch's generators are as they were before."""
    before = torch_state()
    try:
        yield
    finally:
        set_torch_state(before)


@contextmanager
def torch_seeded(seed: int) -> Iterator[None]:
    """Inside, torch's generators begin with a seed; afterwards they continue as if nothing had been drawn."""
    with torch_state_kept():
        seed_torch(seed)
        yield


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Afterwards all generators are as they were before."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


def seed_everything(seed: int) -> None:
    """Seed torch, `random` and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def seed_of(*place: object) -> int:
    """A seed for a place, such as a run's seed, a worker and a step: the same in every process and every run."""
    text = "/".join(map(str, place))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_torch(seed: int, device_type: str | None = None) -> None:
    """Seed torch's generator, and the generator of the current device of this type, in microseconds.

    Args:
        device_type: None for the device in use.
    """
    torch.default_generator.manual_seed(seed)
    device = device_in_use() if device_type is None else {"cuda": torch.cuda, "mps": torch.mps}.get(device_type)
    if device is not None:
        device.manual_seed(seed)


def seed_generators(seed: int, device_type: str = "cpu") -> None:
    """As `seed_everything`, but only for devices in use: in microseconds."""
    seed_torch(seed, device_type)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def drew_without_torch(before: RandomState) -> bool:
    """Whether Python's or numpy's generator has been used since."""
    now = random_state()
    if now.python != before.python:
        return True
    if before.numpy is None:
        return False
    (_, key, *position), (_, key_before, *rest_before) = now.numpy, before.numpy
    return position != rest_before or bool((key != key_before).any())
