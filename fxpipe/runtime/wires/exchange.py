"""Short texts that all workers of a run see, beside its messages."""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed as dist


class Exchange(Protocol):
    """Texts by key that all workers of a run see."""

    def set(self, key: str, text: str) -> None:
        """Write one."""

    def get(self, keys: list[str]) -> list[str] | None:
        """All of these, once all are there; None before. Does not wait."""


class LocalExchange:
    """For workers in one process."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def set(self, key: str, text: str) -> None:
        self._texts[key] = text

    def get(self, keys: list[str]) -> list[str] | None:
        found = [self._texts.get(key) for key in keys]
        return None if None in found else [text for text in found if text is not None]


class StoreExchange:
    """For workers in processes of their own: in the process group's store."""

    def __init__(self) -> None:
        self._store: Any = dist.distributed_c10d._get_default_store()

    def set(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def get(self, keys: list[str]) -> list[str] | None:
        if not self._store.check(keys):
            return None
        return [self._store.get(key).decode() for key in keys]
