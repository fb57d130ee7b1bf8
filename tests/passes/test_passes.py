"""Every pass keeps what the program computes, and keeps the program it was given."""

from __future__ import annotations

import pytest
import torch
from cached import captured, cuts, passed
from covering import covering
from small_models import CASES

import fxpipe
from fxpipe.ir.printer import print_program
from fxpipe.ir.transform import Applied
from fxpipe.ir.wire import is_recv, is_send


@pytest.mark.parametrize(("name", "shift"), covering(CASES, [0, 1, -1], strength=1))
def test_no_pass_changes_a_bit_of_what_is_computed(name: str, shift: int) -> None:
    case, _, program = captured(name)
    torch.manual_seed(0)
    expected = program.run()
    before = print_program(program)

    def same(applied: Applied) -> None:
        torch.manual_seed(0)
        for found, wanted in zip(applied.program.run(), expected, strict=True):
            assert torch.equal(found, wanted), applied.step.name

    fxpipe.lower(program, workers=3, cost="analytic", observers=[same], **cuts(case, 3, shift))
    assert print_program(program) == before


def test_every_edge_has_one_send_and_one_recv() -> None:
    case, _, program = captured("unet")
    wired = passed(program, workers=3, **cuts(case, 3, 1))
    sends = [wired.wires[n.name] for n in wired if is_send(n)]
    recvs = [wired.wires[n.name] for n in wired if is_recv(n)]
    assert sorted(e.name for e in sends) == sorted(e.name for e in recvs)
    assert len({e.name for e in sends}) == len(sends)
    jumps = [e for e in sends if e.kind == "activation" and e.dst - e.src == 2]
    assert jumps, "a skip over a stage goes straight to its reader"
