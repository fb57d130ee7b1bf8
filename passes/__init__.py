"""The passes, and the order in which they run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fxpipe.transform import Pass


@dataclass(frozen=True)
class Options:
    """What a user can choose about a compile; see `fxpipe compile --help`."""

    workers: int = 2
    forward_at: tuple[str, ...] = ()
    backward_at: tuple[str, ...] = ()
    cost: Literal["measured", "analytic"] = "measured"
    threads: int | None = None
    command: str = "fxpipe.compile(...)"


def default_passes(options: Options) -> list[Pass]:
    """Captured program in, stage files out."""
    from fxpipe.passes.codegen import Codegen
    from fxpipe.passes.comm import Comm
    from fxpipe.passes.cost import Cost
    from fxpipe.passes.cut import Cut
    from fxpipe.passes.fold import Fold
    from fxpipe.passes.rematerialize import Rematerialize
    from fxpipe.passes.split import Split
    from fxpipe.passes.units import Units

    return [
        Fold(),  # first: fewer nodes for all that follows, and no forward views of weights in backward
        Units(),  # after fold: what it dropped must not count as something a cut can separate
        Cost(options.cost, threads=options.threads),  # measures the graph as the workers will run it
        Cut(options.workers, options.forward_at, options.backward_at),  # every node gets its worker
        Rematerialize(),  # before comm: what is computed again is not sent
        Comm(),  # after it no value crosses workers but through Send and Recv
        Split(),  # one forward and one backward graph for each worker
        Codegen(options.command),  # last: the product
    ]
