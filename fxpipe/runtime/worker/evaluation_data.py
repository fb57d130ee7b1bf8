"""What an evaluation reads on worker 0: the batches of `eval_data()`, and which of the captured shapes each has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch.utils import _pytree as pytree

from fxpipe.errors import BatchError, FxpipeError, TaskError
from fxpipe.plan.spec import EvaluationSpec, LeafSpec, Plan
from fxpipe.random_state import RandomState, random_state, random_state_kept, seed_everything, set_random_state
from fxpipe.stages.minibatch import number_of
from fxpipe.task.batch import describe, dump, said, shape_key
from fxpipe.task.containers import flatten, tree_text
from fxpipe.task.loss_weights import LossWeight, LossWeights
from fxpipe.task.model_file import hook_raised
from fxpipe.task.padding import padded
from fxpipe.task.splitter import Splitter

Batches = Callable[[], Iterable[Any]]


class Placed(NamedTuple):
    """A batch as the stages take it: the number of its shape among `Plan.evaluations`, its leaves, what it counts.

    Attributes:
        leaves: None where another replica evaluates it.
        checksum: of the batch as the user gave it, where there are other replicas; else 0.
    """

    shape: int
    leaves: tuple[Any, ...] | None
    weight: float
    checksum: int = 0


class EvaluationData:
    """The batches of each evaluation: the same every time, without any effect on other random numbers.

    Args:
        batches: gives a fresh iterable of batches, such as `eval_data`.
        seed: of the run: torch, `random` and numpy are seeded with it before `batches` is called.
        loss_weight: the hook that weighs batches; by their samples if it is None.
        task: its file is named in errors.
    """

    def __init__(
        self,
        plan: Plan,
        batches: Batches,
        seed: int,
        loss_weight: LossWeight | None = None,
        task: object = None,
    ) -> None:
        self._shapes = Shapes(plan)
        self._weigh = LossWeights(plan, loss_weight)
        self._batches = batches
        self._seed = seed
        self._task = task

    def __call__(self, replica: int = 0, replicas: int = 1) -> Iterator[Placed]:
        """The batches of one evaluation, each read when it is asked for; of several replicas, one takes every so many.

        Raises:
            TaskError: producing or weighing them failed, or there was none.
            BatchError: one has a shape that was not captured.
        """
        state: RandomState | None = None
        found: Iterator[Any] | None = None
        count = 0
        while True:
            with random_state_kept():
                if state is None:
                    seed_everything(self._seed)
                else:
                    set_random_state(state)
                try:
                    found = iter(self._batches()) if found is None else found
                    batch = next(found)
                except StopIteration:
                    break
                except FxpipeError:
                    raise
                except Exception as error:
                    raise hook_raised("eval_data", error, getattr(self._task, "path", None)) from error
                state = random_state()
            own = count % replicas == replica
            count += 1
            shape, leaves = self._shapes(batch, count, own)
            yield Placed(shape, leaves, self._weigh(batch), number_of([flatten(batch)[0]]) if replicas > 1 else 0)
        if not count:
            raise TaskError(
                "eval_data() gave no batch",
                hint="return a new iterable at every call: it is called once for each evaluation",
            )


class Shapes:
    """Finds which captured shape a batch has once it is padded, and lays it out as it was captured."""

    def __init__(self, plan: Plan) -> None:
        self._specs, self._padding = plan.evaluations, plan.padding
        self._placers = [Splitter(spec.batch, spec.batch_spec, 1, plan.device) for spec in plan.evaluations]
        self._numbers = {shape_key(spec.batch_spec, spec.batch): i for i, spec in enumerate(plan.evaluations)}
        self._constants = {leaf.name for spec in plan.evaluations for leaf in spec.batch if leaf.tensor is None}

    def __call__(self, batch: Any, number: int, wanted: bool = True) -> tuple[int, tuple[Any, ...] | None]:
        """The number of the batch's shape, and copies of its leaves, since an iterable may fill the same memory again.

        Args:
            number: which batch of `eval_data()` it is, from 1.
            wanted: whether to copy the leaves; else there are none.

        Raises:
            BatchError: no batch of this shape was captured; says what it is and what the build knows.
        """
        batch = padded(batch, self._padding)
        leaves, _, tree = describe(batch, self._constants)
        shape = self._numbers.get(shape_key(dump(tree), leaves))
        if shape is None:
            raise self._unknown(leaves, tree, number)
        return shape, self._placers[shape](batch, number - 1)[0] if wanted else None

    def _unknown(self, leaves: list[LeafSpec], tree: pytree.TreeSpec, number: int) -> BatchError:
        alike = [spec for spec in self._specs if spec.batch_spec == dump(tree)]
        hint = "compile again, so that all shapes of eval_data() are known; or drop the last, smaller batch "
        hint += "(drop_last=True) or pad it"
        if not alike:
            return BatchError(
                f"batch {number} of eval_data() is built differently from those that were captured: "
                f"{tree}, not {tree_text(self._specs[0].batch_spec)}",
                hint=hint,
                page="batch-shapes",
            )
        nearest = min(alike, key=lambda spec: len(_differences(leaves, spec)))
        more = f" (of {len(alike)} shapes that were captured, the nearest)" if len(alike) > 1 else ""
        return BatchError(
            f"batch {number} of eval_data() has a shape that the build was not compiled for: "
            + "; ".join(_differences(leaves, nearest))
            + more,
            hint=hint,
            page="batch-shapes",
        )


def _differences(leaves: Iterable[LeafSpec], spec: EvaluationSpec) -> list[str]:
    pairs = [(leaf.name, _text(leaf), _text(known)) for leaf, known in zip(leaves, spec.batch, strict=True)]
    return [f"{name} is {found}, captured as {known}" for name, found, known in pairs if found != known]


def _text(leaf: LeafSpec) -> str:
    if leaf.tensor is None:
        return f"the constant {said(leaf.constant)}"
    return f"{leaf.tensor.dtype}{list(leaf.tensor.shape)}"
