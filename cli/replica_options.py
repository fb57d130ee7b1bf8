"""The options of `fxpipe plan` that say how many processes each worker has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from fxpipe.plan.limits import MOST_WORKERS, replicas_of_text


@dataclass(frozen=True)
class ReplicaOptions:
    """The options as they were typed.

    Attributes:
        gpus: processes to share out among workers; None if it is not asked.
        replicas: of each worker; empty if they are chosen, or not asked.
        dp: replicas of every worker.
        n: the number of workers, if it was given.
    """

    gpus: int | None = None
    replicas: tuple[int, ...] = ()
    dp: int | None = None
    n: int | None = None

    @property
    def any(self) -> bool:
        """Whether workers are to have replicas."""
        return bool(self.gpus or self.replicas or self.dp)

    def workers(self, usual: int) -> int:
        """How many workers are asked; as many as processes, where they are chosen."""
        return self.gpus or len(self.given(usual))

    def given(self, usual: int) -> tuple[int, ...]:
        """The replicas of each worker, if they are not to be chosen."""
        return self.replicas or (self.dp or 1,) * (self.n or usual)


def replica_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give `plan` the options of replicas; it gets them as one argument, `wanted: ReplicaOptions`."""

    @functools.wraps(command)
    @click.pass_context
    def with_replicas(context: click.Context, /, *arguments: Any, **given: Any) -> Any:
        names = ("gpus", "replicas", "dp")
        typed = {name: given.pop(name) for name in names}
        source = context.get_parameter_source("workers")
        n = given["workers"] if source is click.core.ParameterSource.COMMANDLINE else None
        return command(*arguments, wanted=_checked(n, **typed), **given)

    count = click.IntRange(1, MOST_WORKERS)
    for add in (
        click.option("--dp", type=count, metavar="R", help="Replicas of every worker: data parallelism."),
        click.option("--replicas", metavar="LIST", help="Replicas of each worker, such as 2,1,1."),
        click.option("--gpus", type=count, metavar="N", help="Choose workers and their replicas for N processes."),
    ):
        with_replicas = add(with_replicas)
    return with_replicas


def _checked(
    n: int | None,
    gpus: int | None,
    replicas: str | None,
    dp: int | None,
) -> ReplicaOptions:
    """Refuses what contradicts itself."""
    listed = () if replicas is None else replicas_of_text(replicas)
    if listed is None:
        raise click.UsageError(f"--replicas {replicas}: give a number of processes for each worker: 2,1,1")
    if sum(given is not None for given in (gpus, replicas, dp)) > 1:
        raise click.UsageError(
            "--gpus chooses replicas, --replicas gives each worker its own, --dp all: give one of them"
        )
    if n is not None and gpus is not None:
        raise click.UsageError("--gpus chooses the number of workers: leave out -n")
    if listed and n is not None and n != len(listed):
        raise click.UsageError(f"--replicas {replicas} is for {len(listed)} workers, -n says {n}")
    return ReplicaOptions(gpus, listed, dp, n)
