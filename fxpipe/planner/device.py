"""What devices can do, present or not: built in under a name, or read from a TOML file. It needs no torch.

    [device]
    name = "h200"                                   # a built-in device supplies what is left out
    flops = {bfloat16 = "600T", float32 = "40T"}    # FLOP/s: a table by dtype, one quantity, or a number
    bandwidth = "3.8TB/s"                           # of its memory
    memory = "141GB"
    launch = "5us"                                  # added to the time of every node

    [links]
    bandwidth = "10Gbit"                            # or a matrix: a row per sender, a column per receiver
    latency = "50us"                                # or such a matrix
    copy = "0.3ns"                                  # per byte, processor time at each end

Every table may be left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fxpipe.errors import FxpipeError, ProfileError, near
from fxpipe.planner import quantity
from fxpipe.planner.links import Links, matrix
from fxpipe.typed_json import convert, explained, parse_toml

INFINITE = float("inf")
LAUNCH = 5e-6
"""The default seconds that Python takes to launch a kernel."""

_DTYPES = ("float64", "float32", "float16", "bfloat16", "int8")


@dataclass(frozen=True)
class Device:
    """What a device can do; a node takes max(FLOPs / flops, bytes / bandwidth) + launch seconds.

    Attributes:
        flops: FLOP/s that matrix products achieve, less than advertised: one number, or numbers by torch's dtype names.
            Other dtypes have the rate of float32, or else the lowest one.
        bandwidth: bytes per second to and from its memory.
        memory: bytes; `inf` if not given.
        launch: seconds that every node takes in addition.
    """

    name: str
    flops: float | Mapping[str, float]
    bandwidth: float
    memory: float = INFINITE
    launch: float = LAUNCH

    def flops_of(self, dtype: str) -> float:
        """FLOP/s for a dtype (`float32`, `bfloat16`, …)."""
        if not isinstance(self.flops, Mapping):
            return self.flops
        return self.flops.get(dtype) or self.flops.get("float32") or min(self.flops.values())

    def seconds(self, flops: float, moved: float, dtype: str) -> float:
        """How long a node with this many FLOPs and bytes takes."""
        return max(flops / self.flops_of(dtype), moved / self.bandwidth) + self.launch

    def speed_beside(self, other: Device) -> float:
        """How fast it is, relative to another one, where half of the time computes in 16 bits and half moves memory."""
        halves = [max(device.flops_of("float16"), device.flops_of("bfloat16")) for device in (self, other)]
        return (halves[0] / halves[1] * self.bandwidth / other.bandwidth) ** 0.5


@dataclass(frozen=True)
class DeviceSpec:
    """The contents of a device file; None for what it does not say."""

    device: Device | None = None
    links: Links | None = None


def _gpu(name: str, half: float, brain: float, single: float, double: float, bandwidth: float, memory: float) -> Device:
    """A device from its published peaks in TFLOP/s, TB/s and GB, of which it reaches the two shares below."""
    peaks = {"float16": half, "bfloat16": brain, "float32": single, "float64": double}
    flops = {dtype: peak * USED_FLOPS * 1e12 for dtype, peak in peaks.items()}
    return Device(name, flops, bandwidth * USED_BANDWIDTH * 1e12, memory * 1e9)


USED_FLOPS = 0.6
"""The share of its peak FLOP/s that a device reaches in the matrix products of training."""

USED_BANDWIDTH = 0.8
"""The share of its peak memory bandwidth that a device reaches in pointwise work."""

USED_BUS = 0.7
"""The share of a PCIe slot's published rate that a message between two cards reaches, by way of the host's memory."""

CPU = Device("cpu", 50e9, 10e9, launch=2e-6)
"""One core of a server: the default device of `--cost analytic`."""

BUILT_IN = {
    d.name: d
    for d in (
        CPU,
        # Peaks: dense, float32 without TF32 (as torch multiplies matrices by default), of the SXM version.
        _gpu("h100", 989.4, 989.4, 66.9, 66.9, 3.35, 80),
        _gpu("h200", 989.4, 989.4, 66.9, 66.9, 4.8, 141),
        _gpu("a100", 312.0, 312.0, 19.5, 19.5, 2.039, 80),
        _gpu("v100", 125.0, 15.7, 15.7, 7.8, 0.9, 32),  # has no bfloat16 units
        _gpu("l4", 121.0, 121.0, 30.3, 0.47, 0.3, 24),
        _gpu("t4", 65.0, 8.1, 8.1, 0.25, 0.32, 16),  # has no bfloat16 units
        # 16 bits: with sums in float32, as torch multiplies matrices, at half the advertised rate.
        _gpu("rtx3060", 25.5, 25.5, 12.7, 0.2, 0.36, 12),
        _gpu("rtx3090", 71.2, 71.2, 35.6, 0.56, 0.936, 24),
        _gpu("rtx4090", 165.2, 165.2, 82.6, 1.3, 1.008, 24),
        _gpu("rtx5090", 209.5, 209.5, 104.8, 1.64, 1.792, 32),
    )
}
"""Devices by name. For GPUs: NVIDIA's published peaks times the two shares above, and 5 µs for a launch."""


