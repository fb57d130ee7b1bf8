"""`fxpipe plan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import QUICK, fxpipe
from model_files import write_model


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Forward is heavy at the end, backward at the beginning: shared cuts cannot balance both."""
    size = {"output_bytes": 100, "saved_bytes": 200, "parameter_bytes": 500}
    units = [{"name": f"u{i}", "forward_ms": i + 1, "backward_ms": 4 - i, **size} for i in range(4)]
    units += [{"name": "head", "forward_ms": 10, "backward_ms": 0, **size}]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"units": units}))
    return path


@pytest.fixture
def digits() -> Path:
    return Path(__file__).parents[2] / "examples" / "digits.py"


def test_json_compares_the_modes(profile: Path) -> None:
    found = fxpipe("plan", profile, "-n", "2", "--no-communication", "--json").json
    assert found["ideal_ms"] == 15.0
    assert found["same"]["forward_cuts"] == found["same"]["backward_cuts"] == [3]
    assert found["same"]["bottleneck_ms"] == 15.0
    for mode in ("same", "bidirectional", "three-way"):
        assert found[mode]["efficiency"] == pytest.approx(1.0)
        assert len(found[mode]["memory_bytes"]) == 2
        assert found[mode]["exact"]
        assert found[mode]["simulated_ms"] == pytest.approx(15.0)


def test_independent_cuts_gain(tmp_path: Path) -> None:
    units = [{"name": f"u{i}", "forward_ms": f, "backward_ms": b} for i, (f, b) in enumerate([(1, 9), (6, 2), (5, 1)])]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"units": units}))
    found = fxpipe("plan", path, "-n", "2", "--no-communication", "--json").json
    assert (found["same"]["bottleneck_ms"], found["bidirectional"]["bottleneck_ms"]) == (14.0, 12.0)
    assert (found["bidirectional"]["forward_cuts"], found["bidirectional"]["backward_cuts"]) == ([1], [2])


def test_messages_cost(profile: Path) -> None:
    free = fxpipe("plan", profile, "-n", "3", "--no-communication", "--json").json
    assert free["bidirectional"]["bottleneck_ms"] <= free["same"]["bottleneck_ms"]
    slow = fxpipe("plan", profile, "-n", "3", "--bandwidth", "100kB/s", "--latency", "1ms", "--json").json
    assert slow["same"]["bottleneck_ms"] > free["same"]["bottleneck_ms"]
    assert slow["same"]["workers"][1]["exposed"] >= 2.0, "a worker in the middle waits for two messages"


def test_the_table_has_milliseconds(profile: Path) -> None:
    text = fxpipe("plan", profile, "-n", "2", "--no-communication", "--cuts", "same").out
    first = text.splitlines()[3].split()
    assert first[:3] == ["0", "u0", "(3)"]
    assert first[5:7] == ["6.00", "9.00"]  # F of 1 + 2 + 3, B of 4 + 3 + 2
    assert first[11] == "15.00"


def test_table_and_speeds(profile: Path) -> None:
    result = fxpipe("plan", profile, "-n", "3", "--speed", "1,1,0.5", "--no-communication", "--cuts", "bidirectional")
    assert result.code == 0
    assert "same" not in result.out
    assert "ideal 12.00 ms a microbatch · 5 units · no communication" in result.out


def test_what_does_not_fit_says_what_would(profile: Path) -> None:
    result = fxpipe("plan", profile, "-n", "2", "--memory", "1kB")
    assert result.code == 1
    assert "no three-way plan for 2 workers fits into memory: the least that would be enough is" in result.err
    assert "hint: give every worker" in result.err
    short = ("plan", profile, "-n", "2", "--cuts", "same", "--memory", "5kB")
    one = fxpipe(*short, "--recompute", "none")
    assert "or use -n 3; or let backwards compute values again (--recompute auto)" in one.err
    found = fxpipe(*short, "--json").json["same"]
    assert max(found["memory_bytes"]) <= 5000
    assert max(worker["recompute"] for worker in found["workers"]) > 0
    assert all(worker["values"] <= worker["memory"] for worker in found["workers"]), "both are bytes"


def test_a_model_is_planned_without_being_written(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = fxpipe("plan", digits, "-n", "4", "--cost", "analytic", "--cuts", "same", "--json").json
    assert not list(tmp_path.iterdir())
    assert found["same"]["samples_per_second"] > 0
    assert set(found) == {"ideal_ms", "units", "microbatches", "same"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--no-communication", "--speed", "1"), "gives 1 speeds for 2 workers"),
        (("--no-communication", "--speed", "1,x"), "not a speed"),
        (("--no-communication", "--bandwidth", "1GB/s"), "contradicts"),
        (("--device-spec", "h100"), "a profile has its own times"),
        (("--weight-fraction", "1"), "not in the range"),
    ],
)
def test_requests_that_make_no_sense(profile: Path, options: tuple[str, ...], message: str) -> None:
    result = fxpipe("plan", profile, *options)
    assert result.code == 2
    assert message in result.err


