"""A measured timeline as a file: Chrome's Trace Event format, which Perfetto reads, and read back though cut off.

The file is one JSON object, one event a line, so that what is left of a truncated one can be read line by line:

    {"traceEvents": [
    {"ph":"M","name":"process_name","pid":0,"tid":0,"args":{"name":"worker 0"}},
    {"ph":"X","cat":"F","name":"F3","pid":0,"tid":0,"ts":12.345,"dur":3.200,"args":{"minibatch":3,"microbatch":0}},
    {"ph":"s","cat":"minibatch","name":"minibatch 3","id":3,"pid":0,"tid":0,"ts":12.400},
    …
    ], "displayTimeUnit": "ms", "otherData": {"fxpipe": "0.1.0", …}}

`pid` is the worker's rank. Times are microseconds from where training began, with three decimals. An event's `cat` is
its kind; a worker's events nest: what is inside another counts as its own kind alone. Minibatches count from 0.

`writer` writes it, `reader` reads it, and `nesting` takes nested events apart. No torch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

Kind = Literal["F", "B", "predict", "update", "send", "receive", "wait", "data", "evaluate"]
"""Of an event: an action's phase, or what goes on inside it and between actions."""

KINDS: tuple[Kind, ...] = get_args(Kind)

OF_TRAINING: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind != "evaluate")
"""Those whose times add up to a run's: evaluations are not counted in it."""

ACTIONS: tuple[Kind, ...] = ("F", "B")
"""The kinds of events that others lie in."""

HEAD = '{"traceEvents": ['
"""The first line."""

TAIL = '], "displayTimeUnit"'
"""What the last line begins with."""


class Event(NamedTuple):  # a tuple: a run has hundreds of thousands
    """What a worker did from one nanosecond to another, counted from where training began."""

    worker: int
    kind: str
    name: str
    minibatch: int
    microbatch: int
    begin: int
    end: int
