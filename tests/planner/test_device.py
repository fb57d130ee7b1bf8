"""Devices that are not here: by name, and from TOML files whose mistakes are named with their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxpipe.errors import ProfileError
from fxpipe.planner.device import BUILT_IN, CPU, LAUNCH, Device, DeviceSpec, links_toml, read_device_spec
from fxpipe.planner.links import GLOO_LOOPBACK, Links, matrix

INFINITE = float("inf")
FULL = """\
[device]
name = "mine"
flops = {bfloat16 = "400T", float32 = 6e13}
bandwidth = "2TB/s"
memory = "80GiB"
launch = "3us"

[links]
bandwidth = "10Gbit"
latency = [[0, "50us"], [0.001, 0]]
copy = "0.3ns"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "spec.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_node_takes_the_longer_of_work_and_traffic_and_a_launch() -> None:
    device = Device("d", 100.0, 10.0, launch=1.0)
    assert device.seconds(1000.0, 10.0, "float32") == 11.0
    assert device.seconds(10.0, 1000.0, "float32") == 101.0


def test_flops_are_a_dtypes_own() -> None:
    device = Device("d", {"float32": 1.0, "bfloat16": 8.0, "float64": 0.5}, 1.0)
    assert [device.flops_of(d) for d in ("float32", "bfloat16", "float64", "int8")] == [1.0, 8.0, 0.5, 1.0]
    assert Device("d", {"float16": 4.0, "bfloat16": 2.0}, 1.0).flops_of("float64") == 2.0
    assert Device("d", 3.0, 1.0).flops_of("bfloat16") == 3.0


def test_built_in_devices() -> None:
    assert set(BUILT_IN) == {
        "cpu",
        "h100",
        "h200",
        "a100",
        "v100",
        "l4",
        "t4",
        "rtx3060",
        "rtx3090",
        "rtx4090",
        "rtx5090",
    }
    assert read_device_spec("H100") == DeviceSpec(BUILT_IN["h100"])
    assert read_device_spec("RTX-4090") == DeviceSpec(BUILT_IN["rtx4090"])
    pcie, half, next_one = (read_device_spec(name).links for name in ("pcie4", "pcie3", "pcie4x8"))
    assert pcie is not None
    assert half is not None
    assert next_one is not None
    assert pcie.bandwidth_of(0, 1) == pytest.approx(0.7 * 31.5e9)
    assert half.bandwidth_of(0, 1) == pytest.approx(next_one.bandwidth_of(0, 1), rel=0.01)
    h100, a100, v100 = (BUILT_IN[name] for name in ("h100", "a100", "v100"))
    assert h100.flops_of("bfloat16") == pytest.approx(0.6 * 989.4e12)
    assert h100.flops_of("bfloat16") > 3 * a100.flops_of("float16") * 0.9
    assert v100.flops_of("bfloat16") < v100.flops_of("float16"), "it has no units for bfloat16"
    assert (h100.memory, h100.launch) == (80e9, 5e-6)
    assert h100.bandwidth == pytest.approx(0.8 * 3.35e12)
    assert (CPU.flops, CPU.bandwidth, CPU.launch) == (50e9, 10e9, 2e-6), "cuts of --cost analytic hang on them"


def test_a_file_says_it_all(tmp_path: Path) -> None:
    assert read_device_spec(write(tmp_path, FULL)) == DeviceSpec(
        Device("mine", {"bfloat16": 400e12, "float32": 6e13}, 2e12, 80 * 2.0**30, pytest.approx(3e-6)),
        Links(1.25e9, ((0.0, 50 * 1e-6), (0.001, 0.0)), 0.3 * 1e-9),
    )


