"""What a run says of waits for other devices; and where its hosts wait for a device."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_runs import CUT, MARKS, MICROBATCHES, NET, WIRES, compiled, results, run_over

pytestmark = MARKS
SLEEPY = """
from fxpipe.runtime.worker.executor import Executor


def sleep(executor, *given):
    if executor.worker == 0:
        torch.cuda._sleep(100_000_000)  # about 50 ms


before(Executor, "_run_forward", sleep)
"""


def test_the_same_waits_over_all_wires(tmp_path: Path) -> None:
    """Worker 1 has little to do. Over peer memory its host goes on, and its device waits."""
    compiled(tmp_path, NET + SLEEPY, *MICROBATCHES, *CUT)
    shares = {}
    for wires in ("gloo", *WIRES):
        first, last = run_over(wires, tmp_path, 2, "--steps", 6, "--out", tmp_path / wires)["workers"]
        assert first["forward_ms"] > 10
        assert last["wait_ms"] > 0.7 * first["forward_ms"], wires
        assert last["busy"] < 0.7, wires
        shares[wires] = last["spent"]["wait"] / last["seconds"]
    assert max(shares.values()) - min(shares.values()) < 0.15, shares


WATCHED = """
import sys
import warnings

from fxpipe.runtime.worker.executor import Executor

FIRST, LAST = 2, 4  # minibatches
STATE = {"on": False}


def file_of(frame):
    return Path(frame.f_code.co_filename).name


def note(text):
    with open(f"{__file__}.{rank()}", "a") as file:
        print(text, file=file)


def show(message, category, filename, lineno, file=None, line=None):
    if "synchroniz" in str(message):
        note(Path(filename).name)


def watch(executor, action, *given):
    on = FIRST <= action.minibatch <= LAST
    if on != STATE["on"]:
        STATE["on"] = on
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn" if on else "default")


def of_event(event):
    if STATE["on"]:
        note("event " + file_of(sys._getframe(2)))


before(Executor, "execute", watch)
before(torch.cuda.Event, "synchronize", of_event)
"""
LOOP = """
import sys

sys.path.insert(0, {folder!r})
import fxpipe
from fxpipe.runtime.process.ends import end_process
from model import optimizer, train_data

with fxpipe.join({folder!r} + "/build", optimizer=optimizer) as pipeline:
    for _, batch in zip(range(8), train_data()):
        pipeline.step(batch)
    pipeline.flush()
end_process(0)
"""
LOSS = {"metrics.py", "step_loss.py", "device_copies.py", "minibatch_notes.py"}
"""Of the process that gets a loss of another worker, and of one that sends it."""
EVENTS = {f"event {name}" for name in ("device_copies.py", "nccl_lines.py", "peer_memory.py", "watch.py")}
"""Until a message is made, or a loss is on the CPU; how far a host is ahead."""


@pytest.mark.parametrize("wires", WIRES)
@pytest.mark.parametrize(
    ("ranks", "options", "places"),
    [
        pytest.param(2, (*MICROBATCHES, *CUT), LOSS, id="1f1b"),
        pytest.param(2, ("--schedule", "async", *CUT), LOSS, id="async"),
        pytest.param(2, ("-n", 1, "--dp", 2, *MICROBATCHES), LOSS | {"between_replicas.py"}, id="replicas"),
        pytest.param(2, (*MICROBATCHES, *CUT), LOSS, id="own loop"),
    ],
)
def test_where_a_host_waits(
    tmp_path: Path, wires: str, ranks: int, options: tuple[object, ...], places: set[str],
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """In steps 3 to 5, all processes together. A new place is a host that waits in every step."""
    compiled(tmp_path, NET + WATCHED, *options)
    if "own loop" in request.node.callspec.id:
        (tmp_path / "loop.py").write_text(LOOP.format(folder=str(tmp_path)))
        results(wires, ranks, tmp_path / "loop.py")
    else:
        run_over(wires, tmp_path, ranks, "--steps", 8, "--out", tmp_path / "out")
    found = {line for path in tmp_path.glob("model.py.*") for line in path.read_text().splitlines()}
    assert found <= places | EVENTS
