"""A measured timeline as a file in Chrome's Trace Event format, for Perfetto; it can be read back even if cut off.

The file is one JSON object with one event per line, so that a truncated file can be read line by line:

    {"traceEvents": [
    {"ph":"M","name":"process_name","pid":0,"tid":0,"args":{"name":"worker 0"}},
    {"ph":"X","cat":"F","name":"F3","pid":0,"tid":0,"ts":12.345,"dur":3.200,"args":{"minibatch":3,"microbatch":0}},
    {"ph":"s","cat":"minibatch","name":"minibatch 3","id":3,"pid":0,"tid":0,"ts":12.400},
    …
    ], "displayTimeUnit": "ms", "otherData": {"fxpipe": "0.1.0", …}}

`pid` is the worker's rank, and 65536 more for each replica before its own; where ranks have several workers, `tid` is
the worker, else 0. Times are microseconds from where training began, with three decimals. An event's `cat` is its kind;
a worker's events nest: what is inside another counts as its own kind alone. Minibatches count from 0.

`writer` writes it, `reader` reads it, and `nesting` flattens nested events. No torch.
"""

from __future__ import annotations

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
