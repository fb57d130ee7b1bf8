"""What `fxpipe doctor --pair` says on each of two hosts, for each thing that may be wrong between them."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import fxpipe
from two_hosts import Host, missing, two_hosts

from fxpipe.errors import RunError
from fxpipe.measure import pair
from fxpipe.measure.pair import INTERFACES, Finding, Pair, compare

FACTS = dict.fromkeys(pair.VERSIONS, "1")
CLONE_NEWNET = 0x40000000
RATE = 400e6


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    if reason := missing():
        pytest.skip(reason)
    with two_hosts(RATE) as both:
        yield both


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured, and nobody waits long."""
    monkeypatch.setattr(pair, "ANSWER", 0.5)
    monkeypatch.setattr(Pair, "_measured", lambda *_: Finding("messages", "measured"))
    for variable in INTERFACES:
        monkeypatch.delenv(variable, raising=False)


def on(host: Host, other: Pair) -> list[Finding]:
    """What is found on a host: the thread that looks has the host's network."""
    with open(f"/run/netns/{host.name}") as network:
        assert ctypes.CDLL(None).setns(network.fileno(), CLONE_NEWNET) == 0
    return list(other.findings())


def pairs(hosts: tuple[Host, Host]) -> list[Pair]:
    """For each host, what looks for the other one."""
    return [Pair(other.address, pair.PORT, 5.0, FACTS, lambda text: None) for other in reversed(hosts)]


def looked(hosts: tuple[Host, Host], both: list[Pair] | None = None) -> tuple[list[Finding], ...]:
    """What each finds."""
    with ThreadPoolExecutor(2) as threads:
        return tuple(threads.map(on, hosts, both or pairs(hosts)))


def do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def lose(host: Host, ports: str) -> None:
    """What the host sends to these ports goes to an address of nobody."""
    nobody = "10.213.77.99"
    do("ip", "-n", host.name, "neigh", "add", nobody, "lladdr", "02:00:00:00:00:99", "dev", host.interface)
    do("ip", "-n", host.name, "route", "add", "default", "via", nobody, "table", "99")
    do("ip", "-n", host.name, "rule", "add", "ipproto", "tcp", "dport", ports, "lookup", "99")


def wrong(findings: list[Finding]) -> list[Finding]:
    """All that does not work, but for the interface: these hosts have the name of the machine on which they are."""
    return [each for each in findings if each.do is not None and each.what != "interface"]


@pytest.mark.usefixtures("quick")
def test_a_port_that_one_direction_does_not_reach(hosts: tuple[Host, Host]) -> None:
    lose(hosts[1], str(pair.PORT))
    for findings in looked(hosts):
        blocked, unmeasured = wrong(findings)
        assert blocked.what == "10.213.77.2 → 10.213.77.1"
        assert "port 29500 does not answer, and the other direction works" in blocked.seen
        assert str(blocked.do).startswith("on 10.213.77.1, let 10.213.77.2 through the firewall")
        assert unmeasured.what == "messages"


@pytest.mark.usefixtures("quick")
def test_ports_that_the_system_chooses(hosts: tuple[Host, Host]) -> None:
    lose(hosts[0], "32768-60999")
    do("ip", "-n", hosts[0].name, "rule", "add", "ipproto", "tcp", "sport", str(pair.PORT), "lookup", "main")
    for findings in looked(hosts):
        there, back, _ = sorted(wrong(findings), key=lambda each: each.what)
        assert (there.what, back.what) == ("10.213.77.1 → 10.213.77.2", "10.213.77.2 → 10.213.77.1")
        assert "a port that 10.213.77.2 chose does not answer" in there.seen
        assert str(there.do).startswith("on 10.213.77.2, let 10.213.77.1 through the firewall, at all ports")


@pytest.mark.usefixtures("quick")
def test_packets_of_full_size(hosts: tuple[Host, Host]) -> None:
    small = ["tbf", "rate", "1gbit", "burst", "1200", "limit", "1m"]  # which drops what is larger than its burst
    do("tc", "-n", hosts[0].name, "qdisc", "replace", "dev", hosts[0].interface, "root", *small)
    for findings in looked(hosts):
        lost, _ = wrong(findings)
        assert (lost.what, lost.seen) == (
            "10.213.77.1 → 10.213.77.2",
            "a port that 10.213.77.2 chose answers, but full packets are lost",
        )
        assert "mtu 1400" in str(lost.do)


