"""Links are measured between real processes, which never outlive who asked for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import finish, fxpipe, processes, start_module, unchanged

from fxpipe.errors import RunError
from fxpipe.measure import links as link_test
from fxpipe.measure.links import SIZES, LinkReport, PairTimes, measure_links, pairs_of_group
from fxpipe.planner.device import read_device_spec
from fxpipe.runtime.wires.processes import Carrier, carriers_text
from fxpipe.runtime.wires.shared_memory import SWITCH

CHILD = "fxpipe.measure.links"


def mine(tmp_path: Path) -> list[int]:
    """The processes of a link test that were given this folder."""
    return [number for number, _ in processes(CHILD).items() if str(tmp_path) in command(number)]


def command(number: int) -> str:
    try:
        return Path(f"/proc/{number}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.multiproc
def test_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said: list[str] = []
    with unchanged(tmp_path):
        report = measure_links(2, total=1 << 20, say=said.append)
    assert (report.transport, report.workers) == ("shared memory", 2)
    assert [(p.source, p.target) for p in report.pairs] == [(0, 1), (1, 0)]
    assert carriers_text(report.carriers) == ["all pairs: shared memory: same machine, same user"]
    for pair in report.pairs:
        assert 1e-6 < pair.latency < 1.0
        assert len(pair.bandwidth) == len(SIZES)
        assert all(1e6 < rate < 1e12 for rate in pair.bandwidth)
        assert 1e-12 < pair.copy < 1e-6
    assert set(said) <= {"measured 1 of 2 pairs", "measured 2 of 2 pairs"}
    assert mine(tmp_path) == []


@pytest.mark.slow
@pytest.mark.multiproc
def test_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    result = fxpipe("doctor", "--links")
    assert "all pairs: gloo: FXPIPE_SHARED_MEMORY=0\n" in result.out


@pytest.mark.slow
@pytest.mark.multiproc
def test_processes_of_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "links.toml"
    command = ["doctor", "--links", "-o", path, "--json"]
    done = torchrun(3, *command)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert len(report["pairs"]) == 6
    links = read_device_spec(path).links
    assert links is not None
    links.check(3)
    refused = torchrun(2, *command, "-n", "2")
    assert refused.returncode
    assert "torchrun sets the number of processes" in refused.stderr


def torchrun(processes: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """fxpipe with these arguments, started by torchrun."""
    torch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "-m", "fxpipe"]
    return subprocess.run([*torch, *map(str, arguments)], capture_output=True, text=True, timeout=120)


def test_many_processes_of_a_group_measure_neighbours() -> None:
    assert len(pairs_of_group(8)) == 56
    assert pairs_of_group(9) == [(i, j) for i in range(9) for j in range(9) if abs(i - j) == 1]
    report = LinkReport("gloo", 3, PAIRS[:3], alike=False)
    assert report.coverage == "3 of 6 pairs"
    latencies = report.links.latency
    assert isinstance(latencies, tuple)
    assert [latencies[0][1], latencies[0][2], latencies[1][0], latencies[2][1]] == pytest.approx(
        [2e-5, 3e-5, 2e-5, 2e-5]
    )


@pytest.mark.multiproc
def test_a_process_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with unchanged(tmp_path), pytest.raises(RunError, match="a link needs at least two processes"):
        measure_links(1)
    assert mine(tmp_path) == []


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_nothing_is_left_behind(tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = start_module("fxpipe", "doctor", "--links", TMPDIR=str(tmp_path))
    deadline = time.monotonic() + 60
    while len(mine(tmp_path)) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, number)
    result = finish(process, 60)
    assert result.code == code, result
    assert "Traceback" not in result.err
    while mine(tmp_path) or list(tmp_path.iterdir()):  # after SIGKILL others do it
        assert time.monotonic() < deadline
        time.sleep(0.05)


PAIRS = tuple(
    PairTimes(i, j, 1e-5 * (1 + i + j), (1e9, 1e9, 2e9, 2e9), 1e-10 * (1 + i))
    for i, j in ((0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1))
)


def test_links_of_one_machine_are_one_number() -> None:
    found = LinkReport("gloo", 3, PAIRS).links
    assert (found.bandwidth, found.latency, found.copy) == pytest.approx((4e9 / 3, 3e-5, 2e-10))


def test_links_between_devices_are_a_matrix() -> None:
    found = LinkReport("nccl", 3, PAIRS).links
    found.check(3)
    assert found.copy == 0.0, "a device's copy engines do it"
    assert found.latency_of(0, 1) == pytest.approx(2e-5)
    assert found.latency_of(2, 1) == pytest.approx(4e-5)
    assert found.bandwidth_of(0, 0) == float("inf")
    pair = LinkReport("nccl", 2, PAIRS[:1]).links
    assert (pair.bandwidth, pair.latency) == pytest.approx((4e9 / 3, 2e-5))


def test_the_command_reports_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_test, "measure_links", lambda workers, say: LinkReport("gloo", workers, PAIRS))
    path = tmp_path / "new" / "links.toml"
    result = fxpipe("doctor", "--links", "-n", 3, "-o", path)
    assert result.code == 0
    assert "gloo: 1.33 GB/s · latency 30 µs · 0.20 ns of processor time for each byte, at either end" in result.out
    assert "0 → 2" in result.out
    assert result.err.strip() == f"wrote {path}: the links of gloo"
    assert read_device_spec(path).links == LinkReport("gloo", 3, PAIRS).links
    result = fxpipe("doctor", "--links", "-n", 11, "-o", path)
    assert "measured 6 of 110 pairs, which are alike" in result.out
    assert "# 6 of 110 pairs, which are alike: these are medians\n" in path.read_text()


def test_the_command_says_all_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = Carrier(0, 1, "nccl", "each process has a CUDA device of its own")
    report = LinkReport("nccl", 3, PAIRS, carriers=(nccl,))
    monkeypatch.setattr(link_test, "measure_links", lambda workers, say: report)
    said = fxpipe("doctor", "--links", "-n", 3, "--json").json
    assert (said["transport"], said["workers"]) == ("nccl", 3)
    assert said["bandwidth"][0][0] is None
    assert said["pairs"][0]["source"] == 0
    assert said["transports"] == [{"source": 0, "target": 1, "transport": "nccl", "why": nccl.why}]


def test_the_command_refuses_before_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> LinkReport:
        raise AssertionError("measured")

    monkeypatch.setattr(link_test, "measure_links", never)
    (tmp_path / "file").write_text("")
    result = fxpipe("doctor", "--links", "-o", tmp_path / "file" / "links.toml")
    assert result.code == 1
    assert "cannot be written: file is a file" in result.err
    result = fxpipe("doctor", "-o", tmp_path / "links.toml")
    assert result.code == 2
    assert "-n and -o need --links" in result.err
