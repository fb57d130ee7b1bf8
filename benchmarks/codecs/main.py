"""What packing a value takes, saves and loses, codec by codec. See README.md.

All codecs and a plain copy run in turn, round by round; what counts is the median time of each, and the median over the
rounds of its ratio to the copy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fxpipe.codecs import Codec, codec
from fxpipe.codecs.codec import EdgeState
from fxpipe.plan.spec import TensorSpec

HERE = Path(__file__).resolve().parent
CODECS = ("bf16", "fp16", "int8", "int4", "topk:0.01", "lowrank:4", "bits", "int32")
ROWS = 1024
GOAL_CODEC, GOAL_BYTES = "int8", 4 << 20
AT_MOST = 15.0
"""Packing 4 MiB as int8 may take so many times as long as copying it."""
GIGABIT = 1e9 / 8


def main() -> int:
    """Measure, print the tables and keep the numbers; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31, help="of all codecs and the copy, in turn")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    parser.add_argument("--quick", action="store_true", help="2 rounds of the smaller sizes: only to see that it runs")
    parser.add_argument("--out", type=Path, help="default: result.json here, or nowhere with --quick")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [64 << 10, 1 << 20] if options.quick else [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]
    rounds = 2 if options.quick else options.rounds
    device = torch.device(options.device)
    result: dict[str, Any] = {"torch": torch.__version__, "device": str(device), "rounds": rounds}
    result["errors"] = {
        name: errors(codec(name), device, 1 << (16 if options.quick else 20))
        for name in CODECS
        if not codec(name).lossless
    }
    result["times"] = [row for size in sizes for row in times(size, device, rounds)]
    result["missed"] = missed(result["times"])
    report(result)
    if out := options.out or (None if options.quick else HERE / "result.json"):
        out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["missed"] and not options.quick else 0