def test_a_policy_that_makes_no_sense_is_refused(profile: Path) -> None:
    result = fxpipe("plan", profile, "-n", "4", "--policy", "2bw", "--no-communication")
    assert result.code == 1
    assert "with schedule 'async' on 4 workers and microbatches=1 a forward misses 3 updates" in result.err
    fits = fxpipe("plan", profile, "-n", "3", "--policy", "2bw", "--microbatches", "2", "--cuts", "same", "--json")
    assert fits.code == 0, fits.err


def test_numbers_of_microbatches_are_compared(digits: Path) -> None:
    arguments = ("plan", digits, "-n", "3", "--microbatches", "1,3,4", "--cost", "analytic")
    rows = {row["microbatches"]: row for row in fxpipe(*arguments, "--json").json["schedules"]}
    assert "do not divide a batch of" in rows[3]["why"]
    assert {rows[i]["schedule"] for i in (1, 4)} == {"async"}
    assert [rows[i]["staleness"] for i in (1, 4)] == [2, 1]
    alone = fxpipe("plan", digits, "-n", "3", "--microbatches", "4", "--cost", "analytic", "--json").json
    chosen = alone[rows[4]["cuts"]]
    assert 1e3 * rows[4]["seconds"] / 4 == pytest.approx(chosen["simulated_ms"])
    assert rows[4]["memory_bytes"] == pytest.approx(max(chosen["memory_bytes"]))
    table = fxpipe(*arguments)
    assert table.code == 0
    assert "every schedule, 3 microbatches: 3 microbatches do not divide a batch of" in table.out


def test_profiles_are_compared_by_time(profile: Path) -> None:
    found = fxpipe("plan", profile, "-n", "3", "--microbatches", "1,2", "--policy", "2bw", "--json").json
    best, refused = found["schedules"]
    assert found["samples"] is None
    assert (best["microbatches"], best["policy"]) == (2, "2bw")
    assert "a forward misses 2 updates" in refused["why"]
    nothing = fxpipe("plan", profile, "-n", "4", "--microbatches", "1,2", "--policy", "2bw")
    assert nothing.code == 1
    assert "with async 3" in nothing.err


@pytest.mark.parametrize("text", ["0", "a", "1,,2", "2,x"])
def test_microbatches_that_are_no_numbers(profile: Path, text: str) -> None:
    result = fxpipe("plan", profile, "--microbatches", text)
    assert result.code == 2
    assert "is not a number of microbatches from 1 to 4096, nor a list of them: 1,2,4,8" in result.err


@pytest.fixture
def heavy_end(tmp_path: Path) -> Path:
    """Layers that compute, and a last one that has the weights: as VGG."""
    units = [
        {"name": f"conv{i}", "forward_ms": 10, "backward_ms": 20, "output_bytes": 1e4, "parameter_bytes": 1e3}
        for i in range(13)
    ]
    units.append({"name": "fc", "forward_ms": 2, "backward_ms": 4, "output_bytes": 1e3, "parameter_bytes": 4e7})
    path = tmp_path / "heavy_end.json"
    path.write_text(json.dumps({"units": units}))
    return path


def test_replicas_are_chosen(heavy_end: Path) -> None:
    asked = ("plan", heavy_end, "--gpus", "8", "--bandwidth", "100MB/s", "--latency", "0us")
    found = fxpipe(*asked, "--json").json
    assert found["processes"] == found["microbatches"] == 8
    assert found["shared_out_evenly"]
    same = found["same"]
    assert same["replicas"] == [7, 1]
    assert same["configuration"] == "7-1"
    assert same["processes"] == 8
    assert same["minibatch_ms"] == pytest.approx(8 * same["bottleneck_ms"])
    assert len(same["memory_bytes"]) == 2
    assert found["data_parallel"]["replicas"] == [8]
    assert found["pipeline"]["replicas"] == [1] * 8
    assert same["minibatch_ms"] < 0.5 * found["data_parallel"]["minibatch_ms"]
    assert found["three-way"]["minibatch_ms"] <= found["pipeline"]["minibatch_ms"]
    shown = fxpipe(*asked).out
    assert "same, 7-1: " in shown
    assert shown.splitlines()[3].split()[:2] == ["0", "7"]
    assert "--microbatches 7" in shown
    assert " · 8 microbatches a minibatch, each as large as the profile's · " in shown
    assert "data parallelism" in shown


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("cpu: AMD EPYC 9654, 2 cores", "the times are of cpu: AMD EPYC 9654, 2 cores, but --gpus plans for GPUs"),
        ("cpu, computed", "the times are of cpu, computed, but --gpus plans for GPUs: a compile on a GPU, or with"),
        ("", "warning: the profile does not name the device of its times, but --gpus plans for GPUs"),
        ("h100, computed", ""),
        ("cuda: NVIDIA H200", ""),
    ],
)  # fmt: skip
def test_times_of_another_kind_of_device_are_said_once(heavy_end: Path, device: str, said: str) -> None:
    body = json.loads(heavy_end.read_text())
    heavy_end.write_text(json.dumps(body | ({"device": device} if device else {})))
    found = fxpipe("plan", heavy_end, "--gpus", 2, "--cuts", "same", "--json")
    assert found.code == 0
    assert found.err.count("plans for GPUs") == bool(said)
    assert said in found.err
    assert "plans for GPUs" not in fxpipe("plan", heavy_end, "-n", 2, "--cuts", "same", "--json").err, (
        "for the same device"
    )


