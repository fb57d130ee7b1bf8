"""A byte-level GPT with attention residuals: every block reads the outputs of all blocks before it.

A residual stream adds up all outputs with the weight one. Here each block's input is a mean of the embedding and of all
earlier outputs, weighted by attention over depth (Kimi Team, "Attention Residuals", arXiv:2603.15031, 2026): a softmax,
for each token, of a query that the block learns times the RMS-normalised outputs as keys. Over a pipeline, every
worker's blocks need what the blocks of all workers before it made: `fxpipe inspect` shows how it crosses.

Plain PyTorch: this file imports nothing of fxpipe, downloads nothing, and would train as well in a loop of
your own. The functions at the end are what fxpipe looks for by name. From the repository's root:

    fxpipe compile examples/attention_residuals.py -n 4 -o build/ --verify
    fxpipe inspect build/
    fxpipe run build/
"""

import math
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

LAYERS = 8
WIDTH = 128
HEADS = 8
CONTEXT = 64  # bytes a sample is long
VOCABULARY = 256

BATCH = 8  # samples in a minibatch
EPOCH = 500  # minibatches in an epoch
EVAL_BATCHES = 20
LEARNING_RATE = 3e-3
WARM_UP = 100  # updates

HELD_OUT = {"argparse.py", "dataclasses.py", "heapq.py", "statistics.py", "threading.py", "zipfile.py"}


class DepthAttention(nn.Module):
    """Outputs of earlier layers, each [batch, length, width], in; their weighted mean, of the same shape, out.

    The query is zero at first: the mean then has equal weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, outputs):
        scores = torch.stack([F.rms_norm(x, (WIDTH,)) @ self.query for x in outputs], dim=-1)
        weights = scores.softmax(dim=-1)
        return sum(weights[..., i, None] * x for i, x in enumerate(outputs))


class Block(nn.Module):
    """Causal attention, then an MLP. What it returns is not added to its input: later layers choose how to mix it."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = DepthAttention()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, outputs):
        x = self.depth(outputs)
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = self.proj(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return mixed + self.down(F.gelu(self.up(self.norm2(x + mixed))))


class GPT(nn.Module):
    """Bytes [batch, length] in, logits of each next byte [batch, length, 256] out."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, WIDTH)
        self.pos = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.depth = DepthAttention()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.tok.weight, std=0.05)
        nn.init.normal_(self.pos.weight, std=0.5)
        self.head.weight = self.tok.weight  # tied: one parameter, used at both ends of the model

    def forward(self, text):
        places = torch.arange(text.shape[1], device=text.device)
        outputs = [math.sqrt(WIDTH) * self.tok(text) + self.pos(places)]
        for block in self.blocks:
            outputs.append(block(outputs))
        return self.head(self.norm(self.depth(outputs)))


def read_library(held_out: bool) -> torch.Tensor:
    """The bytes of the standard library's top-level modules, in alphabetical order."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"\n".join(file.read_bytes() for file in files if (file.name in HELD_OUT) == held_out)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


class Windows:
    """Minibatches of random windows of a text: (bytes, the same window one byte later)."""

    def __init__(self, text: torch.Tensor, batches: int, seed: int) -> None:
        self.text, self.batches = text, batches
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self.batches

    def __iter__(self):
        for _ in range(self.batches):
            starts = torch.randint(len(self.text) - CONTEXT, (BATCH, 1), generator=self.generator)
            window = self.text[starts + torch.arange(CONTEXT + 1)]
            yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def model():
    return GPT()


def loss(model, batch):
    text, following = batch
    return F.cross_entropy(model(text).flatten(0, 1), following.flatten())


def train_data():
    return Windows(read_library(held_out=False), EPOCH, seed=torch.initial_seed())


def optimizer(named_parameters):
    return torch.optim.AdamW(named_parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)


def lr_scheduler(optimizer):
    """Rises over the first updates, then falls as one over the square root; stepped after every update."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda update: min((update + 1) / WARM_UP, math.sqrt(WARM_UP / (update + 1)))
    )


def eval_data():
    return list(Windows(read_library(held_out=True), EVAL_BATCHES, seed=0))


def metrics(model, batch):
    text, following = batch
    logits = model(text)
    nats = F.cross_entropy(logits.flatten(0, 1), following.flatten())
    return {"loss": nats, "accuracy": (logits.argmax(-1) == following).float().mean()}
