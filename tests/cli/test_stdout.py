"""Stdout: with --json one JSON object and nothing else, whoever else writes there; and one that takes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import QUICK, Result, finish, fxpipe, start_module
from model_files import write_model
from warm import Popen

PRINTS = """

import ctypes, os, subprocess, sys

def tell(what):
    print("printed", what)
    os.write(1, f"written {what}\\n".encode())
    ctypes.CDLL(None).puts(f"by C {what}".encode())
    ctypes.CDLL(None).fflush(None)
    subprocess.run(["echo", "by another process", what])
    sys.__stdout__.write(f"kept {what}\\n")

tell("import")
given_data, given_loss = train_data, loss

def train_data():
    tell("data")
    return given_data()

def loss(model, batch):
    return given_loss(model, batch)

def eval_data():
    return given_data()[:2]

def metrics(model, batch):
    print("metrics")
    return {"loss": loss(model, batch)}

def optimizer(named_parameters):
    tell("optimizer")
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.05)
"""


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stdout")
    model = write_model(folder)
    model.write_text(model.read_text() + PRINTS)
    result = finish(start_module("fxpipe", "compile", model, "-o", folder / "build", "--json", *QUICK), 120)
    told(result)
    return folder / "build"


def told(result: Result) -> None:
    assert isinstance(result.json, dict)
    for way in ("printed", "written", "by C", "by another process", "kept"):
        assert f"{way} import" in result.err


@pytest.mark.multiproc
@pytest.mark.parametrize("local", [("--local",), ()])
def test_a_run_prints_one_object(build: Path, tmp_path: Path, local: tuple[str, ...]) -> None:
    arguments = ("run", build, *local, "--steps", 2, "--threads", 1, "--out", tmp_path, "--json")
    result = finish(start_module("fxpipe", *arguments), 120)
    told(result)
    assert result.json["steps"] == 2
    for what in ("data", "optimizer"):
        assert f"by C {what}" in result.err


def test_an_error_leaves_stdout_empty(build: Path, tmp_path: Path) -> None:
    result = finish(start_module("fxpipe", "run", build, "--out", tmp_path, "--local", "--policy", "x", "--json"), 60)
    assert (result.code, result.out) == (1, "")
    assert "error: " in result.err


def test_in_this_process_stdout_is_given_back(build: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    assert fxpipe("run", build, "--local", "--steps", 1, "--out", tmp_path, "--json").json["steps"] == 1
    assert sys.stdout is before
    fxpipe("run", build, "--nonsense", "--json")
    assert sys.stdout is before
    os.write(1, b"here")
    assert capfd.readouterr().out.endswith("here")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device here")
@pytest.mark.parametrize(
    ("arguments", "unbuffered", "popen"),
    [
        (("plan", "MODEL", "--cost", "analytic"), "", Popen),
        (("inspect", "BUILD", "--json"), "", Popen),
        (("explain",), "", subprocess.Popen),
        (("explain",), "1", subprocess.Popen),
    ],
)
def test_a_full_disk_is_an_error_without_a_traceback(
    build: Path, tmp_path: Path, arguments: tuple[str, ...], unbuffered: str, popen: type[subprocess.Popen[str]]
) -> None:
    named = {"MODEL": write_model(tmp_path), "BUILD": build}
    asked = [str(named.get(argument, argument)) for argument in arguments]
    environment = {**os.environ, **({"PYTHONUNBUFFERED": unbuffered} if unbuffered else {})}
    command = [sys.executable, "-m", "fxpipe", *asked]
    with open("/dev/full", "w") as full:
        result = finish(popen(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment), 120)
    assert result.code == 1
    assert "error: stdout cannot be written: No space left on device" in result.err
    assert "Traceback" not in result.err
    assert "Exception ignored" not in result.err


def test_a_reader_that_leaves_is_no_error(build: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        command = [sys.executable, "-m", "fxpipe", "inspect", str(build)]
        result = finish(Popen(command, stdout=pipe, stderr=subprocess.PIPE, text=True), 120)
    assert result.err == ""


def test_the_object_is_whole_where_the_terminals_encoding_is_poor(build: Path) -> None:
    result = finish(start_module("fxpipe", "inspect", build, "--json", PYTHONIOENCODING="ascii"), 60)
    assert json.loads(result.out)
