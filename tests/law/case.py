"""A case of the law: one value on every axis, what is legal, and the options that ask for it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

STEPS = 7
"""Minibatches of a run: more than an epoch, and enough for predictions on the first of four workers."""

SEVERAL = dict.fromkeys(("1f1b*2", "zb-h1*2", "interleaved", "wpipe", "zb-v", "v-half", "v-min", "dualpipev", "csv"), 2)
"""Schedules with so many workers in each process."""

WITHOUT_FLUSH = ("async", "async-late", "nf1b", "wpipe")
APART = ("zb-h1", "zb-h2", "zb-h1*2", "zb-v", "v-half", "v-min", "dualpipev", "csv")
"""Schedules with weight gradients as actions of their own."""


def axis(*every: Any, slow: tuple[Any, ...] = ()) -> Any:
    """A field whose first value is the plain one; `slow` ones, listed or not, are for the slow cases alone."""
    quick, more = tuple(v for v in every if v not in slow), tuple(v for v in slow if v not in every)
    return field(default=every[0], metadata={"quick": quick, "every": (*every, *more)})


@dataclass(frozen=True)
class Case:
    """What is compiled and how it is run.

    Attributes:
        cuts: 'same' for forward and backward, backward's 'later' or 'earlier', 'random' (F, B and W apart, empty parts,
            recomputed runs), or what the planner chooses: 'planned', 'three-way'.
        schedule: '*2' is with `virtual=2`; 'csv' a file, zb-v in which actions have changed places.
        replicas: 'two' of each worker, '2,1' (more of the first worker), '1,2' (more of the last one), 'shard' (two
            that share out the optimizer), 'outer' (two that train apart), 'delayed' (with an outer step one later).
        attributes: vectors are of a class of their own, and the optimizer groups by it and by what hangs on them.
        rate: 'set' is constant, and a setting of the model file that the run gives (`--set`).
        outline: of which repeats stages make functions: of large ones as for users, which these small models seldom
            have, or of 'all' runs of two calls.
        precision: 'bf16' and 'fp16' under autocast; 'params' with `params="bf16"`, and 'params16' of a model that is in
            bfloat16; others of weights and batches.
        shapes: 'last' (an epoch's last batch is smaller), 'new' (its stages are made during the run), 'padded'.
        batches: 'plain' ones hold numbers that the loss is multiplied with, others in each batch, and what no step
            reads: names, more or fewer of them, and a tensor of any length.
        state: what the loss reads and hooks change: a tensor, with each batch or by `on_step`; 'fixed' a number, which
            no worker can get.
        stop: the run saves checkpoints, and another goes on from the one after so many steps. 0: neither.
        moved: the run that goes on does so under other cuts.
        processes: a worker in each, as torchrun starts them, with messages through shared memory or pretended
            devices' memory, over gloo, or by NCCL's rules; 'mixed' are such memory and sums by NCCL's rules.
        own: trained call by call, by a loop of the user's own.
        device: of model and batches; 'pretended' is in a process that has it (see `pretended_device`), and 'narrow' is
            the same without float64.
    """

    model: str = axis("chain", "gpt", "dropout", "conv", "lstm", "function", "dict", "texts", "towers", "packed",
                      slow=("gpt-dropout", "attention-dropout"))  # fmt: skip
    workers: int = axis(2, 3, 4, 1)
    cuts: str = axis("same", "later", "earlier", "random", "planned", "three-way")
    schedule: str = axis("1f1b", "gpipe", "async", "async-late", "nf1b", "wpipe", "zb-h1", "zb-h1*2", "interleaved",
                         "zb-v", "csv", slow=("1f1b*2", "zb-h2", "v-min", "v-half", "dualpipev"))  # fmt: skip
    microbatches: int = axis(2, 1, 4)
    replicas: str = axis("one", "two", "2,1", "shard", "outer", "delayed", slow=("1,2",))
    policy: str = axis("default", "latest", "stash", "vertical", "2bw", "spectrain", "pipeoptim+keep", "xpipe",
                       "latest+ef", "latest+brake", "xgrad",
                       slow=("xpipe", "2bw+predict", "pipeoptim", "lwp", "spectrain+ef", "spectrain+brake",
                             "stash+ef+brake"))  # fmt: skip
    optimizer: str = axis("momentum", "nesterov", "sgd", "adamw", "own", "two")
    attributes: bool = axis(False, True)
    rate: str = axis("constant", "falling", "epoch", "set")
    clip: bool = axis(False, True)
    average: bool = axis(False, True)
    codec: str = axis("none", "bf16", "int8", "gradient=topk:0.2", "gradient=lowrank:2", "outer=sparseloco:8")
    recompute: str = axis("none", "full")
    outline: str = axis("large", "all")
    precision: str = axis("float64", "bf16", slow=("fp16", "float32", "bfloat16", "params", "params16"))
    engine: str = axis("eager", slow=("onnxruntime", "inductor"))
    evaluation: str = axis("none", "end", "often")
    shapes: str = axis("one", "last", "new", "padded")
    batches: str = axis("tensors", "plain")
    state: str = axis("none", "data", "callback", slow=("fixed",))
    stop: int = axis(0, 2, 4)
    moved: bool = axis(False, True)
    processes: str = axis("", "shared", "gloo", "nccl", "peer", slow=("mixed",))
    own: bool = axis(False, True)
    device: str = axis("cpu", slow=("pretended", "narrow"))

    @property
    def mixed(self) -> bool:
        """Whether the step computes with bfloat16 casts of float32 parameters."""
        return self.precision in ("params", "params16")

    @property
    def fades(self) -> bool:
        """Whether hooks change what the loss reads.

        Loops of one's own have no such hooks. In bfloat16 weights, a weaker loss is lost in rounding.
        """
        return self.state != "none" and not (self.own or self.mixed)

    @property
    def flushes(self) -> bool:
        return self.schedule not in WITHOUT_FLUSH

    @property
    def dp(self) -> int:
        """How many replicas share each minibatch out."""
        return 1 if self.replicas == "one" or self.unequal else 2

    @property
    def unequal(self) -> bool:
        return self.replicas in ("2,1", "1,2")

    @property
    def parts(self) -> int:
        """Microbatches of a minibatch, over all replicas."""
        return self.microbatches * self.dp

    @property
    def batch(self) -> int:
        """Samples of a minibatch."""
        return 8

    @property
    def ranks(self) -> int:
        """Processes of a pipeline."""
        return self.workers // SEVERAL.get(self.schedule, 1)

    @property
    def total(self) -> int:
        """Processes in all."""
        return self.ranks + 1 if self.unequal else self.ranks * self.dp

    def __str__(self) -> str:
        """Values that are not the plain ones; `of_text` is its inverse."""
        found = [
            f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        ]
        return " ".join(found) or "plain"


FIELDS = {f.name: f for f in dataclasses.fields(Case)}
AXES: dict[str, tuple[Any, ...]] = {name: f.metadata["quick"] for name, f in FIELDS.items()}
SLOW: dict[str, tuple[Any, ...]] = {name: f.metadata["every"] for name, f in FIELDS.items()}


def of_text(text: str) -> Case:
    """Read `str(case)`."""
    pairs = [part.split("=", 1) for part in text.split() if part != "plain"]
    return Case(**{name: {str(v): v for v in SLOW[name]}[value] for name, value in pairs})
