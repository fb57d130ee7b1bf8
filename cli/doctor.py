"""`fxpipe doctor`: what is installed, and whether it works."""

from __future__ import annotations

import dataclasses
import os
import platform
from contextlib import nullcontext
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import fxpipe
from fxpipe import engines as backends
from fxpipe.cli.command import AbsolutePath, Command
from fxpipe.cli.output import echo, note, print_columns, put, working
from fxpipe.errors import BuildError
from fxpipe.inspection.table import TEXT, WRITTEN, Column, Json, ShownTable
from fxpipe.plan.build_folder import check_output
from fxpipe.planner.device import links_toml
from fxpipe.planner.quantity import size
from fxpipe.runtime.wires.meeting import MOST_PORTS

if TYPE_CHECKING:
    from fxpipe.measure.links import LinkReport


@click.command("doctor", cls=Command)
@click.option(
    "--links", is_flag=True, help="Measure messages between processes, on this machine or those that torchrun started."
)
@click.option("-n", "--workers", type=click.IntRange(min=2), help="Number of processes, for --links. [default: 2]")
@click.option(
    "-o", "--out", type=click.Path(dir_okay=False), help="File for the links, for --links of compile and plan."
)
@click.option(
    "--pair", metavar="HOST[:PORT]", help="Say what is wrong between this machine and that one, which runs the same."
)
@click.option("--build", type=AbsolutePath(file_okay=False), help="Build to compare on both machines, for --pair.")
@click.option(
    "--wait",
    type=click.FloatRange(min=1),
    help="Seconds that the other machine has to begin, for --pair. [default: 300]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor_command(
    links: bool,
    workers: int | None,
    out: str | None,
    pair: str | None,
    build: str | None,
    wait: float | None,
    as_json: bool,
) -> int:
    """Show versions, devices, transports and engines, and run a tiny self-test.

    torch-tested says whether fxpipe is tested with this version of torch.

    The self-test compiles a small model for two workers, compares its stages with eager PyTorch, and trains a few
    steps with prediction. Exit code 1 if it fails.

    With --links, processes exchange messages as workers do: through memory that they share on one machine, else over
    NCCL if every process has a CUDA device of its own, else over gloo; it says which, and why. Under torchrun these are
    the processes that it started, on one machine or on several.

    With --pair, each of two machines names the other one: `fxpipe doctor --pair node1` on node0, and `--pair node0` on
    node1. Both say what works and what to do about the rest: ports in both directions, the network interface, clocks,
    versions, with --build the build, and what messages take. Exit code 1 if something is wrong.

    \b
    fxpipe doctor
    fxpipe doctor --json
    fxpipe doctor --links -o links.toml
    torchrun --nproc-per-node 2 --no-python fxpipe doctor --links
    """
    if pair is not None:
        if links:
            raise click.UsageError("--pair measures links, too: leave out --links")
        return _pair(pair, build, wait or 300.0, as_json)
    if build is not None or wait is not None:
        raise click.UsageError("--build and --wait need --pair")
    if links:
        return _links(workers, out, as_json)
    if workers is not None or out is not None:
        raise click.UsageError("-n and -o need --links")
    with working("looking around"):
        report = _report()
    put(report, as_json, _print_report)
    return 0 if report["self-test"] == "passed" else 1


def _print_report(report: Json) -> None:
    for key, value in report.items():
        lines = [", ".join(value)] if isinstance(value, list) and key != "engines" else value
        for label, line in zip_longest([key], [lines] if isinstance(lines, str) else lines, fillvalue=""):
            echo(f"{label:<12} {line or 'none'}")


def _pair(pair: str, build: str | None, wait: float, as_json: bool) -> int:
    from fxpipe.measure.pair import PORT, Pair, facts_here

    host, _, port = pair.partition(":")
    if not host or not (port or "1").isdecimal() or not 0 < int(port or PORT) <= MOST_PORTS:
        raise click.UsageError(f"--pair {pair!r} is no host, or host and port, such as node1 or 10.0.0.2:29501")
    with working("looking at the pair") as say:
        facts = facts_here()
        if build is not None:
            from fxpipe.plan.build_folder import load_plan
            from fxpipe.runtime.options import RunOptions
            from fxpipe.runtime.process.membership import facts_of

            facts = facts_of(load_plan(build), RunOptions(build)) | facts
        both = Pair(host, int(port or PORT), wait, facts, say)
        findings = list(both.findings())
    wrong = sum(finding.do is not None for finding in findings)
    rows = [dataclasses.asdict(finding) for finding in findings]
    put({"findings": rows, "links": both.links, "wrong": wrong}, as_json, _print_findings)
    return 1 if wrong else 0


def _print_findings(facts: Json) -> None:
    for finding in facts["findings"]:
        echo(f"{'wrong' if finding['do'] else 'ok':<7}{finding['what']:<29}{finding['seen']}")
        if finding["do"]:
            echo(f"{'':<7}do: {finding['do']}")


