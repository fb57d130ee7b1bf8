"""`fxpipe doctor`: what is here, and whether it works."""

from __future__ import annotations

import os
import platform
from typing import Any

import click
from fxpipe.cli.output import emit_json, working

import fxpipe


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor_command(as_json: bool) -> int:
    """Show versions, devices and transports, and run a tiny self-test.

    The self-test compiles a small model for two workers, compares its stages with eager PyTorch, and trains a few
    steps with prediction. Exit code 1 if it fails.

    \b
    fxpipe doctor
    fxpipe doctor --json
    """
    with working("looking around"):
        report = _report()
    if as_json:
        emit_json(report)
    else:
        for key, value in report.items():
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            click.echo(f"{key:<12} {text or 'none'}")
    return 0 if report["self-test"] == "passed" else 1


def _report() -> dict[str, Any]:
    import safetensors
    import torch
    import torch.distributed as dist

    transports = ["local"]
    if dist.is_available():
        transports += [name for name in ("gloo", "nccl") if getattr(dist, f"is_{name}_available")()]
    devices = [f"cpu ({os.cpu_count()} cores)"]
    devices += [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    return {
        "fxpipe": fxpipe.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
        "devices": devices,
        "transports": transports,
        "self-test": _self_test(),
    }


def _self_test() -> str:
    import torch
    from torch import Tensor, nn

    from fxpipe.agreement import compare_with_eager
    from fxpipe.lowering import compile

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    try:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        batch = (torch.randn(6, 4), torch.randn(6, 1))
        build = compile(model, loss, batch, workers=2, forward_at=["2"], backward_at=["1"], cost="analytic")
        error = compare_with_eager(build, model, loss, batch).largest
        if not error <= 1e-5:
            return f"failed: the stages differ from eager PyTorch by {error:.1e}"
        losses = build.local().run([batch] * 20)
        if not losses[-1] < losses[0]:
            return f"failed: the loss went from {losses[0]:.3f} to {losses[-1]:.3f}"
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"
    return "passed"
