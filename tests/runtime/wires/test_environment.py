"""Which of several processes this one is: by environment variables that may be wrong."""

from __future__ import annotations

import pytest

from fxpipe.errors import RunError
from fxpipe.runtime.wires.meeting import has_place, place

RIGHT = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
}


def put(monkeypatch: pytest.MonkeyPatch, **changes: str | None) -> None:
    for name, value in {**RIGHT, **changes}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)


def test_torchrun_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch)
    assert has_place()
    assert place() == (1, 2)
    put(monkeypatch, LOCAL_RANK=None, LOCAL_WORLD_SIZE=None)
    assert has_place()
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        put(monkeypatch, **{name: None})
        assert not has_place()


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("RANK", "x", "from 0 to 1"),
        ("RANK", "", "from 0 to 1"),
        ("RANK", "2", "from 0 to 1"),
        ("RANK", "-1", "from 0 to 1"),
        ("WORLD_SIZE", "0", "from 1"),
        ("WORLD_SIZE", "two", "from 1"),
        ("WORLD_SIZE", "9" * 5000, "from 1"),
        ("MASTER_PORT", "abc", "from 1 to 65535"),
        ("MASTER_PORT", "0", "from 1 to 65535"),
        ("MASTER_PORT", "99999", "from 1 to 65535"),
        ("MASTER_ADDR", " ", "a host's name or address"),
        ("LOCAL_RANK", "2", "from 0 to 1"),
        ("LOCAL_WORLD_SIZE", "0", "from 1 to 2"),
    ],
)
def test_a_value_that_cannot_be_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, wanted: str) -> None:
    put(monkeypatch, **{name: value})
    with pytest.raises(RunError, match=f"the environment variable {name} is .*{wanted}") as error:
        has_place()
    assert error.value.hint