BUSES = {
    f"pcie{generation}{width}": Links(lanes * 1e9 * 2.0 ** (generation - 3) * USED_BUS, 20e-6)
    for generation in (3, 4, 5)
    for width, lanes in (("", 15.75), ("x8", 7.88))
}
"""Links by name: two cards on PCIe slots of so many lanes, 16 unless the name says 8."""


def at_peak(name: str, tf32: bool = False) -> Device | None:
    """The built-in device that a driver reports under this name, with its published peaks; None if there is none.

    Boards with other peaks than the same chip in the table (PCIe, NVL, laptops) and parts of a device (MIG) give None.

    Args:
        tf32: whether float32 is multiplied as TF32, at half the rate of bfloat16 if that is faster.
    """
    words = re.findall(r"[a-z0-9]+", name.lower().replace("rtx ", "rtx"))
    known = [device for word, device in BUILT_IN.items() if word in words and device is not CPU]
    if len(known) != 1 or _OTHERS & {*words}:
        return None
    flops = known[0].flops
    assert isinstance(flops, Mapping)
    peaks = {dtype: share / USED_FLOPS for dtype, share in flops.items()}
    if tf32:
        peaks["float32"] = max(peaks["float32"], peaks["bfloat16"] / 2)
    return replace(known[0], flops=peaks)


_OTHERS = {"pcie", "nvl", "mig", "laptop", "max", "d", "ti"}


def read_device_spec(name_or_path: str | Path, links: bool = False) -> DeviceSpec:
    """The built-in device of that name, or links, else the file at that path (see the module's docstring).

    Args:
        links: only these are read, which the error says.

    Raises:
        ProfileError: neither exists; not TOML; an unknown table or key; a value that is not a quantity. The error names
            the place.
    """
    text = str(name_or_path)
    name = text.lower().replace("-", "")
    if name in BUILT_IN:
        return DeviceSpec(BUILT_IN[name])
    if name in BUSES:
        return DeviceSpec(links=BUSES[name])
    path = Path(text)
    if not path.exists() and not path.suffix and len(path.parts) == 1:
        names = [*([] if links else BUILT_IN), *BUSES]
        raise ProfileError(
            f"there {'are no links' if links else 'is no device'} {text!r}{near(name, names)}",
            hint=f"built in are {', '.join(names)}; any other is a TOML file",
        )
    return _read(path)


def links_toml(links: Links, comment: str = "") -> str:
    """Links as TOML, below `comment`; `read_device_spec` reads back equal links."""
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    lines += ["[links]", f"bandwidth = {_toml(links.bandwidth)}  # bytes a second"]
    lines += [f"latency = {_toml(links.latency)}  # seconds"]
    lines += [f"copy = {_toml(links.copy)}  # seconds a byte, of each end's processor"]
    return "\n".join(lines) + "\n"


def _toml(value: float | tuple[tuple[float, ...], ...]) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join("[" + ", ".join(map(_toml, row)) + "]" for row in value) + "]"
    return repr(float(value))


_Quantity = int | float | str


@dataclass(frozen=True)
class _DeviceTable:
    name: str | None = None
    flops: _Quantity | dict[str, _Quantity] | None = None
    bandwidth: _Quantity | None = None
    memory: _Quantity | None = None
    launch: _Quantity | None = None


@dataclass(frozen=True)
class _LinksTable:
    bandwidth: _Quantity | tuple[tuple[_Quantity, ...], ...] = INFINITE
    latency: _Quantity | tuple[tuple[_Quantity, ...], ...] = 0.0
    copy: _Quantity = 0.0


@dataclass(frozen=True)
class _DeviceToml:
    device: _DeviceTable | None = None
    links: _LinksTable | None = None


_HINT = "it has tables [device] and [links], each of which may be left out; docs/how-to/plan.md shows one"


