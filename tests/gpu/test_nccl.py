"""Runs over NCCL and through peer memory, of processes that share a device (see `gpu_runs`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_runs import MARKS, MICROBATCHES, WIRES, compiled, run_here, run_over

pytestmark = MARKS

MODEL = """
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from fxpipe import codecs
from fxpipe.plan.spec import TensorSpec

LENGTH, HEADS, WIDTH, BATCH = 16, 2, 32, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(len(x), LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        return x + self.out(y.transpose(1, 2).reshape(len(x), LENGTH, WIDTH))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@codecs.register
@dataclass(frozen=True)
class Halves(codecs.Codec):  # of a type that NCCL does not know
    name = "halves"

    def refusal(self, tensor):
        return "" if tensor.dtype == "float32" else f"float32, and this is {tensor.dtype}"

    def packed(self, tensor):
        return TensorSpec((tensor.bytes // 4,), (1,), "int16")

    def encode(self, value, state):
        return (value.reshape(-1).view(torch.int32) >> 16).to(torch.int16)

    def decode(self, packed, shape, dtype):
        return (packed.to(torch.int32) << 16).view(torch.float32).view(shape)


def model():
    return Net()


def loss(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1).float(), batch.roll(1, 1).flatten())


def train_data():
    for _ in range(20):
        yield torch.randint(50, (BATCH, LENGTH), device="cuda")  # from the device's own generator


def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.01)


def eval_data():
    return list(torch.arange(2 * BATCH * LENGTH).remainder(50).view(2, BATCH, LENGTH))


def metrics(model, batch):
    return {"nats": loss(model, batch)}


def on_step(step, loss, run):
    torch.cuda.synchronize()  # waits for all that the device is to do, receives among it
"""
LATE = """

from fxpipe.runtime.process import training_loop
from fxpipe.runtime.wires.nccl_lines import Communicator
from fxpipe.runtime.wires.peer_memory import PeerReceiver, PeerSender


def late(call):
    def run(*given, **more):
        torch.cuda._sleep(5_000_000)  # some milliseconds of the current stream
        return call(*given, **more)

    return run


training_loop.Executor.execute = late(training_loop.Executor.execute)
Communicator.begin = late(Communicator.begin)
PeerSender._fill, PeerReceiver._used = late(PeerSender._fill), late(PeerReceiver._used)
"""
SMALLER = """

def train_data():
    for step in range(20):
        yield torch.randint(50, (BATCH // 2 if step % 4 == 3 else BATCH, LENGTH), device="cuda")
"""
APART = ("--fp-cut", "blocks.2", "--bp-cut", "blocks.1")
FOUR = ("--fp-cut", "blocks.1", "--fp-cut", "blocks.2", "--fp-cut", "blocks.3")
FOUR += ("--bp-cut", "blocks.0", "--bp-cut", "blocks.2", "--bp-cut", "blocks.3")


@pytest.mark.parametrize("wires", WIRES)
@pytest.mark.parametrize(
    ("ranks", "options", "run", "more"),
    [
        pytest.param(2, (*MICROBATCHES, *APART), (), "", id="1f1b"),
        pytest.param(2, ("--schedule", "async", *APART), ("--clip-norm", 1), "", id="async"),
        pytest.param(2, (*MICROBATCHES, *APART, "--autocast", "bf16"), (), "", id="bf16"),
        pytest.param(2, (*MICROBATCHES, *APART, "--autocast", "fp16"), ("--loss-scale-interval", 2), "", id="fp16"),
        pytest.param(2, (*MICROBATCHES, *APART, "--codec", "activation=halves"), (), "", id="codec"),
        pytest.param(2, (*MICROBATCHES, *APART), (), "WIDTH = BATCH = 1024\n", id="wide"),
        pytest.param(2, (*MICROBATCHES, *APART), (), LATE, id="late"),
        pytest.param(2, ("--schedule", "async", *APART), (), LATE, id="late-async"),
        pytest.param(2, (*MICROBATCHES, *APART), ("--offload",), "WIDTH = BATCH = 256\n", id="offload"),
        pytest.param(2, ("--schedule", "zb-h1", "--microbatches", 4, *APART), (), "", id="zb-h1"),
        pytest.param(2, (*MICROBATCHES, *APART, "--meta"), (), "", id="meta"),
        pytest.param(2, (*MICROBATCHES, *APART, "--scan", 1), ("--new-shapes", 1), SMALLER, id="new-shape"),
        pytest.param(2, ("-n", 2, *FOUR, "--schedule", "interleaved", "--microbatches", 4), (), "", id="interleaved"),
        pytest.param(4, ("-n", 4, *FOUR, "--schedule", "async"), (), "", id="async-4"),
        pytest.param(2, ("-n", 1, "--dp", 2, *MICROBATCHES), (), "", id="replicas"),
        pytest.param(4, ("-n", 2, "--dp", 2, *MICROBATCHES), (), "", id="replicas-4"),
    ],
)
def test_trains_as_one_process(
    tmp_path: Path, wires: str, ranks: int, options: tuple[object, ...], run: tuple[object, ...], more: str
) -> None:
    """Wide: messages of 16 MB, which a send cannot put into NCCL's own memory, so it waits for the receiver.

    Late: a message is to leave long before the device has made it, and to be read long before it has come.
    """
    compiled(tmp_path, MODEL + more, *options)
    run = ("--steps", 6, "--eval-every", 2, *run)
    expected = run_here(tmp_path, *run, "--out", tmp_path / "local")
    found = run_over(wires, tmp_path, ranks, *run, "--out", tmp_path / "real")
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)  # atomics in embedding's backward
    assert len(found["evaluations"]) == len(expected["evaluations"]) == 3
