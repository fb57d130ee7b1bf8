"""The state of an optimizer and its scheduler by the names of parameters, so that other cuts can load it; warns of
Python state that they, or callbacks, change and that no checkpoint has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor, nn

from fxpipe.checkpoint.tree import Encoder, Unwritable
from fxpipe.errors import RunError, listed
from fxpipe.optimizer.state_outside import of_library, state_outside
from fxpipe.task.several_optimizers import parts_of
from fxpipe.torch_private import SCHEDULERS, pytree
from fxpipe.tracing.holders import Attributes, Content, Memory
from fxpipe.tracing.lasting_state import noteworthy

State = dict[str, Any]


class Group(TypedDict):
    """A group of an optimizer: the names of its parameters, and its options."""

    params: list[str]
    options: dict[Any, Any]


class OneOptimizer(TypedDict):
    """One of several optimizers: its own form of state, or what it keeps in addition to torch's."""

    own: NotRequired[Any]
    attributes: NotRequired[dict[str, Any]]
    others: NotRequired[dict[Any, Any]]


class OptimizerState(TypedDict):
    """State of each parameter by name, which may be anything, and of the whole optimizer."""

    groups: list[Group]
    state: dict[str, Any]
    parts: list[OneOptimizer]


_OF_ALL = {"defaults", "state", "param_groups"}  # kept by torch.optim.Optimizer itself; written separately


def optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> OptimizerState:
    """The whole state of an optimizer; its tensors are live.

    A user's own optimizer may keep more than torch's `state` and `param_groups`. Attributes with plain values are
    written, too; for other attributes, the hook `optimizer` creates new values. If the class has its own `state_dict`,
    that is written instead, and fits only the same parameters.
    """
    parts = parts_of(optimizer)
    return {
        "groups": [_group(group, names) for group in optimizer.param_groups],
        "state": {names[id(p)]: held for part in parts for p, held in part.state.items() if isinstance(p, Tensor)},
        "parts": [_part(part) for part in parts],
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, states: Iterable[State], names: Mapping[int, str]) -> None:
    """Load what `optimizer_state` returned, on one worker or on several.

    A parameter that was not trained there starts without a state. It takes the options of its group from the group's
    other parameters or, if none of them was trained, from the group at the same place.

    Args:
        states: of the same worker if the cuts are the same, else of all workers.

    Raises:
        RunError: some state does not fit other cuts or other parameters.
    """
    states = list(states)
    groups = {name: group["options"] for each in states for group in each["groups"] for name in group["params"]}
    state = {name: held for each in states for name, held in each["state"].items()}
    alike = {len(each["groups"]) for each in states} == {len(optimizer.param_groups)}
    for number, group in enumerate(optimizer.param_groups):
        of_group = [names[id(p)] for p in group["params"]]
        there = next((groups[name] for name in of_group if name in groups), None)
        if there is None and alike:  # schedulers are equally far on all workers
            there = states[0]["groups"][number]["options"]
        _set(group, there or {})
    for number, part in enumerate(parts_of(optimizer)):
        rows = [each["parts"][number] for each in states if number < len(each["parts"])]
        if any("own" in each for each in rows):
            if len(rows) != 1 or groups.keys() != {names[id(p)] for g in optimizer.param_groups for p in g["params"]}:
                raise RunError(
                    f"{type(part).__name__} has its own form of state, which does not fit other cuts or "
                    "other parameters",
                    hint="resume with the build and the model file that the checkpoint was made with",
                )
            part.load_state_dict(rows[0]["own"])
            continue
        for group in part.param_groups:
            for parameter in group["params"]:
                if names[id(parameter)] in state:
                    part.state[parameter] = _placed(state[names[id(parameter)]], parameter.device, group)
        for each in rows[:1]:
            group = part.param_groups[0]
            device = next((p.device for p in group["params"]), torch.device("cpu"))
            part.state.update(_placed(each["others"], device, group))
            _refuse_methods(part, each["attributes"])
            vars(part).update(_placed(each["attributes"], device, group))


def load_scheduler_state(scheduler: Any, state: Mapping[str, Any]) -> None:
    """Load what `scheduler_state` returned."""
    pairs = [(scheduler, state)]
    for holder, held in pairs:  # torch's own loading sets attributes, also of the parts of a SequentialLR
        if type(holder).load_state_dict.__module__.startswith("torch.optim."):
            _refuse_methods(holder, held)
            pairs += zip(getattr(holder, SCHEDULERS, ()), held.get(SCHEDULERS, ()), strict=False)
    scheduler.load_state_dict(state)


def _refuse_methods(holder: object, attributes: Mapping[str, Any]) -> None:
    """Refuse attributes with the names of methods or properties, which they would replace."""
    for name in attributes:
        member = getattr(type(holder), name, None)
        if callable(member) or hasattr(member, "__set__"):
            raise RunError(
                f"the checkpoint has a value for {type(holder).__name__}.{name}, which is not a state but code",
                hint="the checkpoint was changed after it was written: resume from another one",
            )