def _read(path: Path) -> DeviceSpec:
    with explained(path, error=ProfileError, hint=_HINT):
        file = convert(parse_toml(path), _DeviceToml)
    return DeviceSpec(
        None if file.device is None else _device(file.device, path),
        None if file.links is None else _links(file.links, f"{path}, [links]"),
    )


def _device(table: _DeviceTable, path: Path) -> Device:
    name = table.name or path.stem
    where = f"{path}, [device]"
    base = BUILT_IN.get(name.lower())
    missing = [key for key in ("flops", "bandwidth") if getattr(table, key) is None]
    if missing and base is None:
        hint = f"give them, or the name of a built-in device: {', '.join(BUILT_IN)}"
        raise ProfileError(f"{name!r} has no {' and no '.join(missing)}", where=where, hint=hint)
    base = base or Device(name, 0.0, 0.0)

    def given(key: str, read: Callable[[_Quantity], float], default: float) -> float:
        value = getattr(table, key)
        return default if value is None else _number(value, read, f"{where} {key}")

    return Device(
        name,
        base.flops if table.flops is None else _flops(table.flops, f"{where} flops"),
        given("bandwidth", quantity.bandwidth, base.bandwidth),
        given("memory", quantity.memory, base.memory),
        given("launch", quantity.seconds, base.launch),
    )


def _flops(given: _Quantity | dict[str, _Quantity], where: str) -> float | Mapping[str, float]:
    if not isinstance(given, dict):
        return _number(given, quantity.rate, where)
    hint = f'write {{float32 = "60T"}}, or one quantity; known are {", ".join(_DTYPES)}'
    if not given:
        raise ProfileError("the table of dtypes is empty", where=where, hint=hint)
    for dtype in given:
        if dtype not in _DTYPES:
            raise ProfileError(f"unknown dtype {dtype!r}{near(dtype, _DTYPES)}", where=where, hint=hint)
    return {dtype: _number(value, quantity.rate, where) for dtype, value in given.items()}


def _links(table: _LinksTable, where: str) -> Links:
    return Links(
        _link(table.bandwidth, quantity.bandwidth, INFINITE, f"{where} bandwidth"),
        _link(table.latency, quantity.seconds, 0.0, f"{where} latency"),
        _number(table.copy, quantity.seconds, f"{where} copy"),
    )


def _link(
    given: _Quantity | tuple[tuple[_Quantity, ...], ...], read: Callable[[_Quantity], float], own: float, where: str
) -> float | tuple[tuple[float, ...], ...]:
    """A number, or a square matrix; its diagonal, from a worker to itself, is always `own`."""
    if not isinstance(given, tuple):
        return _number(given, read, where)
    if not given or any(len(row) != len(given) for row in given):
        raise ProfileError(
            "the matrix is not square", where=where, hint="write a row for each sender and a column for each receiver"
        )
    return matrix(
        [[own if i == j else _number(v, read, where) for j, v in enumerate(row)] for i, row in enumerate(given)]
    )


def _number(given: _Quantity, read: Callable[[_Quantity], float], where: str) -> float:
    """A quantity from a file; errors say where it is."""
    if given == INFINITE and read in (quantity.bandwidth, quantity.memory):
        return INFINITE
    try:
        return read(given)
    except FxpipeError as error:
        error.where = where
        raise


THROTTLES = "100Mbit,20ms, or a file with [links] such as `fxpipe doctor --links -o links.toml` writes"


def read_throttle(text: str | None, processes: int) -> Links | None:
    """The links between processes, from `100Mbit,20ms` (bandwidth and latency of each direction of every link), from
    `100Mbit`, or from a file.

    None stays None. `copy` is 0, since the real messages of the run take that time anyway.

    Raises:
        ProfileError: the text is none of these, or a matrix is for another number of processes.
    """
    if text is None:
        return None
    if text.endswith(".toml") or Path(text).is_file():
        found = read_device_spec(text).links
        if found is None:
            raise ProfileError(f"{text} has no [links]", where="--throttle", hint=f"give {THROTTLES}")
        links = Links(found.bandwidth, found.latency)
    else:
        rate, comma, delay = text.partition(",")
        if rate.strip().replace(".", "", 1).isdigit():
            raise ProfileError(f"--throttle {text}: the bandwidth has no unit", hint=f"give {THROTTLES}")
        try:
            links = Links(quantity.bandwidth(rate), quantity.seconds(delay) if comma else 0.0)
        except ProfileError as error:
            raise ProfileError(f"--throttle {text}: {error.what}", hint=f"give {THROTTLES}") from error
    links.check(processes)
    return links
