"""One thread for small tensors: more of them only wait for each other. And tests within a time, for CI."""

from __future__ import annotations

import random
import time

import pytest
import torch

torch.set_num_threads(1)
BEGUN = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--within", type=float, metavar="SECONDS", help="begin no test later than this: skip the rest")
    parser.addoption("--shuffle", metavar="SEED", help="play the files in an order that follows from this")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (seed := config.getoption("--shuffle")) is not None:
        paths = sorted({item.path for item in items})
        random.Random(seed).shuffle(paths)
        place = {path: number for number, path in enumerate(paths)}
        items.sort(key=lambda item: place[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    within = item.config.getoption("--within")
    if within is not None and time.monotonic() - BEGUN > within:
        pytest.skip("time is up (--within)")
