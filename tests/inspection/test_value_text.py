"""Where a value comes from and goes to, in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commands import QUICK, fxpipe
from model_files import line_of, write_model
from small_facts import row

from fxpipe.inspection.facts import facts
from fxpipe.inspection.subject import read_subject
from fxpipe.inspection.value_text import describe
from fxpipe.inspection.values import MOST


def test_the_text(small: dict[str, Any]) -> None:
    assert describe(small, "h") == (
        "h  aten.mul  f32[1]\n"
        "  F on worker 0 · unit 0 · a · 4 B · 1 ms\n"
        "  tiny.py:7: h = self.a(x)\n"
        "\n"
        "comes from\n"
        "  a.weight  parameter, owned by worker 0\n"
        "  batch  input, worker 0\n"
        "\n"
        "goes to\n"
        "  sent by worker 0's F to worker 1's F (activation, 4 B), for:\n"
        "    y  F on worker 1\n"
        "    d_b  W on worker 1\n"
        "\n"
        "kept for backward\n"
        "  worker 1 keeps it for d_b\n"
    )


@pytest.mark.parametrize("name", ["b.weight", "c.weight", "b_weight"])
def test_a_parameter(small: dict[str, Any], name: str) -> None:
    text = describe(small, name)
    assert "b.weight, c.weight  parameter  f32[1]  4 B\n" in text
    assert "  from worker 1 after its update, for worker 0's F\n" in text
    assert "\ngradient made by\n  d_b  W on worker 1\n" in text


def test_a_frozen_parameter(small: dict[str, Any]) -> None:
    del small["nodes"]["gradients"]["b_weight"]
    assert "\ngradient made by\n  no node: it is not trained\n" in describe(small, "b.weight")


def test_a_module_and_the_loss(small: dict[str, Any]) -> None:
    assert "b  module  5 nodes" in describe(small, "b")
    assert "(loss)  module  1 node\n" in describe(small, "(loss)")


def test_a_long_list_is_cut_and_counted(small: dict[str, Any]) -> None:
    small["nodes"]["rows"] += [row(f"r{i}", "F", 1, "aten.neg", 0, 3) for i in range(60)]
    assert f"… and {62 + 1 - MOST} more" in describe(small, "h")  # the line of the edge counts
    assert f"… and {64 - MOST} more" in describe(small, "a")


def test_the_users_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = write_model(tmp_path)
    assert fxpipe("compile", "model.py", *QUICK, "--fp-cut", "blocks.2", "--bp-cut", "blocks.1").code == 0
    told = facts(read_subject(tmp_path / "build"))
    (crossing,) = [e for e in told["edges"] if e["kind"] == "activation"]
    text = describe(told, crossing["name"])
    line = line_of(model, "F.dropout(torch.tanh(block(x))")
    assert f"  model.py:{line}: x = F.dropout(torch.tanh(block(x)), 0.1, self.training)\n" in text
    assert "sent by worker 0's F to worker 1's F (activation" in text
    assert max(map(len, text.splitlines())) <= 80
