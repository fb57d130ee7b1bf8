"""Rows of the zoo as tables, and as docs/reference/coverage.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from check import ASYNC_STEPS, MICROBATCHES, TOLERANCE, WORKERS, Row
from families import recipe

HEADINGS = ("model", "status", "capture s", "nodes", "compile s", "crossing KiB", "error")
OF_RECIPES = ("recipe", "status", "microbatches", "compile s", "loss error", "weight error")


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
        headings = _headings(kind)
        cells = [headings, *(_cells(row, kind) for row in mine)]
        widths = [max(len(line[k]) for line in cells) for k in range(len(headings))]
        lines = ["  ".join(_justified(line, widths)).rstrip() for line in cells]
        told = [f"  {row.name}: {row.reason}" for row in mine if row.reason]
        parts.append("\n".join((f"{kind}: {verdict(mine)[0]}", *lines, *told)))
    return "\n\n".join(parts)


def page(rows: Sequence[Row], kinds: Mapping[str, str], versions: Mapping[str, str]) -> str:
    """docs/reference/coverage.md: the summary, what is refused and why, how to run it, a table for each kind."""
    by_kind = Counter(kinds[row.name] for row in rows)
    good = Counter(kinds[row.name] for row in rows if row.status != "failed")
    used = ", ".join(f"{name} {version}" for name, version in versions.items())
    recipes = [row for row in rows if _is_recipe(kinds[row.name])]
    models = [row for row in rows if not _is_recipe(kinds[row.name])]
    parts = [
        "# Models that are known to work",
        f"**{verdict(models)[0]}** model families and **{verdict(recipes)[0]}** training recipes, with {used}, "
        "on one core of a CPU each. `make zoo` writes this page.",
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
        "\n".join(
            [
                "Each recipe is a loop as people write it, with its loss, optimizer, schedule of rates, clipping and",
                f"averages, over {recipe.STEPS} batches whose padding, gaps and classes differ.",
                f"{recipe.WORKERS} workers train it under `1f1b` with {recipe.MICROBATCHES} microbatches, in one",
                "process and in a process each, which give the same bits; and eager PyTorch trains it on whole",
                "batches. Every step's loss agrees, and in the end every weight, buffer and average: to 1e-9 in",
                "float64, to 1e-4 in float32, to 2e-2 in bfloat16. Where microbatches make another loss, compile has",
                "to say so, and the recipe is trained with one.",
            ]
        ),
        _table(("models", "passed or refused", "of"), [(k, str(good[k]), str(n)) for k, n in by_kind.items()]),
    ]
    for status, heading in (
        ("failed", "Failed"),
        ("refused", "Refused, and why"),
        ("passed", "Another loss with microbatches, and why"),
    ):
        mine = [row for row in rows if row.status == status and row.reason]
        told = [f"- `{row.name}` ({kinds[row.name]}): {row.reason}" for row in mine]
        if told:
            parts += [f"## {heading}", "\n".join(told)]
    parts += [
        "## Running it",
        "\n".join(
            [
                "    make zoo                                 # all of them, two at a time; goes on where it stopped",
                "    make zoo ONLY='llama|t5|swin_t|unet'     # those whose names match",
                "    make zoo ONLY=recipe                     # the training recipes",
                "    make zoo JOBS=8",
            ]
        ),
        "`compile` is the time to lower the captured step, `crossing` what all workers send in a minibatch: both are "
        "the mean over the two cuts. `error` is the largest of all. Times differ from machine to machine.",
    ]
    for kind in by_kind:
        cells = [_cells(row, kind) for row in rows if kinds[row.name] == kind]
        parts += [f"## {kind}", _table(_headings(kind), cells)]
    return "\n\n".join(parts) + "\n"


def _is_recipe(kind: str) -> bool:
    return kind in (recipe.KIND, recipe.OPTIMIZERS)


def _headings(kind: str) -> tuple[str, ...]:
    return OF_RECIPES if _is_recipe(kind) else HEADINGS


def _cells(row: Row, kind: str) -> tuple[str, ...]:
    if _is_recipe(kind):
        status = ", ".join([row.status, *(["not proved"] if row.unproved else [])])
        count = "" if row.microbatches is None else str(row.microbatches)
        return row.name, status, count, _seconds(row.compile), _error(row.loss_error), _error(row.error)
    marks = [row.status, *(["dropout"] if row.dropout else []), *(["replayed"] if row.replayed else [])]
    return (
        row.name,
        ", ".join(marks),
        _seconds(row.capture),
        "" if row.nodes is None else str(row.nodes),
        _seconds(row.compile),
        "" if row.crossing is None else f"{row.crossing / 1024:.0f}",
        _error(row.error),
    )


def _seconds(found: float | None) -> str:
    return "" if found is None else f"{found:.1f}"


def _error(found: float | None) -> str:
    return "" if found is None else "0" if found == 0 else f"{found:.0e}"


def _justified(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Words to the left, numbers to the right."""
    return [c.ljust(w) if k < 2 else c.rjust(w) for k, (c, w) in enumerate(zip(cells, widths, strict=True))]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    aligned = ["---", *(["---:"] * (len(headings) - 1))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headings, aligned, *rows))
