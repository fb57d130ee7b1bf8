"""What a case trains where there is a flush: eager PyTorch on the whole batch, without fxpipe."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import task
import torch
from case import STEPS, Case
from packed_tensors import Packed
from product import CLIP, DECAY, INTERVAL, OUTER_EVERY, SCALE, SEED, Outcome, places
from task import MODELS, RATES, Task, as_list, cycled, forget, tokens
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils import _pytree as pytree

OUTER = {"none": (0.7, 0.9), "outer=sparseloco:8": (1.0, 0.0)}
"""Rates and momentum of outer steps."""
CHUNK, SENT, CARRIED = 4096, 8, 0.95


class Trained:
    """A model in training, with all that belongs to it."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        self.case, self.task = case, Task(case)
        self.model = self.task.marked(model.float() if case.mixed else model)
        self.computes = _narrow(case, model) if case.mixed else model
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in named]
        self.optimizers = as_list(self.task.optimizer(named))
        made = [RATES[case.rate](optimizer) for optimizer in self.optimizers] if case.rate in RATES else []
        self.schedulers = [each[0] if isinstance(each, tuple) else each for each in made]
        self.epoch = len(self.task.train_data())
        self.scale, self.good = SCALE if case.precision == "fp16" else 1.0, 0
        self.metrics: list[dict[str, float]] = []
        self.moved: dict[Tensor, tuple[Tensor, float]] = {}
        """The last update of each parameter and its rate."""
        self.averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY)) if case.average else None

    def step(self, parts: list[Any], number: int, numbers: range | None = None) -> float:
        """One update by the mean of the losses of so many parts, unless it overflows; that mean.

        Args:
            numbers: of the parts, among all replicas' microbatches.
        """
        losses, metrics = [], []
        if self.case.fades and self.case.state == "data":
            self.task.fade()
        if self.case.model == "lstm" and number % self.epoch == 0:
            forget(self.model)
        true = [p.detach().clone() for p in self.parameters]
        if self.case.policy == "xgrad":
            self._put([self._ahead(optimizer, group, p) for optimizer, group, p in self._trained()])
        if self.case.mixed:
            narrow, wide = self.computes.state_dict(), self.model.state_dict()
            for name, tensor in narrow.items():  # not load_state_dict: torch may swap parameters there, but no LSTM's
                tensor.copy_(wide[name])
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        counts = [float(tokens(part)) if self.case.model == "texts" else 1.0 for part in parts]
        for microbatch, part, count in zip(numbers or range(len(parts)), parts, counts, strict=True):
            share = count / sum(counts)
            with self._drawing(number, microbatch):  # backward computes checkpoints again
                with _cast(self.case):
                    found = self.task.loss(self.computes, part)
                loss, own = found if isinstance(found, tuple) else (found, {})
                (self.scale * share * loss).backward()
            if self.case.mixed:
                self._add_up()
            losses.append(share * float(loss.detach()))
            metrics.append({name: float(value) for name, value in own.items()})
        self.metrics += [metrics[0]] if metrics[0] else []
        gradients = [p.grad.div_(self.scale) for p in self.parameters if p.grad is not None]
        finite = all(gradient.isfinite().all() for gradient in gradients)
        if self.case.clip:
            nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self._put(true)
        rates = [group["lr"] for _, group, _ in self._trained()]
        for optimizer in self.optimizers if finite else ():
            optimizer.step()
        if finite:
            self.moved = {p: (p.detach() - old, r) for p, old, r in zip(self.parameters, true, rates, strict=True)}
        if self.case.precision == "fp16":  # as torch.amp.GradScaler does
            self.good = self.good + 1 if finite else 0
            self.scale *= 0.5 if not finite else 2.0 if self.good % INTERVAL == 0 else 1.0
        if self.case.rate == "falling" or (number + 1) % self.epoch == 0:
            for scheduler in self.schedulers:
                scheduler.step()
        if self.case.fades and self.case.state == "callback":
            self.task.fade()
        return sum(losses)

    def _put(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data.copy_(value)

    def _trained(self) -> list[tuple[Any, Any, Tensor]]:
        """Each parameter with its optimizer and its group."""
        of = {p: (o, group) for o in self.optimizers for group in o.param_groups for p in group["params"]}
        return [(*of[p], p) for p in self.parameters]

    def _ahead(self, optimizer: Any, group: Any, p: Tensor) -> Tensor:
        """XGrad (Guan et al. 2023): the weights after the next update, as the optimizer would go on by itself."""
        state, rate = optimizer.state.get(p, {}), group["lr"]
        if p not in self.moved:
            return p.detach().clone()
        if state.get("momentum_buffer") is not None:
            return p.detach() - rate * state["momentum_buffer"]
        if "exp_avg" in state:
            first, second = (1 - beta ** float(state["step"]) for beta in group["betas"])
            scale = (state["exp_avg_sq"] / second).sqrt() + group["eps"]
            return p.detach() - rate * (group["weight_decay"] * p.detach() + state["exp_avg"] / first / scale)
        moved, last = self.moved[p]
        return p.detach() + rate / last * moved

    @contextmanager
    def _drawing(self, minibatch: int, microbatch: int) -> Iterator[None]:
        """In this block, what a worker's forward draws follows from its place: see docs/concepts/versions.md."""

        apart = self.case.replicas in ("outer", "delayed")

        def seed(place: str) -> None:
            torch.manual_seed(int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "little") >> 1)

        def begin(worker: int) -> None:
            seed(f"{SEED}/{worker}/F/{minibatch}/{microbatch}")

        def one_draw(name: str, draw: Callable[[], Tensor]) -> Tensor:
            with torch.random.fork_rng(devices=[]):
                seed(f"{SEED}/{microbatch % self.case.dp if apart else 0}/{name}/{minibatch}")
                return draw()

        with ExitStack() as stack:
            if (self.case.microbatches if apart else self.case.parts) > 1:
                stack.enter_context(mock.patch.object(task, "one_draw", one_draw))
            cut = self.task.draws and self.case.workers > 1
            for worker, place in enumerate(places(self.case)[0] if cut else (), 1):
                module = self.computes.get_submodule(MODELS[self.case.model].paths[place])
                hook = module.register_forward_pre_hook(lambda *_, worker=worker: begin(worker))
                stack.callback(hook.remove)
            begin(0)
            yield

    def _add_up(self) -> None:
        """Add the gradients of a part to those of the parameters, and take the buffers that it has changed."""
        for narrow, kept in zip(self.computes.parameters(), self.model.parameters(), strict=True):
            if narrow.grad is not None:
                kept.grad = narrow.grad.float() if kept.grad is None else kept.grad + narrow.grad.float()
                narrow.grad = None
        for name, buffer in self.computes.named_buffers():
            self.model.get_buffer(name).copy_(buffer)

    def average(self) -> None:
        """Take the weights after an update into their average."""
        if self.averaged is not None:
            self.averaged.update_parameters(self.model)


