"""Facts for tests that change them."""

from __future__ import annotations

from typing import Any

import pytest
from small_facts import small_facts


@pytest.fixture
def small() -> dict[str, Any]:
    return small_facts()
