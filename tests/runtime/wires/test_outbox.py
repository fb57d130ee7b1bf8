"""What leaves an outbox, in which pieces and in which order; and that what is not asked for stops nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpipe.plan.urgency import CHUNK, SAVED, WEIGHTS
from fxpipe.runtime.wires.outbox import OPENING, Outbox, Queued, pieces


@pytest.mark.parametrize("size", [0, 1, OPENING, OPENING + 1, CHUNK, CHUNK + OPENING, CHUNK + OPENING + 1, 5 * CHUNK])
def test_the_pieces_are_the_message(size: int) -> None:
    found = pieces(size)
    assert [i for piece in found for i in range(piece.start, piece.stop)] == list(range(size))
    assert found[0].stop <= OPENING
    assert all(0 < piece.stop - piece.start <= CHUNK for piece in found[1:])


class Line:
    """What a receiver would get; each send leaves when the receiver asks for it, at once where it has asked before."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.begun: list[tuple[str, int]] = []
        self.asked: set[str] = set()

    def sender(self, name: str) -> Callable[[Tensor], Any]:
        def send(data: Tensor) -> Work:
            with self.lock:
                self.begun.append((name, len(data)))
                self.lock.notify_all()
            return Work(self, name)

        return send

    def ask(self, *names: str) -> None:
        with self.lock:
            self.asked.update(names)
            self.lock.notify_all()

    def until(self, holds: Callable[[], bool]) -> None:
        with self.lock:
            assert self.lock.wait_for(holds, 10)


class Work:
    """Of one send."""

    def __init__(self, line: Line, name: str) -> None:
        self.line, self.name = line, name

    def wait(self) -> None:
        self.line.until(lambda: self.name in self.line.asked)


def letter(line: Line, name: str, turn: int, chunks: int) -> Queued:
    return Queued(turn, torch.zeros(OPENING + chunks * CHUNK, dtype=torch.uint8), line.sender(name))


def test_what_is_not_asked_for_stops_nothing_else() -> None:
    line, outbox = Line(), Outbox()
    saved, weights = letter(line, "saved", SAVED, 2), letter(line, "weights", WEIGHTS, 2)
    outbox.put("a", saved)
    outbox.put("b", weights)
    line.ask("weights")
    weights.wait()
    assert line.begun.count(("weights", CHUNK)) == 2
    assert line.begun.count(("saved", CHUNK)) == 0
    line.ask("saved")
    saved.wait()
    assert line.begun[-2:] == [("saved", CHUNK)] * 2


def test_saved_values_pass_weights_and_a_channel_keeps_its_order() -> None:
    line, outbox = Line(), Outbox()
    gate, first = threading.Event(), threading.Event()

    def slow(data: Tensor) -> Any:
        work = line.sender("weights")(data)
        if len(data) == CHUNK and not first.is_set():
            first.set()
            assert gate.wait(10)
        return work

    line.ask("weights", "saved", "more")
    weights = letter(line, "weights", WEIGHTS, 4)
    weights.send = slow
    outbox.put("b", weights)
    assert first.wait(10)  # its first chunk is on its way
    saved = [letter(line, name, SAVED, 2) for name in ("saved", "more")]
    for message in saved:
        outbox.put("a", message)
    line.until(lambda: ("saved", OPENING) in line.begun)
    while len(outbox._turns._places) < 2:
        time.sleep(1e-3)
    gate.set()
    for message in (weights, *saved):
        message.wait()
    chunks = [name for name, size in line.begun if size == CHUNK]
    assert chunks[:3] == ["weights", "saved", "saved"]
    assert [name for name in chunks if name != "weights"] == ["saved"] * 2 + ["more"] * 2
    assert chunks.count("weights") == 4


def test_a_lost_connection_is_told_to_who_waits() -> None:
    def broken(data: Tensor) -> Any:
        raise RuntimeError("Connection reset by peer")

    message = Queued(WEIGHTS, torch.zeros(9, dtype=torch.uint8), broken)
    outbox = Outbox()
    outbox.put("a", message)
    with pytest.raises(RuntimeError, match="reset by peer"):
        message.wait()
