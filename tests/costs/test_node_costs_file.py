"""Measured costs are kept, and believed only for the same program on the same device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cached import captured

from fxpipe.costs.node_costs_file import MeasuredCosts, device_name, fingerprint, read
from fxpipe.errors import BuildError
from fxpipe.ir.program import Program
from fxpipe.ir.transform import run_passes
from fxpipe.passes.cost import Cost
from fxpipe.passes.fold import Fold
from fxpipe.passes.units import Units

COSTS = MeasuredCosts("mark", {"mm": 0.1 + 0.2, "add": 1 / 3, "nothing": 0.0}, {"F": 1.01, "B": 0.99}, 0.03)


def folded(name: str, **options: int) -> Program:
    return run_passes(captured(name, **options)[2], [Fold(), Units()])


def test_what_is_written_is_read_back_to_the_last_bit(tmp_path: Path) -> None:
    path = tmp_path / "node_costs.json"
    path.write_text(COSTS.to_json())
    assert read(path, "mark") == COSTS


def test_costs_of_something_else_are_none(tmp_path: Path) -> None:
    path = tmp_path / "node_costs.json"
    assert read(path, "mark") is None
    path.write_text(COSTS.to_json())
    assert read(path, "another") is None
    path.write_text(COSTS.to_json().replace('"format": 1', '"format": 2'))
    assert read(path, "mark") is None


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"format": 1}', COSTS.to_json()[:40], COSTS.to_json().replace("1.01", '"long"'),
     COSTS.to_json().replace("0.0,", "-1.0,").replace("0.0\n", "-1.0\n"), COSTS.to_json().replace("1.01", "true"),
     COSTS.to_json().replace("1.01", "0.0"), COSTS.to_json().replace('"F"', '"G"'),
     COSTS.to_json().replace('"F": 1.01,', ""), COSTS.to_json().replace('"F"', '"G": 1.0, "F"'),
     json.dumps({"format": 1, "fingerprint": "mark", "ratios": {}})],
)  # fmt: skip
def test_a_corrupt_file_is_told_from_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "node_costs.json"
    path.write_text(text)
    with pytest.raises(BuildError, match=r"node_costs.json cannot be read: ") as caught:
        read(path, "mark")
    assert str(caught.value.where).startswith(str(path))


def test_a_folder_in_its_place_is_corrupt(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="cannot be read"):
        read(tmp_path, "mark")


def test_the_fingerprint_knows_what_costs_depend_on() -> None:
    program = folded("function")
    base = fingerprint(program, "cpu: x", 1)
    assert fingerprint(program.copy(), "cpu: x", 1) == base
    others = [
        fingerprint(program, "cpu: y", 1),
        fingerprint(program, "cpu: x", 2),
        fingerprint(folded("function", size=4), "cpu: x", 1),
        fingerprint(folded("dict"), "cpu: x", 1),
        fingerprint(program.copy(autocast="bf16"), "cpu: x", 1),
    ]
    assert len({base, *others}) == 6


def test_costs_do_not_change_the_fingerprint() -> None:
    program = folded("function")
    assert fingerprint(Cost()(program), "cpu: x", 1) == fingerprint(program, "cpu: x", 1)


SCRIPT = """
import sys
sys.path[:0] = [{support!r}, {tests!r}]
from test_node_costs_file import fingerprint, folded
print(fingerprint(folded("function"), "cpu: x", 1))
"""


@pytest.mark.slow
def test_the_fingerprint_is_the_same_in_another_process() -> None:
    tests = Path(__file__).parent
    script = SCRIPT.format(support=str(tests.parent / "support"), tests=str(tests))
    environment = {**os.environ, "PYTHONHASHSEED": "4711"}
    said = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == fingerprint(folded("function"), "cpu: x", 1)


def test_the_device_has_a_name() -> None:
    assert device_name("cpu").startswith("cpu: ")
    assert device_name("cpu").endswith(f", {os.cpu_count()} cores")
