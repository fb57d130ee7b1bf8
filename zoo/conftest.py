"""What a test of the zoo needs: torchvision's operators, declared before anything imports it, and a model."""

from __future__ import annotations

import pytest
import torch
from families import CORE, ZooModel, define_torchvision_ops

torch.set_num_threads(1)
define_torchvision_ops()


@pytest.fixture
def core_model(name: str) -> ZooModel:
    """The core's model of that name, or a skip that says which package is missing."""
    if reason := CORE[name].missing():
        pytest.skip(reason)
    return CORE[name]
