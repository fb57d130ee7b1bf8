"""Decisions of callbacks, compared between neighbours."""

from __future__ import annotations

import pytest
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.runtime.process.minibatch_notes import Decision, Decisions
from fxpipe.runtime.wires.addresses import ProcessLine


class Notes:
    """A worker's end of a transport of which only notes are used."""

    def __init__(self, under_way: dict[object, Tensor], worker: int) -> None:
        self.under_way, self.worker = under_way, worker

    def expect_note(self, source: int, what: object, count: int) -> None:
        pass

    def send_note(self, to: int, what: object, numbers: Tensor) -> None:
        self.under_way[self.worker, to, what] = numbers

    def recv_note(self, source: int, what: object) -> Tensor:
        return self.under_way.pop((source, self.worker, what))


def compared(*decided: Decision) -> None:
    """All workers decide, the last one first."""
    under_way: dict[object, Tensor] = {}
    for worker in reversed(range(len(decided))):
        line = ProcessLine(tuple(range(len(decided))), worker)
        of_worker = Decisions(line, Notes(under_way, worker))  # type: ignore[arg-type]
        of_worker.expect("on_step", 7)
        of_worker.compare("on_step", 7, decided[worker])
    assert not under_way


@pytest.mark.parametrize(
    "decision", [Decision(), Decision(ends=True), Decision(saves=True), Decision(rates=(0.1, 0.2)), Decision(rates=())]
)
def test_who_decides_alike_goes_on(decision: Decision) -> None:
    compared(decision, decision, decision)
    compared(decision)


@pytest.mark.parametrize(
    ("here", "there", "said"),
    [
        (
            Decision(ends=True),
            Decision(),
            "on_step() on worker 0 ends the run after step 7, and on worker 1 it does",
        ),
        (Decision(), Decision(saves=True), "worker 0 does nothing after step 7, and on worker 1 it saves it"),
        (Decision(rates=(0.1,)), Decision(rates=(0.2,)), "worker 0 sets other learning rates after step 7"),
        (Decision(rates=(0.1,)), Decision(rates=(0.1, 0.1)), "sets other learning rates"),
    ],
)
def test_who_decides_otherwise_is_named(here: Decision, there: Decision, said: str) -> None:
    with pytest.raises(RunError) as raised:
        compared(here, there, there)
    assert said in str(raised.value)