def trained(case: Case) -> Outcome:
    """The run in eager PyTorch: on whole batches, or on parts where a batch norm sees one at a time."""
    if case.replicas in ("outer", "delayed"):
        return _apart(case)
    run = Trained(case, Task(case).model())
    losses = []
    for m, batch in enumerate(cycled(run.task.train_data(), STEPS)):
        losses.append(run.step(_parts(case, batch), m))
        run.average()
    return _left(case, run, losses)


def _parts(case: Case, batch: Any) -> list[Any]:
    return _split(batch, case.parts) if _in_parts(case) else [batch]


def _in_parts(case: Case) -> bool:
    """Whether parts are other than the whole batch: each has statistics, a state or draws, or rounds or overflows."""
    rounds = case.precision == "fp16" or (case.mixed and case.model != "function")
    return case.model in ("conv", "lstm") or Task(case).draws or rounds


def _split(batch: Any, count: int) -> list[Any]:
    leaves, structure = pytree.tree_flatten(batch)
    cut = [isinstance(leaf, Tensor) and len(leaf) > 0 and len(leaf) % count == 0 for leaf in leaves]
    columns = [leaf.chunk(count) if c else [leaf] * count for c, leaf in zip(cut, leaves, strict=True)]
    return [pytree.tree_unflatten(list(row), structure) for row in zip(*columns, strict=True)]


def _joined(parts: list[Any]) -> Any:
    return pytree.tree_map(lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0], *parts)


