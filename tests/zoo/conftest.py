"""What a test of the zoo needs: torchvision's operators, declared before anything imports it, and a model."""

from __future__ import annotations

import pytest
from zoo import ZOO, ZooModel, define_torchvision_ops

define_torchvision_ops()


@pytest.fixture
def zoo_model(name: str) -> ZooModel:
    """The model of that name, or a skip that says which package is missing."""
    if reason := ZOO[name].missing():
        pytest.skip(reason)
    return ZOO[name]
