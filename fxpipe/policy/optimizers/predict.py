"""Predicts weights some updates ahead, in the direction in which the optimizer moved last."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fxpipe.policy.optimizers.rules import LAST_UPDATE, Look, Rule, add, rate_of, rule_of
from fxpipe.torch_private import foreach_add_, foreach_copy_, foreach_neg_


class Predictor:
    """Predicts a worker's weights `steps` updates ahead: Ŵ = W − steps·(the learning rate)·(the direction).

    The direction depends on the optimizer (`fxpipe.policy.optimizers.rules` has the table): momentum, Adam's quotient,
    or, for any other optimizer, the last update itself. Each parameter group has its own rule, chosen once; the options
    that the rule needs, such as `lr`, are read for every prediction, so a scheduler can change them.

    Nothing is changed in place: neither a live parameter nor the optimizer's state. A prediction has separate memory,
    reused from what `give_back` has returned: new memory in every step would cost more (page faults) than the
    prediction itself.

    Memory in addition to the predictions: none if the optimizer holds momentum or moments; one copy of the weights for
    the last-update rule.

    Args:
        optimizer: holds the state that is read; it may load another state at any time.
        parameters: what can be predicted, in the caller's order. A parameter in no group is frozen.
        weight_form: for every optimizer, Ŵ = W + steps·(W_t − W_{t−1}), whatever the learning rate is.

    Attributes:
        rules: the name of each parameter group's rule.
    """

    entry: ClassVar[str] = "last_updates"
    form = dict[str, tuple[Tensor, float | None]]
    """Where a checkpoint keeps its state by the names of parameters, and of which type."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], *, weight_form: bool = False
    ) -> None:
        self.optimizer = optimizer
        self.parameters = tuple(parameters)
        self.weight_form = weight_form
        groups = optimizer.param_groups
        self._rules = [LAST_UPDATE if weight_form else rule_of(optimizer, group) for group in groups]
        self.rules = tuple(rule.name for rule in self._rules)
        # By number, because loading a state replaces the groups themselves.
        self._group = {id(parameter): number for number, group in enumerate(groups) for parameter in group["params"]}
        self._observed = [p for p in self.parameters if id(p) in self._group and self._rule(p) is LAST_UPDATE]
        self._update: dict[int, Tensor] = {}  # last-update: W_t − W_{t−1} by parameter's id
        self._used: list[float | None] = [None] * len(groups)  # last-update: the rate that made it, by group
        self._spare: dict[int, list[Tensor]] = defaultdict(list)  # memory for predictions, by parameter's id

    @torch.no_grad()
    def predict(self, steps: int, subset: Sequence[int] | None = None) -> list[Tensor]:
        """The parameters (those with these indices) `steps` updates ahead, in memory of their own.

        With steps = 0, for a frozen parameter, and before a parameter's first update: the live parameter itself.
        """
        tensors = list(self.parameters if subset is None else (self.parameters[index] for index in subset))
        if steps == 0:
            return tensors
        by_group: dict[int, list[int]] = defaultdict(list)
        for place, parameter in enumerate(tensors):
            if id(parameter) in self._group and self._has_direction(parameter):
                by_group[self._group[id(parameter)]].append(place)
        for number, places in by_group.items():
            ahead = self._ahead(steps, number, [tensors[p] for p in places])
            for place, predicted in zip(places, ahead, strict=True):
                tensors[place] = predicted
        return tensors

    def give_back(self, predicted: Sequence[Tensor], subset: Sequence[int]) -> None:
        """Give back the memory of results of `predict(steps, subset)` that are no longer read."""
        for tensor, index in zip(predicted, subset, strict=True):
            parameter = self.parameters[index]
            if tensor is not parameter:
                self._spare[id(parameter)].append(tensor)

    @torch.no_grad()
    def before_step(self) -> None:
        """Call right before every `optimizer.step()`: the last-update rule keeps a copy of the weights."""
        if self._observed:
            if len(self._update) < len(self._observed):
                new = [p for p in self._observed if id(p) not in self._update]
                self._update |= {id(p): torch.empty_like(p, requires_grad=False) for p in new}
            foreach_copy_(self._last_updates(self._observed), self._observed)
            self._used = [rate_of(group) for group in self.optimizer.param_groups]

    @torch.no_grad()
    def after_step(self) -> None:
        """Call after weights have changed and before rates do: the last-update rule turns its copy into the update.

        That is right after every `optimizer.step()` and everything else that belongs to the update.
        """
        if self._observed:
            updates = self._last_updates(self._observed)
            foreach_neg_(updates)
            foreach_add_(updates, self._observed)

    def state(self) -> list[tuple[Tensor, Tensor, float | None]]:
        """What it remembers of the last update: each parameter, its update and its rate. For `load`."""
        return [
            (p, self._update[id(p)], self._used[self._group[id(p)]]) for p in self._observed if id(p) in self._update
        ]

    def load(self, remembered: Sequence[tuple[Tensor, Tensor, float | None]]) -> None:
        """Continue from another predictor's `state`, for some parameters; fails if the optimizer's does not fit."""
        observed = {id(p) for p in self._observed}
        for parameter, update, used in remembered:
            if id(parameter) in observed:
                self._update[id(parameter)] = torch.empty_like(parameter, requires_grad=False).copy_(update)
                self._used[self._group[id(parameter)]] = used
        every = range(len(self.parameters))
        self.give_back(self.predict(1, every), every)

    def _memory(self, parameter: Tensor) -> Tensor:
        spare = self._spare[id(parameter)]
        return spare.pop() if spare else torch.empty_like(parameter, requires_grad=False)

    def _last_updates(self, weights: Sequence[Tensor]) -> list[Tensor]:
        return [self._update[id(weight)] for weight in weights]

    def _rule(self, parameter: Tensor) -> Rule:
        return self._rules[self._group[id(parameter)]]

    def _has_direction(self, parameter: Tensor) -> bool:
        rule = self._rule(parameter)
        if rule is LAST_UPDATE:
            return id(parameter) in self._update
        return self.optimizer.state.get(parameter, {}).get(rule.state) is not None

    def _ahead(self, steps: int, number: int, weights: list[Tensor]) -> list[Tensor]:
        out = [self._memory(weight) for weight in weights]
        group, write = self.optimizer.param_groups[number], self._rules[number].write
        if write is None:
            add(out, weights, self._last_updates(weights), self._repeats(steps, number))
        else:
            states = [self.optimizer.state.get(weight, {}) for weight in weights]
            write(Look(out, weights, states, group, steps))
        return out

    def _repeats(self, steps: int, number: int) -> float:
        """How many times to repeat the last update for the next `steps`: more than `steps` if the rate grows."""
        present, used = rate_of(self.optimizer.param_groups[number]), self._used[number]
        return steps if self.weight_form or not present or not used else steps * present / used
