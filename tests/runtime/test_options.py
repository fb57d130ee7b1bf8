"""What files have of the options of a run follows from the options' fields."""

from __future__ import annotations

import json
from pathlib import Path

from fxpipe.runtime.options import KEPT, SHOWN

GOLDEN = Path(__file__).parents[1] / "checkpoint" / "golden"


def test_checkpoints_that_were_written_before_have_no_more() -> None:
    manifests = [json.loads(path.read_text()) for path in GOLDEN.glob("*/*/checkpoint.json")]
    assert manifests
    for manifest in manifests:
        assert manifest["run"].keys() <= {*KEPT, "sync_steps", "rate_discount"}


def test_none_is_lost() -> None:
    assert {"schedule", "policy", "seed", "clip_norm", "loss_scale", "loss_scale_interval", "ema"} <= {*KEPT}
    assert {"steps_per_epoch", "new_shapes"} <= {*KEPT}
    assert SHOWN[:4] == ("seed", "weights", "clip_norm", "ema")  # run.json has them in this order
