"""The options that say what work and messages cost, the same for `compile` and `plan`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import click

from fxpipe.errors import FxpipeError, ProfileError
from fxpipe.lowering.options import CompileOptions
from fxpipe.options import option
from fxpipe.planner import quantity
from fxpipe.planner.device import BUSES, CPU, INFINITE, DeviceSpec, read_device_spec
from fxpipe.planner.links import GLOO_LOOPBACK, NCCL_NODE, Links


@dataclass(frozen=True)
class CostOptions:
    """The options as they were typed; `applied` reads them."""

    device_spec: str | None = option(
        None, metavar="NAME|FILE", help="Times of a device: rtx-4090, h100, … or a TOML file; or one for each worker."
    )
    bandwidth: str | None = option(None, metavar="RATE", help="Bandwidth of every link, such as 10Gbit.")
    latency: str | None = option(None, metavar="TIME", help="Latency of every link, such as 50us.")
    links: str | None = option(
        None,
        metavar="NAME|FILE",
        help=f"Links of a kind ({', '.join(BUSES)}), or a file that `fxpipe doctor --links -o FILE` has written.",
    )
    speed: str | None = option(
        None, metavar="LIST", help="Relative speed of each worker, such as 1,1,0.5. [default: all 1]"
    )
    memory: str | None = option(None, metavar="LIST", help="Memory of each worker, as 80GiB or 80GiB,40GiB.")

    @staticmethod
    def of(options: dict[str, Any]) -> CostOptions:
        """Take the cost options out of a command's options."""
        return CostOptions(**{field.name: options.pop(field.name) for field in fields(CostOptions)})

    def applied(
        self, options: CompileOptions, default_links: Links = GLOO_LOOPBACK, meta: bool = False
    ) -> CompileOptions:
        """The options of a compile with these read: its cost, device, links, speeds and memory.

        What was typed takes precedence over files, and --links over --device-spec. --bandwidth or --latency alone
        changes one value of `default_links`; a device that is not a CPU has the links between GPUs of one machine
        instead. Of several devices, costs are the first one's, and the others' speeds are relative to it. With `meta`
        times are computed, because nothing can be measured.
        """
        cost, workers = options.cost, options.workers
        if meta and cost == "measured":
            raise click.UsageError("--cost measured runs the step, but --meta leaves parameters without values")
        names = [] if self.device_spec is None else [name.strip() for name in self.device_spec.split(",")]
        if not all(names):
            raise click.UsageError(f"--device-spec {self.device_spec}: a name is missing")
        spec, *others = map(read_device_spec, names) if names else [DeviceSpec()]
        devices = [each.device for each in (spec, *others) if each.device is not None]
        if others and not len(names) == len(devices) == workers:
            raise click.UsageError(
                f"--device-spec gives {len(devices)} devices for {workers} workers; links are given by --links"
            )
        if spec.device is not None and cost == "measured":
            raise click.UsageError(
                "--device-spec computes times, --cost measured measures them here: leave out --cost measured"
            )
        if spec.device is not None and spec.device.name != CPU.name:
            default_links = NCCL_NODE
        each = devices if others else devices * workers
        speeds = [device.speed_beside(each[0]) for device in each] or [1.0] * workers
        return replace(
            options,
            cost=cost or ("measured" if spec.device is None and not meta else "analytic"),
            device=spec.device,
            links=self._links(spec.links, workers, default_links) or (None if spec.device is None else default_links),
            speeds=_each(self.speed, "--speed", _speed, speeds, workers),
            memory=_each(
                self.memory,
                "--memory",
                quantity.memory,
                [device.memory for device in each] or [INFINITE] * workers,
                workers,
            ),
        )

    def _links(self, links: Links | None, workers: int, default: Links) -> Links | None:
        if self.links is not None:
            links = read_device_spec(self.links, links=True).links
            if links is None:
                raise ProfileError(
                    f"{self.links} says nothing about links: it has no [links]",
                    where="--links",
                    hint="`fxpipe doctor --links -o links.toml` measures them and writes such a file",
                )
        if self.bandwidth is not None:
            bandwidth = typed_quantity(self.bandwidth, "--bandwidth", quantity.bandwidth)
            links = replace(links or default, bandwidth=bandwidth)
        if self.latency is not None:
            links = replace(links or default, latency=typed_quantity(self.latency, "--latency", quantity.seconds))
        if links is not None:
            links.check(workers)
        return links


def _each(
    text: str | None, option: str, read: Callable[[str], float], default: Sequence[float], workers: int
) -> tuple[float, ...]:
    """A value for each worker, from the option or the default; one value of memory applies to all workers."""
    if text is None:
        return tuple(default)
    values = tuple(typed_quantity(part, option, read) for part in text.split(","))
    if len(values) == 1 and option == "--memory":
        return values * workers
    if len(values) != workers:
        what = "speeds" if option == "--speed" else "sizes"
        raise click.UsageError(f"{option} gives {len(values)} {what} for {workers} workers")
    return values


def _speed(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < INFINITE:
        raise ProfileError(f"{text!r} is not a speed", hint="give numbers above zero with commas between them: 1,1,0.5")
    return value


def typed_quantity(text: str, option: str, read: Callable[[str], float]) -> float:
    """A quantity on the command line, with its unit; a wrong one is a usage error."""
    if read is not _speed and text.strip().replace(".", "", 1).isdigit() and float(text) > 0:
        examples = {"--latency": "50us", "--bandwidth": "10Gbit or 20GB/s", "--memory": "80GiB"}
        raise click.UsageError(f"{option} {text} has no unit: write it as {examples[option]}")
    try:
        return read(text)
    except FxpipeError as error:
        raise click.UsageError(f"{option}: {error.what}" + (f"; {error.hint}" if error.hint else "")) from error
