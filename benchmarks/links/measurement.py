"""One model: compiled, trained for its losses, and timed on a link."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from contenders import ALONE, DDP, PIPELINING, Contender
from hosts import LOOPBACK, Hosts, Link, hosts_of, train
from losses import TOLERANCE, minibatches_to, smoothed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from commands import run_fxpipe

HERE = Path(__file__).resolve().parent
FAST = "10Gbit"
LOSS_OF = 60
"""Minibatches of synchronous training, if nothing else is said of a model."""

ALIKE = 10
"""Minibatches whose losses are compared of contenders that train the same."""

LONGER = 2
"""By how many times more minibatches than synchronous training a contender may take to its loss."""


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        links: of each model.
        microbatches: the counts that torch's pipelining tries.
        rounds, seconds: of timing, and of each contender in a round.
        loss_of, smoothed: the loss to be reached is synchronous training's after so many minibatches, by the model,
            the mean of the last so many.
    """

    links: dict[str, tuple[str, ...]]
    microbatches: tuple[int, ...] = (2, 4, 8)
    rounds: int = 3
    seconds: float = 0.6
    loss_of: Mapping[str, int] = field(default_factory=dict)
    smoothed: int = 24

    def slowest(self, model: str) -> Link:
        """Of the links of a model."""
        return min((Link.of(text) for text in self.links[model]), key=lambda link: link.bits)


class Builds:
    """What `fxpipe compile` makes, once each.

    Attributes:
        folder: where they are, and what the workers are told and answer.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[tuple[str, ...], Path] = {}

    def of(self, model: str, flags: tuple[str, ...], link: Link) -> str:
        """The folder of a build for two workers of one thread, planned for this link."""
        key = (model, *flags, *link.planned)
        if key not in self._made:
            build = self.folder / f"build-{len(self._made)}"
            options = ("-n", 2, "-o", build, "--threads", 1, *flags, *link.planned)
            run_fxpipe("compile", HERE / "models" / f"{model}.py", *options)
            self._made[key] = build
        return str(self._made[key])


def trained(model: str, sides: Sequence[Contender], builds: Builds, effort: Effort, real: bool) -> dict[str, Any]:
    """Minibatches until each contender has the loss of synchronous training, and by what torch's pipelining is split.

    Whatever the link, they are the same; but the codec `auto` may compress less on a faster one than on the slowest,
    for which its build is here.
    """
    first = {side.group or side.name: side for side in reversed(sides) if side is not ALONE and not side.like}
    tried = {
        (name, rate): replace(side, name=f"{name} × {rate:g}", settings={**side.settings, "rate": rate})
        for name, side in reversed(first.items())
        for rate in side.rates
    }
    told = [_told(side, model, builds, effort.slowest(model), effort) for side in tried.values()]
    count = effort.loss_of.get(model, LOSS_OF)
    orders = _orders(model, told, effort, rounds=0, losses=LONGER * count)
    with hosts_of(Link.of(FAST), real) as hosts:
        answer = train(hosts, orders, builds.folder)
    curves = {key: answer["losses"][side.name] for key, side in tried.items()}
    synchronous = next(name for name in (DDP.name, PIPELINING, "fxpipe 1f1b") if name in first)
    goal = smoothed(curves[synchronous, 1.0], effort.smoothed)[count - 1]
    reached: dict[str, int | None] = {}
    for (name, _), losses in curves.items():
        counts = [reached.get(name), minibatches_to(goal, losses, effort.smoothed)]
        reached[name] = min((count for count in counts if count is not None), default=None)
    alike = [side for side in sides if side.like]
    if alike:
        told = [_told(side, model, builds, effort.slowest(model), effort) for side in alike]
        with hosts_of(Link.of(FAST), real) as hosts:
            orders = _orders(model, told, effort, rounds=0, losses=ALIKE, pieces=answer["pieces"])
            found = train(hosts, orders, builds.folder)["losses"]
    for side in alike:
        known = curves[side.like, 1.0][:ALIKE]
        if not all(abs(a - b) <= TOLERANCE * b for a, b in zip(found[side.name], known, strict=True)):
            raise SystemExit(f"{model}: {side.name} does not train as {side.like} does: its losses differ")
        reached[side.group or side.name] = reached[side.like]
    return {
        "goal": goal,
        "of": count,
        "smoothed": effort.smoothed,
        "longest": LONGER * count,
        "reached": reached,
        "curves": {tried[key].name: losses for key, losses in curves.items()},
        "pieces": answer["pieces"],
    }


def timed(
    model: str,
    sides: Sequence[Contender],
    builds: Builds,
    effort: Effort,
    hosts: Hosts,
    link: Link,
    losses: dict[str, Any],
    real: bool,
) -> dict[str, Any]:
    """Seconds of a minibatch of every contender on a link, all rounds.

    Args:
        losses: what `trained` found.
        real: the hosts have this link; else fxpipe's meter makes it, where it is slow.
    """
    throttle = None if real or link.text == LOOPBACK else link.text
    told = [_told(side, model, builds, link, effort, throttle=throttle) for side in sides]
    orders = _orders(model, told, effort, rounds=effort.rounds, losses=0, pieces=losses["pieces"])
    answer = train(hosts, orders, builds.folder)
    best: dict[str, list[float]] = {}
    for side in sides:
        name, seconds = side.group or side.name, answer["seconds"][side.name]
        if name not in best or statistics.median(seconds) < statistics.median(best[name]):
            best[name] = seconds
    return {
        "model": model,
        "link": asdict(link),
        "batch": answer["batch"],
        "weights": answer["weights"],
        "seconds": best,
        "all": answer["seconds"],
        "reached": losses["reached"],
    }


def say(begin: float, text: str) -> None:
    """Say on stderr what is done next, and how long it took to get here."""
    minutes, seconds = divmod(int(time.monotonic() - begin), 60)
    print(f"[{minutes}:{seconds:02d}] {text}", file=sys.stderr, flush=True)


def _told(
    side: Contender, model: str, builds: Builds, link: Link, effort: Effort, throttle: str | None = None
) -> dict[str, Any]:
    """A contender as `worker.py` is told of it; its build is planned for the slowest link, with `auto` for this one."""
    settings = dict(side.settings)
    if side.kind == "fxpipe":
        settings["build"] = builds.of(model, side.compile, link if "auto" in side.compile else effort.slowest(model))
        settings["throttle"] = throttle
    return {"name": side.name, "kind": side.kind, "settings": settings, "every": side.every}


def _orders(
    model: str, told: list[dict[str, Any]], effort: Effort, rounds: int, losses: int, pieces: Any = None
) -> dict[str, Any]:
    """Of `worker.Orders`, all but where the answer goes."""
    task = str(HERE / "models" / f"{model}.py")
    return {
        "task": task,
        "sides": told,
        "rounds": rounds,
        "seconds": effort.seconds,
        "losses": losses,
        "pieces": pieces,
    }