def _apart(case: Case) -> Outcome:
    """Replicas that train apart, and outer steps by Nesterov's momentum over the mean of what they changed."""
    first = Task(case).model()
    runs = [Trained(case, copy.deepcopy(first)) for _ in range(case.dp)]
    common = [p.detach().clone() for p in runs[0].parameters]
    rate, momentum = OUTER.get(case.codec, OUTER["none"])
    outer = SGD([nn.Parameter(c) for c in common], rate, momentum, nesterov=momentum > 0)
    left_out = [[torch.zeros_like(c) for c in common] for _ in runs]
    shared: list[Tensor] = outer.param_groups[0]["params"]
    begun: list[list[Tensor]] | None = None
    losses = []

    def apply(weights: list[list[Tensor]]) -> None:
        for place, parameter in enumerate(shared):
            moved = [parameter.detach() - own[place] for own in weights]
            if case.codec.startswith("outer=") and parameter.nbytes > 64:  # what is smaller is sent as it is
                moved = [_sent(left_out[r], place, each) for r, each in enumerate(moved)]
            parameter.grad = torch.stack(moved).mean(0)
        outer.step()

    def now() -> list[list[Tensor]]:
        return [[p.detach().clone() for p in run.parameters] for run in runs]

    def go_on(since: list[list[Tensor]] | None) -> None:
        for r, run in enumerate(runs):
            for place, parameter in enumerate(run.parameters):
                done = 0 if since is None else parameter.detach() - since[r][place]
                parameter.data.copy_(shared[place].detach() + done)
        if since is None:
            for buffers in zip(*(run.model.buffers() for run in runs), strict=True):
                mean = torch.stack(buffers).mean(0) if buffers[0].is_floating_point() else buffers[0]
                for buffer in buffers:
                    buffer.copy_(mean)

    for m, batch in enumerate(cycled(runs[0].task.train_data(), STEPS)):
        parts = _split(batch, case.parts)
        shares = [parts[r :: case.dp] for r in range(case.dp)]
        found = [
            run.step(own, m, range(r, len(parts), case.dp)) if _in_parts(case) else run.step([_joined(own)], m)
            for r, (run, own) in enumerate(zip(runs, shares, strict=True))
        ]
        losses.append(found[0])
        if (m + 1) % OUTER_EVERY == 0:
            if case.replicas == "outer":
                apply(now())
                go_on(None)
            else:
                if begun is not None:
                    apply(begun)
                    go_on(begun)
                begun = now()
        runs[0].average()
    if begun is not None:
        apply(begun)
        go_on(begun)
    if STEPS % OUTER_EVERY:  # the end is an outer step out of turn, of what was trained since the last one
        apply(now())
        go_on(None)
    return _left(case, runs[0], losses)


def _sent(left_out: list[Tensor], place: int, moved: Tensor) -> Tensor:
    """What SparseLoCo sends of how far a replica has moved: of the greatest values of each chunk, sign and one of two
    magnitudes."""
    wanted = CARRIED * left_out[place] + moved
    sent = torch.zeros_like(wanted)
    chunks = -(-wanted.numel() // CHUNK)
    size = 4 * -(-wanted.numel() // (4 * chunks))
    for values, found in zip(wanted.view(-1).split(size), sent.view(-1).split(size), strict=True):
        greatest = values.abs().argsort(descending=True)[:SENT]
        greatest = greatest[values[greatest] != 0]
        mean = values[greatest].abs().mean()
        for part in (greatest[values[greatest].abs() >= mean], greatest[values[greatest].abs() < mean]):
            found[part] = values[part].sign() * values[part].abs().mean().bfloat16().double()
    left_out[place] = wanted - sent
    return sent


def _left(case: Case, run: Trained, losses: list[float]) -> Outcome:
    averages = dict(run.averaged.module.named_parameters()) if run.averaged is not None else {}
    held = run.model.state_dict().items()
    found = {name: value.detach().cpu() for name, value in held if not isinstance(value, Packed)}
    metrics = {} if case.evaluation == "none" else evaluated(case, run.model, run.task)
    return Outcome(losses, found, {n: v.detach().cpu() for n, v in averages.items()}, [], metrics, run.metrics)


def evaluated(case: Case, model: nn.Module, task: Task) -> dict[str, float]:
    """The mean over samples of each metric, or over what `loss_weight` counts, without autocast."""
    model = (_narrow(case, model) if case.mixed else copy.deepcopy(model)).eval()
    if case.model == "lstm":
        forget(model)
    with torch.no_grad():
        count = tokens if task.weighed else _samples
        rows = [(count(batch), task.metrics(model, batch)) for batch in task.eval_data()]
    of_all = task.metrics_of_all({"each": [row.pop("each") for _, row in rows]}) if task.gathers else {}
    total = sum(count for count, _ in rows)
    return {name: sum(count * float(row[name]) for count, row in rows) / total for name in rows[0][1]} | of_all


def _samples(batch: Any) -> int:
    return max(len(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))


def _narrow(case: Case, model: nn.Module) -> nn.Module:
    """A copy in bfloat16; batch norms stay in float32 where the model is in float32."""
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d) and case.precision == "params":
            narrow.get_submodule(name).float().load_state_dict(module.state_dict())  # not rounded
    return narrow


def _cast(case: Case) -> Any:
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return (
        torch.autocast(Task(case).device.type, kinds[case.precision])
        if case.precision in kinds
        else contextlib.nullcontext()
    )
