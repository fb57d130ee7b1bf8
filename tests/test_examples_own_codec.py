"""examples/own_codec.py: a script that compares its codec, and a model file whose runs know it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from commands import QUICK, fxpipe

import fxpipe as api
from fxpipe.codecs import CODECS, codec
from fxpipe.codecs.codec import EdgeState
from fxpipe.errors import CodecError
from fxpipe.plan.spec import TensorSpec
from fxpipe.task.model_file import imported

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_codec.py"


@pytest.fixture
def example() -> Iterator[ModuleType]:
    before = dict(CODECS)
    yield imported(EXAMPLE)
    CODECS.clear()
    CODECS.update(before)


@pytest.mark.parametrize("shape", [(64,), (7, 9), (1000,)])
def test_it_sends_signs_and_means(example: ModuleType, shape: tuple[int, ...]) -> None:
    signs, value = codec("signs"), torch.randn(shape, generator=torch.Generator().manual_seed(0))
    packed = signs.pack(value, EdgeState())
    spec = signs.packed(TensorSpec(shape, value.stride(), "float32"))
    assert (tuple(packed.shape), packed.dtype) == (spec.shape, torch.uint8)
    assert packed.numel() == 8 + -(-value.numel() // 8)
    read = signs.unpack(packed, shape, torch.float32)
    up = value >= 0
    torch.testing.assert_close(read, torch.where(up, value[up].mean(), value[~up].mean()))


def test_what_a_message_leaves_out_comes_with_the_next_ones(example: ModuleType) -> None:
    signs, state = codec("signs"), EdgeState()
    value = torch.randn(100, generator=torch.Generator().manual_seed(0))
    read = [signs.unpack(signs.pack(value, state), (100,), torch.float32) for _ in range(200)]
    assert (torch.stack(read).mean(0) - value).norm() < 0.2 * (read[0] - value).norm()


def test_the_script_compares_it(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    example.main(steps=12, seeds=1)
    rows = {name: row for name, *row in (line.split() for line in capsys.readouterr().out.splitlines()[3:])}
    assert list(rows) == ["none", "gradient=int8", "gradient=topk:0.02", "gradient=signs"]
    shares = [float(row[0]) for row in rows.values()]
    assert shares[0] == 1.0
    assert shares[3] < shares[1] < 0.7
    assert len({tuple(row[1:]) for row in rows.values()}) > 1  # it matters what packs them


@pytest.mark.slow
def test_where_it_is_not_registered(example: ModuleType, tmp_path: Path) -> None:
    build = tmp_path / "build"
    assert fxpipe("compile", EXAMPLE, "-n", 2, "--codec", "gradient=signs", "-o", build, *QUICK).code == 0
    del CODECS["signs"]
    assert "signs" in fxpipe("inspect", build).out  # looking needs no codec
    with pytest.raises(CodecError, match="there is no codec 'signs'") as caught:
        api.load(build).local(optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
    assert "stage_" in str(caught.value)
    assert "one that the model file registers" in str(caught.value)
