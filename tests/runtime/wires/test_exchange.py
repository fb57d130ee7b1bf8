"""Texts that workers exchange: there for all, once all are there, until they are forgotten."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch.distributed as dist

from fxpipe.runtime.wires import exchange as exchanging
from fxpipe.runtime.wires.exchange import Exchange, FolderExchange, StoreExchange


@pytest.fixture(params=["own", "folder", "group's"])
def exchange(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Exchange:
    store = dist.HashStore()
    monkeypatch.setattr(exchanging, "default_store", lambda: store)
    if request.param == "folder":
        (tmp_path / "texts").mkdir()
        return FolderExchange(tmp_path / "texts")
    return StoreExchange(dist.HashStore()) if request.param == "own" else StoreExchange()


def test_until_they_are_forgotten(exchange: Exchange) -> None:
    exchange.set("run/5/0", "früh")
    assert exchange.get(["run/5/0", "run/5/1"]) is None
    exchange.set("run/5/1", "")
    exchange.set("run/5/0", "spät")
    assert exchange.get(["run/5/1", "run/5/0"]) == ["", "spät"]
    exchange.forget(["run/5/0"])
    assert exchange.get(["run/5/0"]) is None
    assert exchange.get(["run/5/1"]) == [""]


def test_a_full_disk_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exchanging, "RETRY", 0.0)
    failures, write = [errno.ENOSPC, errno.EDQUOT], Path.write_text

    def full(path: Path, text: str) -> int:
        if failures:
            raise OSError(failures.pop(), "No space left on device")
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", full)
    exchange = FolderExchange(tmp_path)
    exchange.set("run/1", "text")
    assert exchange.get(["run/1"]) == ["text"]
    assert capsys.readouterr().err.count(" is full: the run waits until there is space") == 1
    failures.append(errno.EIO)
    with pytest.raises(OSError, match="No space"):
        exchange.set("run/2", "text")


def test_a_folder_of_texts_keeps_no_forgotten_one(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    one, other = FolderExchange(tmp_path / "texts"), FolderExchange(tmp_path / "texts")
    for number in range(20):
        one.set(f"run/{number}", "text")
        assert other.get([f"run/{number}"]) == ["text"]
        one.forget([f"run/{number}"])
    assert list((tmp_path / "texts").iterdir()) == []
