"""`fxpipe.adapters.lightning`: what `Trainer.fit` would do, as hooks, against it."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import QUICK, fxpipe
from packages import needs
from torch import nn

from fxpipe.errors import TaskError
from fxpipe.task.model_view import ModelViews

pytestmark = needs("lightning")

SOURCE = """\
import lightning as L
import torch
from torch import nn
from torch.nn import functional as F

from fxpipe.adapters.lightning import lightning_hooks


class Classifier(L.LightningModule):
    def __init__(self, width=16):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return {"loss": loss}

    def validation_step(self, batch):
        x, y = batch
        logits = self.net(x)
        self.log_dict({"val_loss": F.cross_entropy(logits, y), "acc": (logits.argmax(1) == y).float().mean()})

    def configure_optimizers(self):
        CONFIGURE


class Points(L.LightningDataModule):
    def setup(self, stage):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(76, 6, generator=generator)
        self.points = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.points, 8)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(self.points, 16)


globals().update(lightning_hooks(lambda: Classifier(), data=Points, max_epochs=2))
"""

GROUPS = """\
weights = [p for n, p in self.named_parameters() if n.endswith("weight")]
        biases = [p for n, p in self.named_parameters() if n.endswith("bias")]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.05}]
        optimizer = torch.optim.AdamW(groups, lr=0.02, weight_decay=0.0)
"""
CYCLE = """
        steps = self.trainer.estimated_stepping_batches
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.02, 0.05], total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}
"""
EPOCHS = """
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.3)]
"""
PLATEAU = """
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, mode="max")
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
"""


def written(folder: Path, configure: str) -> Path:
    path = folder / "model.py"
    path.write_text(SOURCE.replace("CONFIGURE", configure))
    return path


def by_lightning(module: dict[str, Any], state: dict[str, torch.Tensor], folder: Path, epochs: int) -> Any:
    """Lightning's own Trainer, after training from these weights."""
    import lightning

    model = module["Classifier"]()
    model.load_state_dict(state)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", default_root_dir=folder, **quiet)
    trainer.fit(model, module["Points"]())
    return trainer


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("schedule", "epochs"), [(CYCLE, 2), (EPOCHS, 2), (PLATEAU, 4)], ids=["by steps", "by epochs", "by a metric"]
)
def test_a_pipeline_trains_as_lightning_does(
    schedule: str, epochs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, GROUPS + schedule)
    made = fxpipe("compile", path, "-n", 2, "--schedule", "1f1b", "--microbatches", 2, "-o", "build", *QUICK)
    assert made.code == 0, made.err
    summary = fxpipe(
        "run", "build", "--epochs", epochs, "--eval-every", "epoch", "--threads", 1, "--json", "--out", "out"
    ).json
    trainer = by_lightning(runpy.run_path(str(path)), load_file("build/weights.safetensors"), tmp_path, epochs)
    trained = load_file("out/model.safetensors")
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(trained[name], value, atol=1e-5, rtol=1e-4)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name != "train_loss"}
    assert summary["evaluation"] == pytest.approx(logged, abs=1e-5)
    if schedule == PLATEAU:
        rates = [json.loads(line).get("lr") for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
        assert len({rate for rate in rates if rate is not None}) > 1


SHUFFLED = """\
        generator = torch.Generator().manual_seed(3)
        return torch.utils.data.DataLoader(self.points, 8, shuffle=True, generator=generator)
"""
LOGS = """\
        self.seen = [*getattr(self, "seen", ()), loss.detach()]
        accuracy = (self.net(x).argmax(1) == y).float().mean()
        self.log("accuracy", accuracy, on_step=False, on_epoch=True)
        self.log("size", len(x))
        self.log_dict({"lr": accuracy})
        self.log("worst", accuracy, on_step=False, on_epoch=True, reduce_fx="min")
        return {"loss": loss}
"""
SGD = "return torch.optim.SGD(self.parameters(), lr=0.1)"


def shuffled(folder: Path) -> Path:
    path = written(folder, SGD)
    source = path.read_text().replace("        return torch.utils.data.DataLoader(self.points, 8)\n", SHUFFLED)
    path.write_text(source.replace('        return {"loss": loss}\n', LOGS))
    return path


@pytest.mark.parametrize("every", [0, 1, 2])
def test_the_loader_is_asked_for_as_often_as_by_lightning(every: int, tmp_path: Path) -> None:
    import lightning

    from fxpipe.adapters.lightning import lightning_hooks

    module = runpy.run_path(str(shuffled(tmp_path)))
    seen: list[list[float]] = []

    class Watched(module["Classifier"]):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch[0][:, 0].tolist())
            return super().training_step(batch, batch_idx)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        max_epochs=4, accelerator="cpu", default_root_dir=tmp_path, reload_dataloaders_every_n_epochs=every, **quiet
    )
    trainer.fit(Watched(), module["Points"]())
    hooks = lightning_hooks(
        module["Classifier"], data=module["Points"], max_epochs=4, reload_dataloaders_every_n_epochs=every
    )
    assert [batch[0][:, 0].tolist() for _ in range(4) for batch in hooks["train_data"]()] == seen
    assert len(hooks["train_data"]()) == 10
    assert (seen[10:20] == seen[20:30]) is (every == 1)


