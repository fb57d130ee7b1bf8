"""What no torch call shows is refused in the thread that traces, and only there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fxpipe.errors import CaptureError
from fxpipe.random_state import torch_state_kept
from fxpipe.tracing.unseen import refused

OWN = torch.default_generator


def pack() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        torch.ones(1, requires_grad=True).exp()


CALLS: dict[str, Callable[[], object]] = {
    "calls torch.manual_seed": lambda: torch.manual_seed(3),
    "calls torch.default_generator.manual_seed": lambda: torch.default_generator.manual_seed(4),
    "calls GradScaler.scale": lambda: torch.amp.GradScaler("cpu").scale(torch.ones(1)),
    "packs what its forward saves": pack,
}


@pytest.fixture
def other() -> Iterator[Callable[[Callable[[], object]], object]]:
    """Calls a function in a thread of the user's."""
    with torch_state_kept(), ThreadPoolExecutor(1) as threads:
        yield lambda function: threads.submit(function).result()


@pytest.mark.parametrize(("said", "call"), CALLS.items())
def test_another_thread_may(said: str, call: Callable[[], object], other: Callable[..., object]) -> None:
    with refused():
        other(call)
        other(lambda: torch.rand(2))
    with pytest.raises(CaptureError, match=said), refused():
        call()


def test_another_threads_seed_counts(other: Callable[..., object]) -> None:
    with refused():
        other(lambda: torch.default_generator.manual_seed(5))
        assert OWN.initial_seed() == 5


def test_another_thread_that_draws_hides_no_seeding(other: Callable[..., object]) -> None:
    other(lambda: None)  # it lives
    with refused():
        other(lambda: torch.rand(2))
    for seed in (OWN.initial_seed(), 6):
        with pytest.raises(CaptureError, match=r"calls a method of torch\.default_generator"), refused():
            OWN.manual_seed(seed)
