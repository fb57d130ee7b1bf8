"""`--throttle`: the links that a run is to have, as people write them."""

from __future__ import annotations

from pathlib import Path

from fxpipe.errors import ProfileError
from fxpipe.planner import quantity
from fxpipe.planner.device import read_device_spec
from fxpipe.planner.links import Links

EXAMPLES = "100Mbit,20ms, or a file with [links] such as `fxpipe doctor --links -o links.toml` writes"


def read_throttle(text: str | None, processes: int) -> Links | None:
    """The links between processes: of `100Mbit,20ms` (bandwidth and latency of every direction of every link), of
    `100Mbit`, or of a file.

    None stays None. Copying costs nothing: what the run's own messages cost comes on top.

    Raises:
        ProfileError: it is none of these; or a matrix is for another number of processes.
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
