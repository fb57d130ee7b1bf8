"""The notebook runs in a kernel; its last run is interrupted and leaves no process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import processes

NOTEBOOK = Path(__file__).parents[1] / "examples" / "two_cards.ipynb"
LONG = "out-two-cards-long"


def outputs(cell: Any) -> str:
    return "".join(output.get("text", "") or output.get("ename", "") for output in cell.outputs)


def interrupts(interrupt: Callable[[], None], metrics: Path, seen: list[int]) -> None:
    """Interrupt the kernel once the long run has trained some steps."""
    until = time.monotonic() + 120
    while time.monotonic() < until and not (metrics.is_file() and metrics.read_text().count("\n") > 3):
        time.sleep(0.05)
    seen.extend(processes(LONG))
    interrupt()


@pytest.mark.slow
@pytest.mark.multiproc
def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    import asyncio

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells), "strip the outputs"
    monkeypatch.setenv("PYTHONPATH", f"{NOTEBOOK.parent}:{NOTEBOOK.parents[1]}")
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it, ipykernel does not show what other processes write
    seen: list[int] = []
    client = nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}})

    def begin(cell: Any, cell_index: int) -> None:
        if LONG.removeprefix("out-two-cards") in cell.source:
            loop = asyncio.get_running_loop()

            def interrupt() -> None:
                asyncio.run_coroutine_threadsafe(client.km.interrupt_kernel(), loop).result(10)

            metrics = tmp_path / LONG / "metrics.jsonl"
            threading.Thread(target=interrupts, args=(interrupt, metrics, seen), daemon=True).start()

    client.on_cell_execute = begin
    client.execute()
    train, timeline, loaded, long, last = [cell for cell in notebook.cells if cell.cell_type == "code"][1:]
    assert "loss" in outputs(train)
    assert "step 1/30" in outputs(train), "progress"
    assert "IFrame" in str(timeline.outputs)
    assert "timeline" in (tmp_path / "out-two-cards" / "report.html").read_text(encoding="utf-8")
    assert "the same loss: True" in outputs(loaded)
    assert "KeyboardInterrupt" in outputs(long)
    assert "the kernel goes on" in outputs(last)
    assert len(seen) >= 2, "workers were there"
    until = time.monotonic() + 10
    while left := processes(LONG):
        assert time.monotonic() < until, left
        time.sleep(0.05)
