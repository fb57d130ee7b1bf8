"""The options of costs, as `compile` and `plan` have them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from fxpipe.cli.command import option_fields
from fxpipe.cli.cost_options import CostOptions
from fxpipe.errors import ProfileError
from fxpipe.lowering.options import CompileOptions
from fxpipe.options import flags
from fxpipe.planner.device import BUILT_IN, BUSES
from fxpipe.planner.links import GLOO_LOOPBACK, NCCL_NODE, Links

INFINITE = float("inf")
LINKS = Links(1e9, 1e-4, 1e-9)
FILE = """\
[device]
flops = "1T"
bandwidth = "1GB/s"
memory = "8GB"
[links]
bandwidth = 1e9
latency = 1e-4
copy = 1e-9
"""


def write(folder: Path, text: str, name: str = "spec.toml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def parsed(*arguments: str, workers: int = 2, **more: Any) -> CompileOptions:
    """What the options mean for a compile."""
    got: list[CompileOptions] = []

    @click.command()
    @option_fields(CompileOptions, "cost")
    @option_fields(CostOptions, *flags(CostOptions))
    def command(cost: Any, **costs: Any) -> None:
        got.append(CostOptions.of(costs).applied(CompileOptions(workers=workers, cost=cost), **more))

    result = CliRunner().invoke(command, arguments, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return got[0]


def chosen(cost: Any, device: Any, links: Any, speeds: Any, memory: Any) -> CompileOptions:
    return CompileOptions(len(speeds), cost=cost, device=device, links=links, speeds=speeds, memory=memory)


def test_without_options() -> None:
    assert parsed() == chosen("measured", None, None, (1.0, 1.0), (INFINITE, INFINITE))


def test_every_option_is_read() -> None:
    found = parsed(
        "--cost", "analytic", "--bandwidth", "10Gbit", "--latency", "1ms", "--speed", "1,0.5", "--memory", "8GB,1GiB"
    )
    assert found == chosen("analytic", None, Links(1.25e9, 1e-3, GLOO_LOOPBACK.copy), (1.0, 0.5), (8e9, 2.0**30))


def test_a_device_is_computed_for() -> None:
    found = parsed("--device-spec", "h200", workers=3)
    assert found == chosen("analytic", BUILT_IN["h200"], NCCL_NODE, (1.0,) * 3, (141e9,) * 3)
    assert parsed("--device-spec", "h200", "--cost", "analytic", workers=1).cost == "analytic"
    with pytest.raises(click.UsageError, match="leave out --cost measured"):
        parsed("--device-spec", "h200", "--cost", "measured", workers=1)


def test_workers_may_have_other_devices() -> None:
    found = parsed("--device-spec", "rtx-4090,rtx-3060", "--links", "pcie4")
    big, small = BUILT_IN["rtx4090"], BUILT_IN["rtx3060"]
    assert found == chosen("analytic", big, BUSES["pcie4"], (1.0, small.speed_beside(big)), (24e9, 12e9))
    assert small.speed_beside(big) == pytest.approx((25.5 / 165.2 * 0.36 / 1.008) ** 0.5)
    with pytest.raises(click.UsageError, match="--device-spec gives 2 devices for 3 workers"):
        parsed("--device-spec", "rtx4090,t4", workers=3)


def test_a_file_says_what_options_do_not(tmp_path: Path) -> None:
    path = write(tmp_path, FILE)
    found = parsed("--device-spec", path)
    assert found.device is not None
    assert found.device.name == "spec"
    assert (found.cost, found.links, found.speeds, found.memory) == ("analytic", LINKS, (1.0, 1.0), (8e9, 8e9))
    found = parsed("--device-spec", path, "--speed", "2,2", "--memory", "4GB", "--latency", "0s")
    assert (found.links, found.speeds, found.memory) == (Links(1e9, 0.0, 1e-9), (2.0, 2.0), (4e9, 4e9))


def test_a_file_without_a_device_leaves_costs_measured(tmp_path: Path) -> None:
    found = parsed("--device-spec", write(tmp_path, "[links]\nbandwidth = 1e9"))
    assert (found.cost, found.device, found.links) == ("measured", None, Links(1e9))


def test_links_come_from_their_own_file_first(tmp_path: Path) -> None:
    links = write(tmp_path, "[links]\nbandwidth = '2GB/s'", "links.toml")
    assert parsed("--links", links, "--device-spec", write(tmp_path, FILE)).links == Links(2e9)
    assert parsed("--links", links, "--bandwidth", "3GB/s").links == Links(3e9)
    with pytest.raises(ProfileError, match=r"has no \[links\]"):
        parsed("--links", write(tmp_path, "[device]\nname = 'h100'", "other.toml"))
    with pytest.raises(ProfileError, match="no links 'pcie9', did you mean 'pcie5'") as caught:
        parsed("--links", "pcie9")
    assert caught.value.hint == f"built in are {', '.join(BUSES)}; any other is a TOML file"


def test_one_part_of_the_links_changes_the_default() -> None:
    assert parsed("--latency", "1ms", default_links=NCCL_NODE).links == Links(NCCL_NODE.bandwidth, 1e-3, NCCL_NODE.copy)


def test_a_matrix_for_another_number_of_workers(tmp_path: Path) -> None:
    path = write(tmp_path, "[links]\nbandwidth = [[0, 1], [1, 0]]")
    assert parsed("--links", path).links is not None
    with pytest.raises(ProfileError, match="2×2, for 3 workers it must be 3×3"):
        parsed("--links", path, workers=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--speed", "1"), "--speed gives 1 speeds for 2 workers"),
        (("--speed", "1,x"), "--speed: 'x' is not a speed; give numbers above zero with commas"),
        (("--speed", "1,-1"), "--speed: '-1' is not a speed"),
        (("--speed", "1,inf"), "--speed: 'inf' is not a speed"),
        (("--memory", "1GB,1GB,1GB"), "--memory gives 3 sizes for 2 workers"),
        (("--memory", "much"), "--memory: 'much' is not a size of memory; write it as 80GiB"),
        (("--bandwidth", "fast"), "--bandwidth: 'fast' is not a bandwidth"),
        (("--latency", "10Gbit"), "--latency: '10Gbit' is not a time"),
        (("--cost", "guessed"), "'guessed' is not one of"),
    ],
)
def test_wrong_options_are_wrong_commands(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        parsed(*options)
    assert message in str(caught.value)


def test_they_import_nothing_heavy() -> None:
    script = "import sys, fxpipe.cli.cost_options; sys.exit(not {'torch', 'numpy', 'rich'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize(("option", "text"), [("--latency", "50"), ("--bandwidth", "10"), ("--memory", "80,80")])
def test_a_number_without_its_unit_is_refused(option: str, text: str) -> None:
    with pytest.raises(click.UsageError, match="has no unit"):
        parsed(option, text)
    assert parsed("--latency", "0").links is not None
