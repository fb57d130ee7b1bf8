"""A stage file is refused unless it fits its plan, and every difference is named."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from fxpipe.errors import BuildError
from fxpipe.plan.spec import PartSpec, StageSpec
from fxpipe.stages.loaded import load_stage

SOURCE = """\
def forward(weights, buffers, batch, comm):
    (w, v) = weights
    x = comm.recv("x")
    comm.send("h", x @ w + v)
    return None, (), [x]


def backward(weights, buffers, saved, comm):
    (w,) = weights
    (x,) = saved
    saved.clear()
    g = comm.recv("g")
    return (x.t() @ g, g)
"""


def spec(source: str = SOURCE) -> StageSpec:
    forward = PartSpec(weights=("w", "v"), receives=("x",), sends=("h",), saved=("x",))
    backward = PartSpec(weights=("w",), receives=("g",), saved=("x",), gradients=("w", "v"))
    return StageSpec("stage_0.py", hashlib.sha256(source.encode()).hexdigest(), forward, backward)


def write(folder: Path, source: str) -> Path:
    path = folder / "stage_0.py"
    path.write_text(source)
    return path


def test_a_stage_as_emitted(tmp_path: Path) -> None:
    stage = load_stage(write(tmp_path, SOURCE), spec())
    assert not stage.edited
    assert stage.functions["F"].__code__.co_filename == str(tmp_path / "stage_0.py")
    assert [p.name for p in tmp_path.iterdir()] == ["stage_0.py"]


def test_an_edited_stage_that_fits(tmp_path: Path) -> None:
    stage = load_stage(write(tmp_path, SOURCE.replace("x @ w + v", "(x @ w + v).relu()")), spec())
    assert stage.edited


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        ('comm.send("h"', 'comm.send("k"', "forward no longer sends h; forward sends k, which the plan does not know"),
        ('g = comm.recv("g")', "g = x", "backward no longer receives g"),
        ("(w, v) = weights", "(w,) = weights", "forward unpacks 1 values from weights, the plan has 2"),
        ("(x,) = saved", "(x, y) = saved", "backward unpacks 2 values from saved, the plan has 1"),
        ("[x]", "[x, w]", "forward returns 2 saved values, the plan has 1"),
        ("(x.t() @ g, g)", "(g, g, g)", "backward returns 3 gradients, the plan has 2"),
        ("return None, (), [x]", "return None, [x]", "forward returns 2 values, not (loss, buffers, saved)"),
        ("def backward", "def backwards", "there is no function backward"),
        ("saved, comm)", "saved)", "backward takes (weights, buffers, saved), not (weights, buffers, saved, comm)"),
        ('x = comm.recv("x")', 'x = comm.recv("x"); comm.recv("x")', "forward receives x more than once"),
        ('comm.recv("x")', "comm.recv(name)", "forward no longer receives x; forward receives a computed name"),
    ],
)
def test_every_difference_is_named(tmp_path: Path, old: str, new: str, difference: str) -> None:
    assert old in SOURCE
    with pytest.raises(BuildError) as caught:
        load_stage(write(tmp_path, SOURCE.replace(old, new)), spec())
    assert difference in str(caught.value)
    assert "stage_0.py" in str(caught.value)


def test_all_differences_at_once(tmp_path: Path) -> None:
    source = SOURCE.replace('comm.send("h", x @ w + v)', "pass").replace("(w, v)", "(w, v, u)")
    with pytest.raises(BuildError, match="no longer sends h; forward unpacks 3"):
        load_stage(write(tmp_path, source), spec())


def test_a_syntax_error_has_its_line(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"stage_0.py:3: x = = comm"):
        load_stage(write(tmp_path, SOURCE.replace("x = comm", "x = = comm")), spec())


def test_an_error_at_import_has_its_line(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"raised NameError: [\s\S]*stage_0.py:1: aten = torch"):
        load_stage(write(tmp_path, "aten = torch.ops.aten\n" + SOURCE), spec())


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="No such file"):
        load_stage(tmp_path / "stage_0.py", spec())


def test_an_operator_comes_with_the_package_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else imports it in a worker's process; where there is none, the error names the operator."""
    source = SOURCE.replace("x @ w + v", "torch.ops.packs_weights.twice.default(x) @ w + v")
    with pytest.raises(BuildError, match="operator packs_weights::twice, which is not registered"):
        load_stage(write(tmp_path, source), spec(source))
    package = tmp_path / "lib" / "packs_weights"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        'import torch\ntorch.library.define("packs_weights::twice", "(Tensor x) -> Tensor")\n'
    )
    monkeypatch.syspath_prepend(tmp_path / "lib")
    assert load_stage(write(tmp_path, source), spec(source)).functions.keys() == {"F", "B"}
