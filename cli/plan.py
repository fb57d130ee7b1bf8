"""`fxpipe plan`: what a partition would give, without writing it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from fxpipe.cli.output import emit_json, print_table, working

if TYPE_CHECKING:
    from fxpipe.planner.balance import Balance
    from fxpipe.planner.profile import Profile


@click.command("plan")
@click.argument("profile", type=click.Path(dir_okay=False))
@click.option("-n", "--workers", type=click.IntRange(min=1), default=2, show_default=True, help="Number of stages.")
@click.option("--speed", help="Speed of each worker relative to the measured device, as 1,1,0.5,0.5. [default: all 1]")
@click.option("--no-communication", is_flag=True, help="The pure balance of times: needed until links are planned too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan_command(profile: str, workers: int, speed: str | None, no_communication: bool, as_json: bool) -> int:
    """Compare shared cuts with independent forward and backward cuts on a PROFILE.

    PROFILE is fxpipe's JSON or one of PipeDream's published graph files. Both optima are exact for the model of
    fxpipe/planner/balance.py: the slowest worker's forward and backward time. Efficiency is the ideal time (all work
    divided by the workers' speeds) over the slowest worker's.

    \b
    fxpipe plan vgg16.txt -n 4 --no-communication
    fxpipe plan profile.json -n 4 --speed 1,1,0.5,0.5 --no-communication --json
    """
    from fxpipe.planner.balance import bidirectional_cuts, same_cuts
    from fxpipe.planner.profile import read_profile

    if not no_communication:
        raise click.UsageError("communication is not planned yet: ask for the pure balance with --no-communication")
    speeds = _speeds(speed, workers)
    read = read_profile(profile)
    forward = [u.forward_ms for u in read.units]
    backward = [u.backward_ms for u in read.units]
    with working("planning"):
        found = {
            "same": same_cuts(forward, backward, speeds),
            "bidirectional": bidirectional_cuts(forward, backward, speeds),
        }
    ideal = read.total_ms / sum(speeds)
    if as_json:
        emit_json({"ideal_ms": ideal, **{mode: _as_json(read, b, ideal) for mode, b in found.items()}})
    else:
        _print(read, found, ideal, speeds)
    return 0


def _speeds(text: str | None, workers: int) -> list[float]:
    if text is None:
        return [1.0] * workers
    try:
        speeds = [float(part) for part in text.split(",")]
    except ValueError:
        raise click.UsageError(f"--speed {text}: give numbers with commas between them") from None
    if len(speeds) != workers:
        raise click.UsageError(f"--speed gives {len(speeds)} speeds for {workers} workers")
    return speeds


def _as_json(profile: Profile, balance: Balance, ideal: float) -> dict[str, Any]:
    return {
        "forward_cuts": list(balance.forward[1:-1]),
        "backward_cuts": list(balance.backward[1:-1]),
        "bottleneck_ms": balance.bottleneck,
        "efficiency": ideal / balance.bottleneck if balance.bottleneck else 1.0,
    }


def _print(profile: Profile, found: dict[str, Balance], ideal: float, speeds: list[float]) -> None:
    from fxpipe.planner.balance import worker_loads

    forward = [u.forward_ms for u in profile.units]
    backward = [u.backward_ms for u in profile.units]
    rows = []
    for k in range(len(speeds)):
        row = [f"worker {k}"]
        for balance in found.values():
            load = worker_loads(forward, backward, balance, speeds)[k]
            row += [
                f"{balance.forward[k]}:{balance.forward[k + 1]}",
                f"{balance.backward[k]}:{balance.backward[k + 1]}",
                f"{load:.2f} ms",
            ]
        rows.append(row)
    print_table(["", *(f"{mode} {what}" for mode in found for what in ("F", "B", "time"))], rows)
    for mode, balance in found.items():
        efficiency = ideal / balance.bottleneck if balance.bottleneck else 1.0
        click.echo(f"{mode:<14} slowest {balance.bottleneck:.2f} ms · efficiency {efficiency:.3f}")
    click.echo(f"{'ideal':<14} {ideal:.2f} ms · {len(profile.units)} units")
