"""Which versions of torch are tested, said in one place."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from torch.torch_version import TorchVersion

from fxpipe.tracing.torch_versions import TESTED, standing

ROOT = Path(__file__).parents[2]


def test_the_metadata_allows_the_oldest_that_is_tested() -> None:
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    bound = next(need.removeprefix("torch>=") for need in needs if need.startswith("torch>="))
    assert TESTED[0].startswith(f"{bound}.")


def test_the_constraints_pin_one_that_is_tested() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert next(line.removeprefix("torch==") for line in lines if line.startswith("torch==")) in TESTED


def test_they_are_in_order() -> None:
    assert list(TESTED) == sorted(set(TESTED), key=TorchVersion)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("2.11.0", "yes"),
        ("2.13.0+cpu", "yes"),
        ("2.15.0+cu130", "yes"),
        ("2.10.1", "no: older than 2.11.0, the oldest that fxpipe supports"),
        ("2.11.0a0+git1", "no: older than 2.11.0, the oldest that fxpipe supports"),
        ("2.12.0", "no: between 2.11.0 and 2.13.0, which are tested"),
        ("2.13.1+cpu", "no: between 2.13.0 and 2.15.0, which are tested"),
        ("2.15.0.dev20260901", "no: between 2.13.0 and 2.15.0, which are tested"),
        ("2.15.1", "no: newer than 2.15.0, the newest that is tested"),
        ("2.100.0", "no: newer than 2.15.0, the newest that is tested"),
        ("3.0.0", "no: newer than 2.15.0, the newest that is tested"),
    ],
)
def test_where_a_version_stands(monkeypatch: pytest.MonkeyPatch, version: str, said: str) -> None:
    monkeypatch.setattr("fxpipe.tracing.torch_versions.TESTED", ("2.11.0", "2.13.0", "2.15.0"))
    assert standing(TorchVersion(version)) == said