def test_a_file_may_leave_out_what_it_does_not_know(tmp_path: Path) -> None:
    assert read_device_spec(write(tmp_path, "")) == DeviceSpec()
    assert read_device_spec(write(tmp_path, "[links]\nlatency = '1ms'")) == DeviceSpec(links=Links(latency=1e-3))
    found = read_device_spec(write(tmp_path, "[device]\nflops = '400T'\nbandwidth = '2TB/s'")).device
    assert found == Device("spec", 400e12, 2e12, INFINITE, LAUNCH), "named by its file"
    found = read_device_spec(write(tmp_path, "[device]\nname = 'h200'\nmemory = '96GB'")).device
    assert found is not None
    assert (found.memory, found.flops) == (96e9, BUILT_IN["h200"].flops), "a built-in lends the rest"


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("[device]\nname = \n", "spec.toml:2", "not TOML"),
        ("[devices]\nname = 'x'", "spec.toml, $", "there is no 'devices', did you mean 'device'?"),
        ("device = 'h100'", "spec.toml, $.device", "expected object | null, got str"),
        ("[device]\nnam = 'h100'", "spec.toml, $.device", "there is no 'nam', did you mean 'name'?"),
        ("[device]\nname = 3", "spec.toml, $.device.name", "expected str | null, got int"),
        ("[device]\nname = 'x'\nflops = '4T'", "spec.toml, [device]", "'x' has no bandwidth"),
        ("[device]\nflops = '4 apples'\nbandwidth = 1", "spec.toml, [device] flops", "'4 apples' is not a rate"),
        ("[device]\nflops = true\nbandwidth = 1", "spec.toml, $.device.flops", "got bool"),
        ("[device]\nflops = {}\nbandwidth = 1", "spec.toml, [device] flops", "the table of dtypes is empty"),
        (
            "[device]\nflops = {float23 = 1}\nbandwidth = 1",
            "spec.toml, [device] flops",
            "unknown dtype 'float23', did you mean 'float32'",
        ),
        ("[device]\nflops = 1\nbandwidth = -1", "spec.toml, [device] bandwidth", "-1 is not a bandwidth"),
        ("[device]\nname = 'h100'\nlaunch = inf", "spec.toml, [device] launch", "inf is not a time"),
        ("[links]\nbandwidth = [[1, 2], [3]]", "spec.toml, [links] bandwidth", "the matrix is not square"),
        ("[links]\nlatency = [[0, 'x'], [1, 0]]", "spec.toml, [links] latency", "'x' is not a time"),
        ("[links]\ncopy = [1]", "spec.toml, $.links.copy", "got array"),
    ],
)
def test_mistakes_are_named_with_their_place(tmp_path: Path, text: str, where: str, what: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ProfileError) as caught:
        read_device_spec(path)
    assert caught.value.where == str(path.parent / where)
    assert what in str(caught.value)


def test_names_of_no_device_and_of_no_file(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"no device 'h10', did you mean 'h100'") as caught:
        read_device_spec("h10")
    assert "built in are cpu, h100, h200, a100, v100, l4, t4, rtx3060" in str(caught.value)
    with pytest.raises(ProfileError, match=r"none\.toml cannot be read: No such file"):
        read_device_spec(tmp_path / "none.toml")
    with pytest.raises(ProfileError, match="cannot be read: Is a directory"):
        read_device_spec(tmp_path)


@pytest.mark.parametrize(
    "links",
    [GLOO_LOOPBACK, Links(), Links(matrix([[INFINITE, 1 / 3], [2e9, INFINITE]]), matrix([[0, 1e-5 / 3], [1, 0]]), 0.1)],
)
def test_links_are_written_as_they_are_read(tmp_path: Path, links: Links) -> None:
    text = links_toml(links, "measured\nsomewhere")
    assert text.startswith("# measured\n# somewhere\n[links]\n")
    assert read_device_spec(write(tmp_path, text)) == DeviceSpec(links=links)


def test_links_over_which_nothing_travels_are_refused() -> None:
    """All that is wrong at once; what a worker would send itself may be anything."""
    with pytest.raises(ProfileError) as caught:
        Links(((0.0, 1.0), (0.0, 0.0)), -1.0, float("inf"))
    assert "0.0 bytes a second from worker 1 to 0; a latency of -1.0 s; inf s a byte" in str(caught.value)
    Links(((0.0, 1.0), (1.0, 0.0)))
