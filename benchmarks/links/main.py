"""Pipelines and data parallelism on slow links, trained for real on two workers; see README.md beside this file.

Each model is first trained for its losses by every contender, whatever the link: after how many minibatches is a
training where synchronous training is after so many? Then, link by link, all contenders take turns for several rounds.
Seconds to the same loss are these minibatches times the median seconds of one on the link.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tables
from contenders import ASYNC, AUTO, DDP, PIPELINING, Contender, contenders
from hosts import Hosts, Link, hosts_of, measured_link
from measurement import Builds, Effort, say, timed, trained

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from two_hosts import missing

HERE = Path(__file__).resolve().parent
FAST = "10Gbit"
LINKS = ("10Gbit", "1Gbit", "300Mbit", "100Mbit")
LATE = "100Mbit,20ms"
GPT_LINKS = ("200Mbit", "200Mbit,50ms")
MODELS = {"snn": (*LINKS, LATE), "vgg": LINKS, "lstm": LINKS, "transformer": LINKS, "gpt": GPT_LINKS}
LOSS_OF = {"gpt": 300}
"""Minibatches after which synchronous training's loss is the one to reach; a GPT's hardly falls before that."""

CODECS = ("int8", "auto")
GOAL_DDP, GOAL_PIPELINING, GOAL_AUTO = 8.91, 3.0, 0.99

QUICK = Effort({"snn": ("300Mbit",)}, microbatches=(4,), rounds=1, seconds=0.5, loss_of={"snn": 12}, smoothed=4)


def main() -> None:
    """Measure, print the tables and keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--links", nargs="+", metavar="RATE[,TIME]", help="of every model [default: each its own]")
    parser.add_argument("--quick", action="store_true", help="one model, one link, 1 round: only to see that it runs")
    parser.add_argument("--meter", action="store_true", help="no hosts: what remains without root")
    parser.add_argument("--report", action="store_true", help="print the tables of what is in result.json")
    parser.add_argument("--out", type=Path, help="default: result.json here, or nowhere with --quick")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C does: hosts and workers go
    if options.report:
        print(tables.text(json.loads((HERE / "result.json").read_text())))
        return
    effort = QUICK
    if not options.quick:
        chosen = {name: tuple(options.links or MODELS[name]) for name in options.models}
        effort = Effort(chosen, rounds=options.rounds, loss_of=LOSS_OF)
    reason = "--meter" if options.meter else missing(0.01)
    if reason:
        print(f"no hosts with a link between them ({reason}): fxpipe's meter alone, and DDP computed\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="fxpipe_links_") as folder:
        result = measure(effort, reason, Path(folder))
    out = options.out or (None if options.quick else HERE / "result.json")
    if out and out.exists():
        result = with_earlier(result, json.loads(out.read_text()))
    text = tables.text(result)
    print(text)
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")
    if not options.quick and not options.out:
        tables.write_between_markers(text, HERE / "README.md")
    if not options.quick and tables.missed(result["goals"]):
        raise SystemExit(1)


def measure(effort: Effort, reason: str | None, folder: Path) -> dict[str, Any]:
    """All models on all links; a row for each model and link.

    Args:
        reason: why there are no hosts; None if there are.
    """
    sides = {
        name: [s for s in contenders(CODECS, effort.microbatches, name != "gpt") if not reason or _metered(s)]
        for name in effort.links
    }
    builds = Builds(folder)
    found: dict[str, Any] = {"losses": {}, "rows": [], "reason": reason, "codecs": list(CODECS)}
    begin = time.monotonic()
    for name in effort.links:
        say(begin, f"{name}: compile, and train {len(sides[name])} contenders for their losses")
        found["losses"][name] = trained(name, sides[name], builds, effort, reason is None)
    for text in sorted({text for links in effort.links.values() for text in links}, key=_as_listed):
        link = Link.of(text)
        with hosts_of(link, real=reason is None) as hosts, _checked(hosts, link, reason is None) as checks:
            rows = []
            for name in (name for name, links in effort.links.items() if text in links):
                say(begin, f"{name}, {text}: {effort.rounds} rounds of {len(sides[name])} contenders")
                row = timed(name, sides[name], builds, effort, hosts, link, found["losses"][name], reason is None)
                print(tables.row_text(row), flush=True)
                rows.append(row)
        for row in rows:
            found["rows"].append({**row, "link_measured": checks})
    found["goals"] = goals(found["rows"])
    return found


def with_earlier(result: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """A result, with the rows of an earlier one whose model and link were not measured again."""
    rows = {(row["model"], row["link"]["text"]): row for row in [*earlier["rows"], *result["rows"]]}
    losses = {**earlier["losses"], **result["losses"]}
    ordered = sorted(rows.values(), key=lambda row: (_as_listed(row["link"]["text"]), list(losses).index(row["model"])))
    return {**result, "losses": losses, "rows": ordered, "goals": goals(ordered)}


def goals(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each goal, what is reached, and where; only of those that were measured."""
    gpts = [row for row in rows if row["model"] == "gpt"]
    fast = [row for row in rows if row["link"]["text"] == FAST]
    asked = (
        ("the samples/s of DDP", GOAL_DDP, max, tables.times_as_fast, DDP.name, rows),
        ("as soon at DDP's loss", GOAL_DDP, max, tables.times_as_soon, DDP.name, rows),
        (f"the samples/s of {PIPELINING}", GOAL_PIPELINING, max, tables.times_as_fast, PIPELINING, gpts),
        (f"as soon at the loss of {PIPELINING}", GOAL_PIPELINING, max, tables.times_as_soon, PIPELINING, gpts),
        (f"the samples/s of {ASYNC.name}, by {AUTO},", GOAL_AUTO, min, tables.gain_of_auto, ASYNC.name, fast),
    )
    found = []
    for what, goal, best, ratio, against, among in asked:
        there = [(ratio(row, against), row) for row in among if against in row["seconds"]]
        known = [(times, f"{row['model']}, {row['link']['text']}") for times, row in there if times is not None]
        if known:
            times, where = best(known)
            which = "at best" if best is max else "at worst"
            found.append({"what": f"{what} {which}", "goal": goal, "times": times, "where": where})
    return found


@contextmanager
def _checked(hosts: Hosts, link: Link, real: bool) -> Iterator[list[dict[str, float]]]:
    """What `fxpipe doctor --links` finds before and after."""
    found: list[dict[str, float]] = []
    if real:
        found.append(measured_link(hosts))
    yield found
    if real:
        found.append(measured_link(hosts))
        print(tables.link_text(asdict(link), found), flush=True)


def _metered(side: Contender) -> bool:
    """Whether fxpipe's meter can slow it, or nothing needs to."""
    return side.kind in ("fxpipe", "alone")


def _as_listed(text: str) -> tuple[int, str]:
    known = [*LINKS, LATE, *GPT_LINKS]
    return (known.index(text) if text in known else len(known), text)


if __name__ == "__main__":
    main()
