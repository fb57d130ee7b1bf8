"""`--device mps`: what such a device lacks is refused, and its generator is the run's. `tests/law` trains on a device
that is pretended and lacks the same (`device=narrow`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from commands import fxpipe
from torch import Tensor, nn

from fxpipe.errors import BatchError, CaptureError, RunError
from fxpipe.random_state import seed_torch, torch_state, torch_state_kept
from fxpipe.runtime.process.device import own_device
from fxpipe.task import batch
from fxpipe.tracing import joint
from fxpipe.tracing.capture import capture

MODEL = Path(__file__).parents[2] / "examples" / "gpt.py"


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """The CPU's generator in the place of MPS's: torch is built without it here."""
    device = torch.Generator()
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for name, does in {
        "manual_seed": device.manual_seed,
        "get_rng_state": device.get_state,
        "set_rng_state": device.set_state,
        "is_available": lambda: True,
    }.items():
        monkeypatch.setattr(torch.mps, name, does)
    return device


def test_its_generator_is_seeded_and_kept(generator: torch.Generator) -> None:
    seed_torch(3, "mps")
    first = torch.rand(2, generator=generator)
    seed_torch(3)
    with torch_state_kept():
        assert torch.rand(2, generator=generator).equal(first)
        before = torch_state()
    assert torch.rand(2, generator=generator).equal(first)
    assert before.device is not None
    seed_torch(4, "cpu")
    assert not torch.rand(2, generator=generator).equal(first)


@pytest.mark.usefixtures("generator")
def test_doctor_lists_it() -> None:
    assert any(line.startswith("mps (") for line in fxpipe("doctor", "--json").json["devices"])


def test_a_machine_without_it(tmp_path: Path) -> None:
    result = fxpipe("compile", MODEL, "-n", 2, "--device", "mps", "-o", tmp_path / "build")
    assert result.code == 1
    assert "torch sees no MPS device" in result.err
    with pytest.raises(RunError, match="the build is for MPS, but torch sees no MPS device"):
        own_device("mps")


def test_float64_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "is_here", lambda kind: True)
    model = nn.Linear(2, 2)
    model.register_buffer("rate", torch.ones(1, dtype=torch.float64))
    with pytest.raises(BatchError, match=r"rate, batch\['x'\]: numbers of 64 bits .* which MPS devices do not have"):
        batch.to_device("mps", model, {"x": torch.ones(2, 2, dtype=torch.float64), "y": torch.ones(2)})


def test_float64_in_the_step_is_refused_at_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).double().mean().float()

    monkeypatch.setattr(joint, "WITHOUT_FLOAT64", {"cpu"})
    with pytest.raises(CaptureError, match="which CPU devices do not have") as refused:
        capture(nn.Linear(2, 2), loss, torch.ones(2, 2))
    assert "test_mps.py" in str(refused.value.where)
