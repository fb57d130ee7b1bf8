"""What other training libraries know of a training, as the hooks of a model file; each file needs its own package.

Workers load the model file, too: what an adapter says, it says in the first process.
"""

from __future__ import annotations

import functools
import os
import sys

from fxpipe.messages import warn


def is_first_process() -> bool:
    """Whether this is the process that the user has started, or the first of those that torchrun has."""
    started = getattr(sys.modules["__main__"], "__spec__", None)
    return os.environ.get("RANK", "0") == "0" and (started is None or started.name != "fxpipe.runtime.process.child")


@functools.cache
def warn_once(message: str) -> None:
    """A warning of what is found at each of many calls: it is said at the first, in the first process."""
    if is_first_process():
        warn(message)