def gaussian(count: int, device: torch.device) -> Tensor:
    """float32[1024, count / 1024]."""
    return torch.randn((ROWS, count // ROWS), generator=torch.Generator().manual_seed(0)).to(device)


def heavy_tailed(count: int, device: torch.device) -> Tensor:
    """The same shape, from Student's t with 2 degrees of freedom."""
    generator = torch.Generator().manual_seed(0)
    shape = (ROWS, count // ROWS)
    chi = torch.randn((2, *shape), generator=generator).square().sum(0)
    return (torch.randn(shape, generator=generator) / (chi / 2).sqrt()).to(device)


def errors(made: Codec, device: torch.device, count: int) -> dict[str, float]:
    """|decoded - value| / |value| of one message, rounded to nearest and, where the codec does so, at random."""
    found = {}
    for name, value in (("gaussian", gaussian(count, device)), ("heavy-tailed", heavy_tailed(count, device))):
        for suffix, state in (("", None), (", gradient", EdgeState())):
            if state is None or made.keeps_state("gradient"):
                read = made.decode(made.encode(value, state), value.shape, value.dtype)
                found[name + suffix] = float((read - value).norm() / value.norm())
    return found


def value_of(made: Codec, size: int, device: torch.device) -> Tensor:
    """A tensor of `size` bytes that the codec takes."""
    if made.name == "bits":
        return gaussian(size, device) > 0
    if made.name == "int32":
        return (gaussian(size // 8, device) * 1000).to(torch.int64)
    return gaussian(size // 4, device)


def times(size: int, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """A row for each codec: seconds of each call for tensors of `size` bytes, and their ratios to a copy's."""
    print(f"{size >> 10} KiB", file=sys.stderr)
    calls: dict[str, dict[str, Callable[[], object]]] = {}
    sent: dict[str, int] = {}
    for name in CODECS:
        made = codec(name)
        value = value_of(made, size, device)
        packed = made.encode(value, None)
        sent[name] = packed.numel() * packed.element_size()
        assert sent[name] == made.packed(spec_of(value)).bytes
        calls[name] = calls_of(made, value, packed)
    found: dict[str, dict[str, list[float]]] = {name: {call: [] for call in calls[name]} for name in CODECS}
    for i in range(rounds + 1):  # the first touches memory
        for name in CODECS if i % 2 else reversed(CODECS):
            for call, run in calls[name].items():
                found[name][call].append(seconds(run, device))
    return [row_of(name, size, sent[name], {c: s[1:] for c, s in found[name].items()}) for name in CODECS]


def calls_of(made: Codec, value: Tensor, packed: Tensor) -> dict[str, Callable[[], object]]:
    """What is timed."""
    calls: dict[str, Callable[[], object]] = {
        "copy": value.clone,
        "encode": lambda: made.encode(value, None),
        "decode": lambda: made.decode(packed, value.shape, value.dtype),
    }
    if made.keeps_state("gradient"):
        state = EdgeState()
        calls["encode gradient"] = lambda: made.encode(value, state)
    return calls


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Of one call."""
    begin = perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - begin


def row_of(name: str, size: int, sent: int, spent: dict[str, list[float]]) -> dict[str, Any]:
    """Medians; and the bandwidth, in bytes a second, of the link on which packing takes what it saves."""
    middle = {call: statistics.median(every) for call, every in spent.items()}
    packing = middle.get("encode gradient" if name.startswith(("topk", "lowrank")) else "encode", 0) + middle["decode"]
    return {
        "codec": name,
        "bytes": size,
        "sent": sent,
        "seconds": middle,
        "copies": {
            call: statistics.median(mine / copy for mine, copy in zip(every, spent["copy"], strict=True))
            for call, every in spent.items()
        },
        "pays_below": (size - sent) / packing,
    }


def spec_of(value: Tensor) -> TensorSpec:
    """As a plan has it."""
    return TensorSpec(tuple(value.shape), tuple(value.stride()), str(value.dtype).removeprefix("torch."))


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """The goals that these times miss."""
    found = []
    for row in rows:
        if row["codec"] == GOAL_CODEC and row["bytes"] == GOAL_BYTES and row["copies"]["encode"] > AT_MOST:
            found.append(f"{GOAL_CODEC} takes {row['copies']['encode']:.1f} copies of 4 MiB, more than {AT_MOST:.0f}")
        if row["bytes"] >= 1 << 20 and row["pays_below"] < GIGABIT:
            found.append(f"{row['codec']} pays below {8e-9 * row['pays_below']:.2f} Gbit/s only, {row['bytes']} bytes")
    return found


def report(result: dict[str, Any]) -> None:
    """The tables."""
    print(f"torch {result['torch']}, {result['device']}, one thread, {result['rounds']} rounds\n")
    print("| codec | bytes | error: gaussian | heavy-tailed | as a gradient: gaussian | heavy-tailed |")
    print("|---|---|---|---|---|---|")
    largest = {row["codec"]: row for row in result["times"]}
    for name in CODECS:
        kinds = ("gaussian", "heavy-tailed", "gaussian, gradient", "heavy-tailed, gradient")
        found = result["errors"].get(name, {})
        cells = [f"{found[kind]:.2g}" if kind in found else "–" if found else "0" for kind in kinds]
        print(f"| {name} | {largest[name]['sent'] / largest[name]['bytes']:.4f} | {' | '.join(cells)} |")
    print("\n| KiB | codec | copy, ms | encode, copies | as a gradient | decode, copies | pays below, Gbit/s |")
    print("|---|---|---|---|---|---|---|")
    for row in result["times"]:
        gradient = row["copies"].get("encode gradient")
        print(
            f"| {row['bytes'] >> 10} | {row['codec']} | {1e3 * row['seconds']['copy']:.3f} "
            f"| {row['copies']['encode']:.1f} | {'–' if gradient is None else f'{gradient:.1f}'} "
            f"| {row['copies']['decode']:.1f} | {8e-9 * row['pays_below']:.1f} |"
        )
    print()
    for text in result["missed"]:
        print(f"missed: {text}")
    if not result["missed"]:
        print("the goals are met")


if __name__ == "__main__":
    sys.exit(main())