@pytest.mark.usefixtures("quick")
def test_clocks_versions_and_names(hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch) -> None:
    both = pairs(hosts)
    both[0].facts["torch"] = "2"
    both[0].clock = lambda: time.time() + 7
    both[1].name = "localhost"
    for variable, value in zip(INTERFACES, (None, "fx-left"), strict=True):
        if value:
            monkeypatch.setenv(variable, value)
    for k, findings in enumerate(looked(hosts, both)):
        by_what = {each.what: each for each in findings}
        assert by_what["clocks"].seen == ("10.213.77.1 is 7.0 s ahead of 10.213.77.2")
        assert "timedatectl" in str(by_what["clocks"].do)
        assert by_what["torch"].do == "install the same torch on both"
        assert "versions" not in by_what
        assert by_what["messages"].do is None
        _left, right = [each for each in findings if each.what == "interface"][:: -1 if k else 1]
        assert "NCCL_SOCKET_IFNAME=fx-left" in right.seen
        assert right.do == "on 10.213.77.2: export GLOO_SOCKET_IFNAME=fx-right NCCL_SOCKET_IFNAME=fx-right"


@pytest.mark.usefixtures("quick")
def test_a_name_that_leads_to_the_host_itself(hosts: tuple[Host, Host]) -> None:
    both = pairs(hosts)
    both[1].name = "localhost"
    findings, _ = looked(hosts, both)
    (named,) = [each for each in findings if each.what == "interface" and "the name localhost" in each.seen]
    assert "gloo would listen at 127.0.0.1, where no other machine can connect" in named.seen
    assert named.do == "on 10.213.77.2: export GLOO_SOCKET_IFNAME=fx-right NCCL_SOCKET_IFNAME=fx-right"


@pytest.mark.usefixtures("quick")
def test_nobody_is_there(hosts: tuple[Host, Host]) -> None:
    alone = Pair(hosts[1].address, pair.PORT, 1.0, FACTS, lambda text: None)
    with ThreadPoolExecutor(1) as threads:
        (absent,) = threads.submit(on, hosts[0], alone).result()
    assert absent.seen == "nothing answers at port 29500 after 1 s: refused (nothing listens there yet)"
    assert "run this command there, too" in str(absent.do)


@pytest.mark.usefixtures("quick")
def test_what_cannot_be_tried(free: int) -> None:
    with pytest.raises(RunError, match=r"127\.0\.0\.2 is this machine"):
        list(Pair("127.0.0.2", free, 5.0, FACTS, lambda text: None).findings())
    result = fxpipe("doctor", "--pair", f"no-such-name.invalid:{free}", "--json")
    assert result.code == 1
    (unknown,) = json.loads(result.out)["findings"]
    assert "this machine knows no address" in unknown["seen"]


@pytest.fixture
def free() -> int:
    from commands import free_port

    return free_port()


def test_a_build_that_differs() -> None:
    assert [each.do for each in compare(FACTS, FACTS, "a", "b")] == [None]
    (differs,) = compare(FACTS | {"stage_0.py": "12"}, FACTS | {"stage_0.py": "13"}, "a", "b")
    assert differs.seen == "12 on a, 13 on b"
    assert str(differs.do).startswith("copy the build")


def test_the_command_refuses() -> None:
    for arguments in (["--pair", "node1:x"], ["--pair", "a", "--links"], ["--wait", "3"], ["--pair", "node1:99999"]):
        assert fxpipe("doctor", *arguments).code == 2


def begin(hosts: tuple[Host, Host], *arguments: object) -> list[subprocess.Popen[str]]:
    """Start the command on both."""
    command = [sys.executable, "-m", "fxpipe", "doctor", "--pair"]
    return [
        host.start([*command, other.address, *arguments], Path("/"))
        for host, other in zip(hosts, reversed(hosts), strict=True)
    ]


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_sound_pair(hosts: tuple[Host, Host]) -> None:
    done = [(process, *process.communicate(timeout=120)) for process in begin(hosts, "--json")]
    assert [process.returncode for process, *_ in done] == [0, 0], done
    first, second = (json.loads(out) for _, out, _ in done)
    assert first["links"] == second["links"]
    assert first["wrong"] == 0
    assert all(rate * 8 < 1.2 * RATE for each in first["links"]["pairs"] for rate in each["bandwidth"])
    assert first["findings"][-1]["seen"].startswith("gloo: 10.213.77.")
    assert all("MTU" in each["seen"] for each in first["findings"] if each["what"] == "interface")


@pytest.mark.slow
@pytest.mark.multiproc
def test_nothing_is_left_behind(hosts: tuple[Host, Host]) -> None:
    started = begin(hosts)
    until = time.monotonic() + 60
    while len(running(hosts[0])) < 3:  # the command, its guardian, and what measures
        assert time.monotonic() < until, [process.poll() or process.communicate() for process in started]
        time.sleep(0.05)
    os.kill(started[0].pid, signal.SIGINT)
    assert (started[0].wait(30), started[1].wait(30)) == (130, 1)
    assert "it has stopped answering" in started[1].communicate()[0]
    while running(hosts[0]) or running(hosts[1]):
        assert time.monotonic() < until, [process.poll() or process.communicate() for process in started]
        time.sleep(0.05)


def running(host: Host) -> list[str]:
    """The processes on a host."""
    return subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True).stdout.split()
