"""One thread for small tensors: more of them only wait for each other. Tests within a time; golden texts; profiles."""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import seconds
import torch
from hypothesis import settings
from warm import Popen, forking

from fxpipe.runtime.process import launch

launch.subprocess = forking(Popen)  # type: ignore[attr-defined]  # what a test launches imports nothing
torch.set_num_threads(1)
for profile, examples in (("quick", 25), ("ci", 100), ("nightly", 300)):  # see --hypothesis-profile
    settings.register_profile(profile, max_examples=examples, deadline=None, derandomize=profile == "quick")
settings.load_profile("quick")
BEGUN = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--within", type=float, metavar="SECONDS", help="begin no test later than this: skip the rest")
    parser.addoption("--shuffle", metavar="SEED", help="play the files in an order that follows from this")
    parser.addoption(
        "--first", metavar="FOLDERS", default="", help="play these first, such as 'tests/cli tests/passes'"
    )
    parser.addoption("--write-seconds", action="store_true", help="write what each test takes into tests/seconds.json")
    parser.addoption("--budgets", action="store_true", help="fail where a folder takes longer than it may")
    parser.addoption("--rewrite", action="store_true", help="write golden texts anew: read the difference then")


def pytest_configure(config: pytest.Config) -> None:
    writes, holds = config.getoption("--write-seconds"), config.getoption("--budgets")
    if (writes or holds) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(seconds.Seconds(writes, holds))


@pytest.hookimpl(tryfirst=True)  # before `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = seconds.slow()
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)
    if (seed := config.getoption("--shuffle")) is not None:
        paths = sorted({item.path for item in items})
        random.Random(seed).shuffle(paths)
        place = {path: number for number, path in enumerate(paths)}
        first = [config.rootpath / folder for folder in config.getoption("--first").split()]
        items.sort(key=lambda item: (not any(map(item.path.is_relative_to, first)), place[item.path]))


def pytest_collection_finish() -> None:
    gc.freeze()  # what all tests have in common is not looked through again


@pytest.fixture(autouse=True, scope="module")
def own_paths() -> Iterator[None]:
    """Folders of model files leave `sys.path` with the tests that had them: each makes every import slower."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    within = item.config.getoption("--within")
    if within is not None and time.monotonic() - BEGUN > within:
        pytest.skip("time is up (--within)")


@pytest.fixture(autouse=True)
def slow_noted(record_property: Callable[[str, object], None]) -> None:
    """What a test takes is compared with how slow the machine is."""
    record_property(seconds.SLOW_NOW, max(1.0, seconds.slowness()) * seconds.crowd())


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """Compares a text with what its file has; with --rewrite, the file gets the text."""

    def compare(path: Path, text: str) -> None:
        if request.config.getoption("--rewrite"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8")

    return compare
