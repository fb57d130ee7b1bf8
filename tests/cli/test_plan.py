"""`fxpipe plan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import fxpipe


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Forward is heavy at the end, backward at the beginning: shared cuts cannot balance both."""
    units = [{"name": f"u{i}", "forward_ms": i + 1, "backward_ms": 4 - i} for i in range(4)]
    units += [{"name": "head", "forward_ms": 10, "backward_ms": 0}]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"units": units}))
    return path


def test_json_compares_the_modes(profile: Path) -> None:
    found = fxpipe("plan", profile, "-n", "2", "--no-communication", "--json").json
    assert set(found) == {"ideal_ms", "same", "bidirectional"}
    assert found["ideal_ms"] == 15.0
    assert found["same"]["forward_cuts"] == found["same"]["backward_cuts"] == [3]
    assert found["same"]["bottleneck_ms"] == 15.0
    assert found["bidirectional"]["efficiency"] == pytest.approx(1.0)


def test_table_and_speeds(profile: Path) -> None:
    result = fxpipe("plan", profile, "-n", "3", "--speed", "1,1,0.5", "--no-communication")
    assert result.code == 0
    assert "bidirectional" in result.out
    assert "ideal          12.00 ms · 5 units" in result.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "communication is not planned yet"),
        (("--no-communication", "--speed", "1"), "gives 1 speeds for 2 workers"),
        (("--no-communication", "--speed", "1,x"), "numbers with commas"),
    ],
)
def test_requests_that_make_no_sense(profile: Path, options: tuple[str, ...], message: str) -> None:
    result = fxpipe("plan", profile, *options)
    assert result.code == 2
    assert message in result.err