def _links(count: int | None, out: str | None, as_json: bool) -> int:
    from fxpipe.measure.links import SIZES, measure_group, measure_links
    from fxpipe.runtime.wires.meeting import has_place

    together = has_place()
    first = not together or os.environ["RANK"] == "0"
    if together and count is not None:
        raise click.UsageError("torchrun sets the number of processes (--nproc-per-node): leave out -n")
    if out is not None and first:
        check_output(Path(out).resolve().parent)  # before any work is done
    with working("measuring the links") if first else nullcontext(lambda text: None) as say:
        report = measure_group(say=say) if together else measure_links(count or 2, say=say)
    if not first:
        return 0
    if out is not None:
        where = "under torchrun" if together else "of one machine"
        comment = f"{report.transport} between {report.workers} processes {where}, measured by `fxpipe doctor --links`"
        if report.coverage is not None:
            comment += f"\n{report.coverage}: these are medians"
        try:
            Path(out).resolve().parent.mkdir(parents=True, exist_ok=True)
            Path(out).write_text(links_toml(report.links, comment), encoding="utf-8")
        except OSError as error:
            raise BuildError(f"{out} cannot be written: {error.strerror}", hint="choose another -o") from error
    facts = {
        "workers": report.workers,
        "transport": report.transport,
        "bandwidth": report.links.bandwidth,
        "latency": report.links.latency,
        "copy": report.links.copy,
        "sizes": list(SIZES),
        "pairs": [dataclasses.asdict(pair) for pair in report.pairs],
        "transports": [dataclasses.asdict(carrier) for carrier in report.carriers],
        "out": out,
    }
    put(facts, as_json, lambda facts: _print_links(report))
    if out is not None and not as_json:
        note(f"wrote {out}: the links of {report.transport}")
    return 0


def _print_links(report: LinkReport) -> None:
    from fxpipe.measure.links import SIZES
    from fxpipe.runtime.wires.processes import carriers_text

    columns = [
        Column(report.transport, lambda pair: f"{pair.source} → {pair.target}", TEXT),
        Column("latency", lambda pair: f"{pair.latency * 1e6:.0f} µs", WRITTEN),
        *(Column(size(bytes), partial(_rate, i), WRITTEN) for i, bytes in enumerate(SIZES)),
        Column("processor", lambda pair: f"{pair.copy * 1e9:.2f} ns/B", WRITTEN),
    ]
    print_columns(ShownTable(columns, report.pairs), whole=True)
    echo()
    if report.coverage is not None:
        echo(f"measured {report.coverage}")
    for line in carriers_text(report.carriers):
        echo(line)
    links = report.links
    if not isinstance(links.bandwidth, tuple) and not isinstance(links.latency, tuple):
        echo(
            f"{report.transport}: {links.bandwidth / 1e9:.2f} GB/s · latency {links.latency * 1e6:.0f} µs · "
            f"{links.copy * 1e9:.2f} ns of processor time for each byte, at either end"
        )


def _rate(place: int, pair: Any) -> str:
    return f"{pair.bandwidth[place] / 1e9:.2f} GB/s"


def _report() -> dict[str, Any]:
    import safetensors
    import torch
    import torch.distributed as dist

    from fxpipe.device_copies import is_here
    from fxpipe.tracing.torch_versions import standing

    transports = ["local"]
    if dist.is_available():
        transports += [name for name in ("gloo", "nccl") if getattr(dist, f"is_{name}_available")()]
    devices = [f"cpu ({os.cpu_count()} cores)"]
    devices += [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    devices += ["mps (not tried on a real one; messages through the CPU's memory)"] if is_here("mps") else []
    return {
        "fxpipe": fxpipe.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch-tested": standing(torch.__version__),
        "safetensors": safetensors.__version__,
        "devices": devices,
        "transports": transports,
        "engines": _engines("cuda" if torch.cuda.is_available() else "cpu"),
        "self-test": _self_test(),
    }


def _engines(device: str) -> list[str]:
    """Each engine with its versions and the device that runs it, or the reason why it cannot be used."""
    lines = ["eager"]
    for name in backends.ENGINES[1:]:
        engine = backends.make(name)
        reason = engine.missing(device)
        lines.append(f"{name} (not for {device}: {reason})" if reason else f"{name} ({engine.describe()})")
    return lines


def _self_test() -> str:
    import torch
    from torch import Tensor, nn

    from fxpipe.lowering.compare_with_eager import compare_with_eager
    from fxpipe.lowering.lower import compile

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    try:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        batch = (torch.randn(6, 4), torch.randn(6, 1))
        build = compile(model, loss, batch, workers=2, forward_at=["2"], backward_at=["1"], cost="analytic")
        error = compare_with_eager(build, model, loss, batch).largest
        if not error <= 1e-5:
            return f"failed: the stages differ from eager PyTorch by {error:.1e}"
        losses = build.local().run([batch] * 20)
        if not losses[-1] < losses[0]:
            return f"failed: the loss went from {losses[0]:.3f} to {losses[-1]:.3f}"
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"
    return "passed"