def _placed(held: Any, device: torch.device, group: Mapping[str, Any]) -> Any:
    """Loaded state on the device where the optimizer keeps it: single numbers stay on the CPU."""
    if device.type == "cpu":
        return held
    numbers = group.get("capturable") or group.get("fused")  # as in torch's own load_state_dict

    def place(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) and (value.dim() or numbers) else value

    return pytree.tree_map(place, held)


def updated_in(state: State) -> set[str]:
    """The parameters that an optimizer updated, by what `optimizer_state` returned."""
    return {name for group in state["groups"] for name in group["params"]}


def scheduler_state(scheduler: Any) -> State | None:
    """A scheduler's `state_dict`; None if it has none that can be written: then its steps are repeated."""
    try:
        state = scheduler.state_dict()
        Encoder()(state)
    except (AttributeError, NotImplementedError, Unwritable):
        return None
    return dict(state)


def _group(group: Mapping[str, Any], names: Mapping[int, str]) -> Group:
    options = {key: value for key, value in group.items() if key != "params" and _writable(value)}
    return {"params": [names[id(p)] for p in group["params"]], "options": options}


def _set(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        present = group.get(key)
        if isinstance(present, Tensor) and isinstance(value, Tensor):
            present.copy_(value)  # other objects may hold it
        else:
            group[key] = value


def _part(part: torch.optim.Optimizer) -> OneOptimizer:
    kind = type(part)
    if kind.__module__.startswith("torch.optim."):
        return {"attributes": {}, "others": {}}
    other_form = not kind.__module__.startswith("bitsandbytes.")  # whose state_dict() gathers for FSDP
    if other_form and kind.state_dict is not torch.optim.Optimizer.state_dict:
        return {"own": part.state_dict()}
    shared = {id(p) for group in part.param_groups for p in group["params"]} | _ids(part.state)
    fields = {k: v for k, v in vars(part).items() if k not in _OF_ALL and not k.startswith("_optimizer_")}
    return {
        "attributes": {key: v for key, v in fields.items() if _writable(v) and not _ids(v) & shared},
        "others": {key: value for key, value in part.state.items() if not isinstance(key, Tensor)},
    }


def left_out(part: torch.optim.Optimizer) -> State:
    """The attributes of an optimizer that `optimizer_state` leaves out, except torch's own and functions."""
    written = _part(part)
    if "own" in written:
        return {}
    kept = {*_OF_ALL, *written["attributes"]}
    return {k: v for k, v in vars(part).items() if k not in kept and not k.startswith("_") and not callable(v)}


def _ids(value: Any) -> set[int]:
    """The ids of the tensors in a value."""
    if isinstance(value, Tensor):
        return {id(value)}
    if isinstance(value, Mapping):
        return set().union(*map(_ids, value.values()))
    return set().union(*map(_ids, value)) if isinstance(value, (list, tuple, set)) else set()


def _writable(value: Any) -> bool:
    if isinstance(value, nn.Parameter):
        return False
    try:
        Encoder()(value)
    except Unwritable:
        return False
    return True


class UnsavedState:
    """Create it before the first step.

    Args:
        scheduler: if its state cannot be written, a run that resumes repeats its steps, and nothing is lost.
        callbacks: functions of the user that are called during training.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Any, callbacks: Iterable[Any] = ()) -> None:
        keeps = scheduler is not None and scheduler_state(scheduler) is not None
        not_saved = [_LeftOut(part) for part in parts_of(optimizer)]
        objects = [
            value for holder in not_saved for value in holder.read().values() if not holder.made_by_library(value)
        ]
        things = [optimizer, *([scheduler] if keeps else [])]
        self._python = state_outside(things, [*objects, *callbacks], libraries=False)
        self._before = [*self._python.snapshot(), *((holder, holder.read()) for holder in not_saved)]
        self._warned = False

    def warning(self) -> str | None:
        """The warning at a checkpoint, given once: what has changed, and how to keep it."""
        changes = [c for c in noteworthy(self._python.changes(self._before)) if not isinstance(c.holder, Memory)]
        if self._warned or not changes:
            return None
        self._warned = True
        names = listed(list(dict.fromkeys(map(str, changes))), 4)
        return (
            f"hooks of the optimizer, its scheduler or callbacks have changed {names}, which no checkpoint has: a run "
            "that resumes starts with the first value. Keep it in the optimizer's state or groups, or in the "
            "scheduler's state_dict(), which checkpoints have"
        )


class _LeftOut(Attributes):
    """The attributes of an optimizer that are not written."""

    def __init__(self, part: torch.optim.Optimizer) -> None:
        super().__init__(part, type(part).__name__)

    def read(self) -> Content:
        return left_out(self.thing)

    def made_by_library(self, value: Any) -> bool:
        """Whether an object is of the package of an optimizer that is not the user's own: a cache, loaded kernels."""
        packages = (type(each).__module__.partition(".")[0] for each in (value, self.thing))
        return of_library(type(self.thing)) and len(set(packages)) == 1

    def write(self, content: Mapping[Any, Any]) -> None:
        """Do nothing: they are only read."""
