"""`--throttle`: the slow links that a run imitates."""

from __future__ import annotations

from pathlib import Path

from fxpipe.errors import ProfileError
from fxpipe.planner import quantity
from fxpipe.planner.device import read_device_spec
from fxpipe.planner.links import Links

EXAMPLES = "100Mbit,20ms, or a file with [links] such as `fxpipe doctor --links -o links.toml` writes"


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
            raise ProfileError(f"{text} has no [links]", where="--throttle", hint=f"give {EXAMPLES}")
        links = Links(found.bandwidth, found.latency)
    else:
        rate, comma, delay = text.partition(",")
        if rate.strip().replace(".", "", 1).isdigit():
            raise ProfileError(f"--throttle {text}: the bandwidth has no unit", hint=f"give {EXAMPLES}")
        try:
            links = Links(quantity.bandwidth(rate), quantity.seconds(delay) if comma else 0.0)
        except ProfileError as error:
            raise ProfileError(f"--throttle {text}: {error.what}", hint=f"give {EXAMPLES}") from error
    links.check(processes)
    return links
