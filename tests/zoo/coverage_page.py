"""Rows of the zoo as tables, and as docs/coverage.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from check import ASYNC_STEPS, MICROBATCHES, TOLERANCE, WORKERS, Row

HEADINGS = ("model", "status", "capture s", "nodes", "compile s", "crossing KiB", "error")


def verdict(rows: Sequence[Row]) -> tuple[str, bool]:
    """`N of M`, and whether N is M: passed, or refused as the entry says."""
    good = sum(row.status in ("passed", "refused") for row in rows)
    refused = sum(row.status == "refused" for row in rows)
    return f"{good} of {len(rows)}" + (f" ({refused} refused, with reasons)" if refused else ""), good == len(rows)


def tables(rows: Sequence[Row], kinds: Mapping[str, str]) -> str:
    """A table for each kind, in the order in which kinds first come; failures and refusals below it."""
    parts = []
    for kind in dict.fromkeys(kinds[row.name] for row in rows):
        mine = [row for row in rows if kinds[row.name] == kind]
        cells = [HEADINGS, *map(_cells, mine)]
        widths = [max(len(line[k]) for line in cells) for k in range(len(HEADINGS))]
        lines = ["  ".join(_justified(line, widths)).rstrip() for line in cells]
        told = [f"  {row.name}: {row.reason}" for row in mine if row.reason]
        parts.append("\n".join((f"{kind}: {verdict(mine)[0]}", *lines, *told)))
    return "\n\n".join(parts)


def page(rows: Sequence[Row], kinds: Mapping[str, str], versions: Mapping[str, str]) -> str:
    """docs/coverage.md: the summary, what is refused and why, how to run it, a table for each kind."""
    by_kind = Counter(kinds[row.name] for row in rows)
    good = Counter(kinds[row.name] for row in rows if row.status != "failed")
    used = ", ".join(f"{name} {version}" for name, version in versions.items())
    parts = [
        "# Models that are known to work",
        f"**{verdict(rows)[0]}** model families, with {used}, on one core of a CPU each. `make zoo` writes this page.",
        "\n".join(
            [
                "Each model has random weights and is its library's own, at the library's size or with a small",
                "configuration; a few are put together from a library's parts, and the architectures written out",
                f"are this project's. Its training step is captured, cut for {WORKERS} workers twice, with the",
                "backward cut earlier than the forward and later, emitted, and run in one process: one synchronous",
                f"step of {MICROBATCHES} microbatches with all dropout off, whose loss, gradients and buffers agree",
                f"with eager PyTorch's to {TOLERANCE:.0e} of each tensor's norm in float32, then {ASYNC_STEPS} steps",
                "of `async`, after which every loss and weight is finite.",
                "`dropout` marks models that were compared with dropout on, too, eager's random numbers replayed;",
                "`replayed` those that draw random numbers without any dropout, compared in that way alone.",
            ]
        ),
        _table(("models", "passed or refused", "of"), [(k, str(good[k]), str(n)) for k, n in by_kind.items()]),
    ]
    for status, heading in (("failed", "Failed"), ("refused", "Refused, and why")):
        told = [f"- `{row.name}` ({kinds[row.name]}): {row.reason}" for row in rows if row.status == status]
        if told:
            parts += [f"## {heading}", "\n".join(told)]
    parts += [
        "## Running it",
        "\n".join(
            [
                "    make zoo                                 # all of them, two at a time; goes on where it stopped",
                "    make zoo ONLY='llama|t5|swin_t|unet'     # those whose names match",
                "    make zoo JOBS=8",
            ]
        ),
        "`compile` is the time to lower the captured step, `crossing` what all workers send in a minibatch: both are "
        "the mean over the two cuts. `error` is the largest of all. Times differ from machine to machine.",
    ]
    for kind in by_kind:
        parts += [f"## {kind}", _table(HEADINGS, [_cells(row) for row in rows if kinds[row.name] == kind])]
    return "\n\n".join(parts) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    marks = [row.status, *(["dropout"] if row.dropout else []), *(["replayed"] if row.replayed else [])]
    return (
        row.name,
        ", ".join(marks),
        "" if row.capture is None else f"{row.capture:.1f}",
        "" if row.nodes is None else str(row.nodes),
        "" if row.compile is None else f"{row.compile:.1f}",
        "" if row.crossing is None else f"{row.crossing / 1024:.0f}",
        "" if row.error is None else "0" if row.error == 0 else f"{row.error:.0e}",
    )


def _justified(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Words to the left, numbers to the right."""
    return [c.ljust(w) if k < 2 else c.rjust(w) for k, (c, w) in enumerate(zip(cells, widths, strict=True))]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    aligned = ["---", *(["---:"] * (len(headings) - 1))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headings, aligned, *rows))