def test_what_is_simpler_is_preferred(tmp_path: Path) -> None:
    """The exchange of gradients takes data parallelism about 1% of its time here, and a pipeline nothing."""
    path = tmp_path / "even.json"
    unit = {"forward_ms": 30, "backward_ms": 60, "output_bytes": 1e3, "parameter_bytes": 1e6}
    path.write_text(json.dumps({"units": [{"name": name, **unit} for name in "abcd"]}))
    asked = ("plan", path, "--gpus", "4", "--bandwidth", "10GB/s", "--latency", "0us")
    found = fxpipe(*asked, "--json").json
    for mode in ("same", "bidirectional", "three-way"):
        assert found[mode]["replicas"] == [4]
        assert found[mode]["instead_of"] == "straight (4)"
        assert (
            found["pipeline"]["minibatch_ms"] < found[mode]["minibatch_ms"] < 1.02 * found["pipeline"]["minibatch_ms"]
        )
    assert "preferred because it is simpler: straight (4) takes only" in fxpipe(*asked).out


def test_replicas_are_given(heavy_end: Path) -> None:
    asked = ("plan", heavy_end, "--bandwidth", "100MB/s", "--cuts", "same", "--json")
    given = fxpipe(*asked, "--replicas", "2,1,1", "--microbatches", "8").json
    assert given["same"]["replicas"] == [2, 1, 1]
    assert given["processes"] == 4
    assert given["microbatches"] == 8
    alike = fxpipe(*asked, "-n", "2", "--dp", "4", "--microbatches", "3").json
    assert alike["same"]["replicas"] == [4, 4]
    assert alike["microbatches"] == 12  # three for each replica of the pipeline
    assert not alike["shared_out_evenly"]


def test_machines_have_links_of_their_own(heavy_end: Path) -> None:
    asked = ("plan", heavy_end, "-n", "1", "--dp", "4", "--bandwidth", "100MB/s", "--cuts", "same", "--json")
    far = fxpipe(*asked).json["same"]["minibatch_ms"]
    near = fxpipe(*asked, "--machine", "4", "--inner-bandwidth", "10GB/s").json["same"]["minibatch_ms"]
    two = fxpipe(*asked, "--machine", "2", "--inner-bandwidth", "10GB/s").json["same"]["minibatch_ms"]
    assert near < far < two  # two on each machine send over one link


def test_a_models_batch_is_cut_for_all_processes(digits: Path) -> None:
    planned = fxpipe("plan", digits, "--gpus", "4", "--cuts", "same", "--cost", "analytic", "--json")
    assert "cpu, computed, but --gpus plans for GPUs: --device-spec NAME computes those of a GPU" in planned.err
    found = planned.json
    assert found["microbatches"] >= 4
    assert not found["shared_out_evenly"]
    assert found["same"]["samples_per_second"] > 0


def test_samples_and_short_times_are_said(tmp_path: Path) -> None:
    """Of fewer samples than processes, microbatches have one each, which not all processes can share."""
    model = write_model(tmp_path, ("nn.BatchNorm1d(8)", "nn.Identity()"))
    shown = fxpipe("plan", model, "--gpus", 8, "--cuts", "same", *QUICK).out
    assert "data parallelism: 8 replicas, 4 microbatches" in shown
    assert " · 4 microbatches a minibatch, of 1 sample · " in shown
    header = next(line for line in shown.splitlines() if line.startswith("cuts "))
    assert "slowest µs" in header
    assert "ideal 0.0" not in shown


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("--replicas 2,0", "a number of processes for each worker"),
        ("--replicas /dev/null", "a number of processes for each worker"),
        ("--replicas 2,1 --dp 2", "give one of them"),
        ("--replicas 2,1 -n 3", "has numbers for 2 workers, but -n is 3"),
        ("--gpus 4 -n 2", "leave out -n"),
        ("--gpus 4 --replicas 2,1", "give one of them"),
        ("--gpus 4 --inner-bandwidth 1GB/s", "--machine"),
        ("--machine 4", "give --gpus, --replicas or --dp"),
        ("--gpus 4 --compare", "one schedule and one number of microbatches"),
        ("--gpus 4 --microbatches 4,8", "one schedule and one number of microbatches"),
        ("--dp 4 --speed 1,0.5", "replicas need equal processes"),
        ("--replicas 4,1 --microbatches 2", "4 replicas of a worker cannot share 2 microbatches"),
        ("--gpus 4 --schedule interleaved --microbatches 4", "several workers in each process"),
    ],
)
def test_replicas_that_cannot_be(heavy_end: Path, asked: str, said: str) -> None:
    refused = fxpipe("plan", heavy_end, *asked.split())
    assert refused.code != 0
    assert said in refused.err.replace("\n", " ")
