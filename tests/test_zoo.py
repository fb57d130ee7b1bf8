"""One model of the zoo passes its check; `make zoo` checks them all."""

from __future__ import annotations

from check import check
from families import ZOO


def test_a_model_passes_the_check() -> None:
    row = check(ZOO["gcn"])
    assert row.status == "passed", row.reason
