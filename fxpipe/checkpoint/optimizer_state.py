"""What an optimizer and its scheduler know, by the names of the parameters, so that other cuts find it again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.checkpoint.tree import Encoder, Unwritable
from fxpipe.errors import RunError
from fxpipe.task.several_optimizers import parts_of
from fxpipe.torch_private import pytree

State = dict[str, Any]

_OF_ALL = {"defaults", "state", "param_groups"}  # what torch.optim.Optimizer itself keeps, and is written otherwise


def optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> State:
    """All that the optimizer knows; its tensors are live ones.

    An optimizer of the user's own may keep more than torch's `state` and `param_groups`: attributes of plain values
    are written as well, those of other objects are what the hook `optimizer` makes them again. Where it has a
    `state_dict` of its own, that is written instead, and fits the same parameters alone.

    Args:
        names: of the parameters, by id.
    """
    parts = parts_of(optimizer)
    return {
        "groups": [_group(group, names) for group in optimizer.param_groups],
        "state": {names[id(p)]: held for part in parts for p, held in part.state.items() if isinstance(p, Tensor)},
        "parts": [_part(part) for part in parts],
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, found: Iterable[State], names: Mapping[int, str]) -> None:
    """Put back what `optimizer_state` gave, on one worker or on several.

    A parameter that was not trained there begins without a state; what it has in common with its group is that of the
    others in the group, or, where none of them was trained, of the group in its place.

    Args:
        found: of the same worker if the cuts are the same, else of all of them.

    Raises:
        RunError: parts cannot be moved to other cuts, or to other parameters.
    """
    found = list(found)
    groups = {name: group["options"] for each in found for group in each["groups"] for name in group["params"]}
    state = {name: held for each in found for name, held in each["state"].items()}
    alike = {len(each["groups"]) for each in found} == {len(optimizer.param_groups)}
    for number, group in enumerate(optimizer.param_groups):
        of_group = [names[id(p)] for p in group["params"]]
        there = next((groups[name] for name in of_group if name in groups), None)
        if there is None and alike:  # a scheduler has come as far with it as on every worker
            there = found[0]["groups"][number]["options"]
        _set(group, there or {})
    for number, part in enumerate(parts_of(optimizer)):
        own = [each["parts"][number] for each in found if number < len(each["parts"])]
        if any("own" in each for each in own):
            if len(own) != 1 or groups.keys() != {names[id(p)] for g in optimizer.param_groups for p in g["params"]}:
                raise RunError(
                    f"{type(part).__name__} keeps its state in a form of its own, which does not fit other cuts or "
                    "other parameters",
                    hint="go on with the build and the model file that the checkpoint was made with",
                )
            part.load_state_dict(own[0]["own"])
            continue
        for group in part.param_groups:
            for parameter in group["params"]:
                if names[id(parameter)] in state:
                    part.state[parameter] = _placed(state[names[id(parameter)]], parameter.device, group)
        for each in own[:1]:
            group = part.param_groups[0]
            device = next((p.device for p in group["params"]), torch.device("cpu"))
            part.state.update(_placed(each["others"], device, group))
            vars(part).update(_placed(each["attributes"], device, group))


def _placed(held: Any, device: torch.device, group: Mapping[str, Any]) -> Any:
    """State that was read, where an optimizer of parameters on a device keeps it: single numbers are the CPU's."""
    if device.type == "cpu":
        return held
    numbers = group.get("capturable") or group.get("fused")  # as in torch's own load_state_dict

    def place(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) and (value.dim() or numbers) else value

    return pytree.tree_map(place, held)


def updated_in(state: State) -> set[str]:
    """The parameters of which an optimizer was, in what `optimizer_state` gave."""
    return {name for group in state["groups"] for name in group["params"]}


def scheduler_state(scheduler: Any) -> State | None:
    """A scheduler's `state_dict`; None if it has none, or one that cannot be written: its steps are then repeated."""
    try:
        found = scheduler.state_dict()
        Encoder()(found)
    except (AttributeError, NotImplementedError, Unwritable):
        return None
    return dict(found)


def _group(group: Mapping[str, Any], names: Mapping[int, str]) -> State:
    options = {key: value for key, value in group.items() if key != "params" and _writable(value)}
    return {"params": [names[id(p)] for p in group["params"]], "options": options}


def _set(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        present = group.get(key)
        if isinstance(present, Tensor) and isinstance(value, Tensor):
            present.copy_(value)  # others may hold it
        else:
            group[key] = value


def _part(part: torch.optim.Optimizer) -> State:
    kind = type(part)
    if kind.__module__.startswith("torch.optim."):
        return {"attributes": {}, "others": {}}
    if kind.state_dict is not torch.optim.Optimizer.state_dict:
        return {"own": part.state_dict()}
    shared = {id(p) for group in part.param_groups for p in group["params"]} | _ids(part.state)
    own = {key: value for key, value in vars(part).items() if key not in _OF_ALL and not key.startswith("_optimizer_")}
    return {
        "attributes": {key: v for key, v in own.items() if _writable(v) and not _ids(v) & shared},
        "others": {key: value for key, value in part.state.items() if not isinstance(key, Tensor)},
    }


def left_out(part: torch.optim.Optimizer) -> State:
    """The attributes of an optimizer that `optimizer_state` leaves out, but for torch's own and functions."""
    written = _part(part)
    if "own" in written:
        return {}
    kept = {*_OF_ALL, *written["attributes"]}
    return {k: v for k, v in vars(part).items() if k not in kept and not k.startswith("_") and not callable(v)}


def _ids(value: Any) -> set[int]:
    """Of the tensors in a value."""
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
