"""A tiny pipeline written by hand, with every kind of edge: what codegen would emit for a stack of tanh layers.

Layer l is h_l = tanh(h_{l-1} @ W_l.T), the loss the mean squared error. Its forward runs on worker
`forward[l]`, its backward on worker `backward[l]`, which owns W_l.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe.plan.plan import BufferSpec, LossSpec, ParameterSpec, Plan, WeightsSpec  # fmt: skip
from fxpipe.plan.spec import EdgeKind, EdgeSpec, LeafSpec, PartSpec, Phase, StageSpec, StepSpec, TensorSpec  # fmt: skip
from fxpipe.plan.user_files import ModelFileSpec  # fmt: skip

WIDTH, BATCH = 6, 4
TASK = """
import torch
from torch import nn

def model():
    return nn.Linear(1, 1)

def loss(model, batch):
    return model(batch).sum()

def train_data():
    return [(torch.randn({batch}, {width}, dtype=torch.float64), torch.randn({batch}, {width}, dtype=torch.float64))
            for _ in range(6)]

def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.1, momentum=0.9)

def lr_scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step // 2 % 8))
"""


def tensor(*shape: int, dtype: str = "float64") -> TensorSpec:
    stride = torch.empty(shape, device="meta").stride()
    return TensorSpec(tuple(shape), tuple(stride), dtype)


@dataclass
class _Code:
    """One function of one stage while it is written."""

    lines: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    receives: list[str] = field(default_factory=list)
    sends: list[str] = field(default_factory=list)


@dataclass
class Toy:
    """What to build; `save(folder)` writes the build and a `model.py` beside it."""

    forward: Sequence[int] = (0, 1)
    backward: Sequence[int] = (0, 1)
    microbatches: int = 1
    schedule: str = "async"
    policy: str = "latest"
    tied: bool = False
    dropout: bool = False
    weights_codec: str = ""
    placement: tuple[int, ...] = ()
    spoil: dict[int, tuple[str, str]] = field(default_factory=dict)

    @property
    def workers(self) -> int:
        return self.forward[-1] + 1

    @property
    def layers(self) -> int:
        return len(self.forward)

    def weight(self, layer: int) -> str:
        """The name of a layer's weight; the last layer's is the first one's, if tied."""
        return "layers.0.weight" if self.tied and layer == self.layers - 1 else f"layers.{layer}.weight"

    def initial(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(7)
        return {
            f"layers.{k}.weight": torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=generator) / 2
            for k in range(self.layers)
            if self.weight(k) == f"layers.{k}.weight"
        }

    def owner(self, name: str) -> int:
        return min(self.backward[k] for k in range(self.layers) if self.weight(k) == name)

    def save(self, folder: Path) -> Path:
        f, b, last, n = self.forward, self.backward, self.layers - 1, self.workers
        assert f[-1] == b[-1] == n - 1
        code: dict[tuple[int, Phase], _Code] = {(w, p): _Code() for w in range(n) for p in ("F", "B")}
        saved: list[list[str]] = [[] for _ in range(n)]
        edges: dict[str, EdgeSpec] = {}
        present: set[tuple[int, Phase, str]] = set()
        value = tensor(BATCH // self.microbatches, WIDTH)

        def bring(name: str, kind: EdgeKind, src: tuple[int, Phase], dst: tuple[int, Phase], spec: TensorSpec) -> None:
            """Make `name`, which exists at `src`, exist at `dst`."""
            if (*dst, name) in present or src == dst:
                return
            present.add((*dst, name))
            if src[0] == dst[0]:
                saved[src[0]].append(name)
                return
            edge = f"{name}_{src[1]}{src[0]}_{dst[1]}{dst[0]}"
            edges[edge] = EdgeSpec(edge, kind, *src, *dst, spec)
            code[src].lines.append(f"comm.send({edge!r}, {name})")
            code[src].sends.append(edge)
            code[dst].lines.append(f"{name} = comm.recv({edge!r})")
            code[dst].receives.append(edge)

        def weight(at: tuple[int, Phase], layer: int) -> str:
            name = self.weight(layer)
            if name not in code[at].weights:
                code[at].weights.append(name)
            return "w" + name.split(".")[1]

        bring("y", "input", (0, "F"), (n - 1, "F"), value)
        for k in range(self.layers):
            at: tuple[int, Phase] = (f[k], "F")
            previous = f"h{k - 1}" if k else "x"
            bring(previous, "activation", (f[k - 1] if k else 0, "F"), at, value)
            code[at].lines.append(f"h{k} = torch.tanh({previous} @ {weight(at, k)}.t())")
            if self.dropout and k == 0:
                code[at].lines.append("mask = (torch.rand_like(h0) > 0.25).to(h0.dtype)")
                code[at].lines.append("t0, h0 = h0, h0 * mask")
                assert f[0] == b[0]
                saved[0] += ["mask", "t0"]
        code[n - 1, "F"].lines.append(f"loss = ((h{last} - y) ** 2).mean()")
        for k in reversed(range(self.layers)):
            at = (b[k], "B")
            previous = f"h{k - 1}" if k else "x"
            out = "t0" if self.dropout and k == 0 else f"h{k}"
            if out != "t0":
                bring(out, "saved", (f[k], "F"), at, value)
            bring(previous, "saved", (f[k - 1] if k else 0, "F"), at, value)
            if k == last:
                bring("y", "input", (n - 1, "F"), at, value)
                code[at].lines.append(f"g{k} = 2 * (h{k} - y) / h{k}.numel()")
            else:
                bring(f"g{k}", "gradient", (b[k + 1], "B"), at, value)
            if out == "t0":
                code[at].lines.append("g0 = g0 * mask")
            code[at].lines.append(f"z = g{k} * (1 - {out} ** 2)")
            code[at].lines.append(f"d{k} = z.t() @ {previous}")
            if k:
                code[at].lines.append(f"g{k - 1} = z @ {weight(at, k)}")
        gradients: list[list[str]] = [[] for _ in range(n)]
        for k in range(self.layers):
            name = self.weight(k)
            at = (self.owner(name), "B")
            if self.tied and k == last:
                bring(f"d{k}", "gradient", (b[k], "B"), at, tensor(WIDTH, WIDTH))
                code[at].lines.append(f"d0 = d0 + d{k}")
            else:
                gradients[at[0]].append(name)
        folder.mkdir(parents=True, exist_ok=True)
        stages = []
        for w in range(n):
            source = self._source(w, code, saved[w], gradients[w])
            digest = hashlib.sha256(source.encode()).hexdigest()
            if w in self.spoil:
                assert self.spoil[w][0] in source
                source = source.replace(*self.spoil[w])
            (folder / f"stage_{w}.py").write_text(source)
            counts = w == 0
            forward = PartSpec(
                weights=tuple(code[w, "F"].weights),
                buffers=("seen",) if counts else (),
                batch=("batch[0]", "batch[1]") if w == 0 else (),
                receives=tuple(code[w, "F"].receives),
                sends=tuple(code[w, "F"].sends),
                saved=tuple(saved[w]),
                updates=("seen",) if counts else (),
                loss=w == n - 1,
                random=self.dropout and w == 0,
            )
            backward = PartSpec(
                weights=tuple(code[w, "B"].weights),
                receives=tuple(code[w, "B"].receives),
                sends=tuple(code[w, "B"].sends),
                saved=tuple(saved[w]),
                gradients=tuple(gradients[w]),
            )
            own = (w, w + 1)
            stages.append(StageSpec(f"stage_{w}.py", digest, forward, backward, own, own, own))
        self._finish(folder, stages, edges, value)
        return folder

    def _source(self, w: int, code: dict[tuple[int, Phase], _Code], saved: list[str], gradients: list[str]) -> str:
        def unpack(names: Sequence[str], source: str) -> list[str]:
            return [f"({', '.join(names)},) = {source}"] if names else []

        f, b = code[w, "F"], code[w, "B"]
        counts = w == 0
        forward = [
            *unpack(["w" + n.split(".")[1] for n in f.weights], "weights"),
            *(unpack(["seen"], "buffers") if counts else []),
            *(unpack(["x", "y"], "batch") if w == 0 else []),
            *f.lines,
            f"return {'loss' if w == self.workers - 1 else 'None'}, "
            f"({'seen + 1,' if counts else ''}), [{', '.join(saved)}]",
        ]
        backward = [
            *unpack(["w" + n.split(".")[1] for n in b.weights], "weights"),
            *unpack(saved, "saved"),
            "saved.clear()",
            *b.lines,
            f"return ({', '.join('d' + n.split('.')[1] for n in gradients)}{',' if gradients else ''})",
        ]
        parts = ["import torch", "", "", "def forward(weights, buffers, batch, comm):", *("    " + s for s in forward)]
        parts += ["", "", "def backward(weights, buffers, saved, comm):", *("    " + s for s in backward)]
        return "\n".join(parts) + "\n"

    def _finish(self, folder: Path, stages: list[StageSpec], edges: dict[str, EdgeSpec], value: TensorSpec) -> None:
        parameters = []
        for name, initial in self.initial().items():
            tied = self.tied and name == "layers.0.weight"
            names = (name, f"layers.{self.layers - 1}.weight") if tied else (name,)
            readers: list[tuple[int, Phase]] = [
                (w, p) for w, s in enumerate(stages) for p, part in (("F", s.forward), ("B", s.backward))
                if name in part.weights
            ]  # fmt: skip
            parameters.append(
                ParameterSpec(names, tensor(*initial.shape), self.owner(name), True, tuple(readers), saved=names)
            )
        buffers = (BufferSpec(("seen",), tensor(dtype="int64"), ("seen",), 0, (0,)),)
        example = (torch.zeros(1), torch.zeros(1))
        weights = folder / "weights.safetensors"
        save_file({**self.initial(), "seen": torch.tensor(0)}, weights)
        leaves = LeafSpec("batch[0]", value, dim=0), LeafSpec("batch[1]", value, dim=0)
        tree = pytree.treespec_dumps(pytree.tree_structure(example))
        step = StepSpec(leaves, tree, tuple(edges.values()), tuple(stages), units=("",) * self.workers)
        plan = Plan(
            fxpipe=fxpipe.__version__, torch="0", model_file=ModelFileSpec("../model.py"),
            microbatches=self.microbatches, schedule=self.schedule, policy=self.policy, device="cpu",
            steps=(step,), loss=LossSpec(self.workers - 1), parameters=tuple(parameters), buffers=buffers,
            weights=WeightsSpec(weights.name, hashlib.sha256(weights.read_bytes()).hexdigest()),
            weights_codec=self.weights_codec, placement=self.placement,
        )  # fmt: skip
        (folder / "plan.json").write_text(plan.to_json())
        (folder.parent / "model.py").write_text(TASK.format(batch=BATCH, width=WIDTH))

    def loss(self, weights: dict[str, torch.Tensor], batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The same step as plain PyTorch (without dropout)."""
        h, y = batch
        for k in range(self.layers):
            h = torch.tanh(h @ weights[self.weight(k)].t())
        return ((h - y) ** 2).mean()


@pytest.fixture(scope="session")
def toy() -> type[Toy]:
    """Makes builds by hand: `toy(forward=(0, 1), …).save(folder)`."""
    return Toy


@pytest.fixture
def set_flag() -> Iterator[Callable[[Any, str, Any], None]]:
    """Sets a flag of torch for the test; monkeypatch deletes those that are no plain attributes."""
    before = []

    def put(holder: Any, name: str, value: Any) -> None:
        before.append((holder, name, getattr(holder, name)))
        setattr(holder, name, value)

    yield put
    for holder, name, value in reversed(before):
        setattr(holder, name, value)


@pytest.fixture
def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Six minibatches for the toy."""
    generator = torch.Generator().manual_seed(3)
    pair = (BATCH, WIDTH)
    return [
        (
            torch.randn(pair, dtype=torch.float64, generator=generator),
            torch.randn(pair, dtype=torch.float64, generator=generator),
        )
        for _ in range(6)
    ]
