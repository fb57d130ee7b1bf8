"""A measured timeline as a file in Chrome's Trace Event format, for Perfetto, and read back.

The file is one JSON object with one event per line, so that the first minibatches can be read alone:

    {"traceEvents": [
    {"ph":"M","name":"process_name","pid":0,"tid":0,"args":{"name":"worker 0"}},
    {"ph":"X","cat":"F","name":"F3","pid":0,"tid":0,"ts":12.345,"dur":3.200,"bind_id":3,"flow_out":true,"args":{…}},
    {"ph":"X","cat":"send","name":"send a","pid":0,"tid":0,"ts":15.1,"dur":0.1,"args":{"minibatch":3,"microbatch":0}},
    …
    ], "displayTimeUnit": "ms", "otherData": {"fxpipe": "0.1.0", …}}

`pid` is the worker's rank, and 65536 more for each replica before its own; where ranks have several workers, `tid` is
the worker, else 0. Times are microseconds from where training began, with three decimals. An event's `cat` is its kind;
a worker's events nest: what is inside another counts as its own kind alone. Minibatches count from 0. Actions of one
microbatch have one `bind_id`.

`writer` writes it, `reader` reads it, and `nesting` flattens nested events. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

Kind = Literal["F", "B", "W", "predict", "update", "send", "receive", "wait", "data", "save", "evaluate"]
"""The kind of an event: an action's phase, or what happens inside and between actions."""

KINDS: tuple[Kind, ...] = get_args(Kind)

OF_TRAINING: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind != "evaluate")
"""The kinds whose times add up to that of a run, which does not include evaluations."""

ACTIONS: tuple[Kind, ...] = ("F", "B", "W")
"""The kinds of events that contain others."""

HEAD = '{"traceEvents": ['
"""The first line."""

REPLICA = 1 << 16
"""How far the numbers of processes of one replica are from those of the next: more than any run has."""

TAIL = '], "displayTimeUnit"'
"""The beginning of the last line."""


class Event(NamedTuple):  # a tuple: a run has hundreds of thousands
    """What a worker did from one nanosecond to another, counted from where training began."""

    worker: int
    kind: str
    name: str
    minibatch: int
    microbatch: int
    begin: int
    end: int


def row_of(worker: int, placement: Sequence[int] = (), replica: int = 0) -> tuple[int, int]:
    """The process and the row in it that show a replica of a worker; `worker_of` is the way back of the first one's."""
    process, row = (placement[worker], worker) if placement else (worker, 0)
    return process + replica * REPLICA, row


def worker_of(process: int, row: int) -> int:
    """The worker of a row: worker 0 is always in process 0, and no other's row is 0 where there is
    one."""
    return row or process
