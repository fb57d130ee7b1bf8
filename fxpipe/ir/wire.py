"""Send and Recv as nodes of the program's graph.

In the joint graph a Recv takes its Send, and both pass the value on, so that a wired program still runs in one process.
In a stage they become `comm.send("edge", value)` and `value = comm.recv("edge")`.
"""

from __future__ import annotations

import torch
from torch import fx


def send(value: torch.Tensor) -> torch.Tensor:
    """The sending end of an edge."""
    return value


def recv(sent: torch.Tensor) -> torch.Tensor:
    """The receiving end of an edge."""
    return sent


def is_send(node: fx.Node) -> bool:
    return node.target is send


def is_recv(node: fx.Node) -> bool:
    return node.target is recv