def test_others_parameters_leave_the_groups_and_rates_where_they_are(tmp_path: Path) -> None:
    module = runpy.run_path(str(written(tmp_path, GROUPS + CYCLE)))
    named = list(module["model"]().named_parameters())
    own = [(name, p) for name, p in named if name.startswith("net.4") and name.endswith("bias")]
    views = ModelViews(module["model"])
    optimizer = views.optimizer(lambda view: module["optimizer"](own, view), own)
    assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == [[], [id(own[0][1])]]
    scheduler, pace = module["lr_scheduler"](optimizer)
    assert pace == "step"
    assert scheduler.total_steps == 20
    whole = views.optimizer(lambda view: module["optimizer"](named, view), named)
    assert [len(group["params"]) for group in whole.param_groups] == [3, 3]
    assert [group["lr"] for group in whole.param_groups] == [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize(
    ("configure", "said"),
    [
        ("a = torch.optim.SGD(self.parameters(), lr=0.1); return [a, a]", "SGD, SGD and 0 schedulers"),
        ("return None", "NoneType"),
        (
            "a = torch.optim.SGD(self.parameters(), lr=0.1)\n"
            "        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(a)\n"
            '        return {"optimizer": a, "lr_scheduler": {"scheduler": plateau}}',
            "waits for a metric",
        ),
        (
            "a = torch.optim.SGD(self.parameters())\n"
            "        scheduler = torch.optim.lr_scheduler.StepLR(a, 1)\n"
            '        return {"optimizer": a, "lr_scheduler": {"scheduler": scheduler, "reduce_on_plateau": True}}',
            "StepLR is no ReduceLROnPlateau",
        ),
    ],
)
def test_what_a_pipeline_does_not_do_is_refused(configure: str, said: str, tmp_path: Path) -> None:
    module = runpy.run_path(str(written(tmp_path, configure)))
    with pytest.raises(TaskError, match=said):
        module["optimizer"]([], module["model"]())


def test_methods_that_are_not_called_are_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    more = "return torch.optim.SGD(self.parameters(), lr=0.1)\n\n    def on_train_epoch_end(self):\n        pass"
    runpy.run_path(str(written(tmp_path, more)))
    assert "Classifier.on_train_epoch_end: a pipeline does not call it" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    runpy.run_path(str(written(tmp_path, more)))
    assert capsys.readouterr().err == ""


def test_a_metric_that_adds_up_is_refused() -> None:
    from fxpipe.adapters.lightning_steps import metrics_of

    model = nn.Linear(2, 2)
    model.validation_step = lambda batch: model.log("acc", nn.Identity())
    with pytest.raises(TaskError, match="adds up over batches"):
        metrics_of(model, None)
    model.validation_step = lambda batch: None
    with pytest.raises(TaskError, match="logged nothing"):
        metrics_of(model, None)


def test_a_reduction_that_is_not_followed_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    from fxpipe.adapters.lightning_steps import metrics_of

    model = nn.Linear(2, 2)
    model.validation_step = lambda batch: model.log("right", torch.ones(()), reduce_fx="sum")
    assert metrics_of(model, None) == metrics_of(model, None) == {"right": torch.ones(())}
    assert capsys.readouterr().err.count("Linear.validation_step logs 'right' with a reduce_fx of its own") == 1
