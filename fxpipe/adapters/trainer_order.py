"""The order in which transformers' Trainer gives its samples, by its own sampler and by accelerate's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler


def in_order(dataset: Any, args: Any, options: Mapping[str, Any]) -> Callable[[int], DataLoader[Any]]:
    """A function that gives the loader of an epoch: always the same one, set to that epoch.

    A batch has the samples of one update. Epoch `e` is shuffled by `data_seed + e`, or `seed + e` where there is no
    `data_seed`: Trainer's order, whatever `fxpipe run --seed` says. Under `group_by_length`, and with
    `accelerator_config={"use_seedable_sampler": False}`, Trainer draws the order from torch's global generator, as
    dropout does, so there only the way of drawing it is the same.

    Args:
        dataset: as Trainer takes it. A streamed one has its own order, and hears of epochs by its `set_epoch`.
        args: `TrainingArguments`.
        options: further arguments of the `DataLoader`.
    """
    batches: Any = None
    if isinstance(dataset, IterableDataset):  # Trainer's `dataloader_drop_last` does not reach them
        loader = DataLoader(dataset, args.per_device_train_batch_size * args.gradient_accumulation_steps, **options)
    else:
        batches = _batches(dataset, args)
        loader = DataLoader(dataset, batch_sampler=Updates(batches, args.gradient_accumulation_steps), **options)

    def of_epoch(epoch: int) -> DataLoader[Any]:
        counting: tuple[Any, ...] = (dataset, batches, getattr(batches, "sampler", None))
        for counts in counting:
            if hasattr(counts, "set_epoch"):
                counts.set_epoch(epoch)
        return loader

    return of_epoch


class Updates(Sampler[list[int]]):
    """The samples of each update: so many batches, joined; the last ones of an epoch may be fewer."""

    def __init__(self, batches: Any, accumulated: int) -> None:
        self._batches, self._accumulated = batches, accumulated

    def __len__(self) -> int:
        return -(-len(self._batches) // self._accumulated)

    def __iter__(self) -> Iterator[list[int]]:
        joined: list[int] = []
        for number, batch in enumerate(self._batches, 1):
            joined += batch
            if number % self._accumulated == 0:
                yield joined
                joined = []
        if joined:
            yield joined


def _batches(dataset: Any, args: Any) -> Any:
    """The batches that Trainer accumulates, by their samples' numbers."""
    from accelerate.data_loader import SeedableRandomSampler  # type: ignore[import-untyped]
    from transformers import Trainer

    asks = SimpleNamespace(args=args, train_dataset=dataset, processing_class=None)  # Trainer's own would start much
    sampler: Any = Trainer._get_train_sampler(asks)
    if args.train_sampling_strategy == "batch_rebalance":
        return sampler
    if isinstance(sampler, RandomSampler) and args.accelerator_config.use_seedable_sampler:
        seed = args.seed if args.data_seed is None else args.data_seed
        sampler = SeedableRandomSampler(dataset, data_seed=seed)
    return BatchSampler(sampler, args.per_device_train_batch_size, args.dataloader_drop_last)
