"""Edges that get codecs: what packs and unpacks their values, where it is, and what travels."""

from __future__ import annotations

from collections.abc import Mapping

from fxpipe.passes.comm import Comm
from fxpipe.passes.encode import Encode

from fxpipe.ir.program import Program
from fxpipe.ir.transform import run_passes
from fxpipe.plan.cost_records import CodecTimes


def wired(program: Program) -> Program:
    return run_passes(program, [Comm()])


def encoded(program: Program, codecs: Mapping[str, str], **times: CodecTimes) -> Program:
    return run_passes(program, [Encode(codecs, times)])
