"""The whole product on a device that is not the CPU: whatever it leaves on the CPU is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pretended_device import LACKS, MIXED
from small_models import CASES
from warm import Popen

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(LACKS), reason=LACKS)]


def run(*fault: str) -> Any:
    """What a process of its own finds, since it has the device for good."""
    script = Path(__file__).parent / "support" / "on_another_device.py"
    with Popen([sys.executable, str(script), *fault], stdout=subprocess.PIPE, text=True) as process:
        return json.loads(process.communicate(timeout=300)[0])


def test_small_models_train_as_on_the_cpu() -> None:
    """Forward, backward and weight gradients cut at random, with recomputed runs."""
    assert run() == {name: [] for name in CASES}


@pytest.mark.parametrize(("fault", "model"), [("constant", "gpt"), ("pass", "function")])
def test_a_leak_is_found(fault: str, model: str) -> None:
    (error,) = run(fault)[model]
    assert MIXED in error
