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


def by_lightning(
    module: dict[str, Any], state: dict[str, torch.Tensor], folder: Path, epochs: int, accumulated: int
) -> Any:
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
    length: dict[str, Any] = {"max_epochs": epochs, "accumulate_grad_batches": accumulated}
    trainer = lightning.Trainer(**length, accelerator="cpu", default_root_dir=folder, **quiet)
    trainer.fit(model, module["Points"]())
    return trainer


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("schedule", "epochs", "accumulated"),
    [(CYCLE, 2, 1), (EPOCHS, 2, 1), (PLATEAU, 4, 1), (CYCLE, 3, 3)],
    ids=["by steps", "by epochs", "by a metric", "three batches an update"],
)
def test_a_pipeline_trains_as_lightning_does(
    schedule: str, epochs: int, accumulated: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 batches: the last of four updates of three batches has one, of which Lightning takes a third."""
    from safetensors.torch import load_file

    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, GROUPS + schedule)
    length = f"max_epochs={epochs}, accumulate_grad_batches={accumulated}"
    path.write_text(path.read_text().replace("max_epochs=2", length))
    made = fxpipe("compile", path, "-n", 2, "--schedule", "1f1b", "--microbatches", 2, "-o", "build", *QUICK)
    assert made.code == 0, made.err
    summary = fxpipe(
        "run", "build", "--epochs", epochs, "--eval-every", "epoch", "--threads", 1, "--json", "--out", "out"
    ).json
    initial = load_file("build/weights.safetensors")
    trainer = by_lightning(runpy.run_path(str(path)), initial, tmp_path, epochs, accumulated)
    trained = load_file("out/model.safetensors")
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(trained[name], value, atol=1e-5, rtol=1e-4)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name != "train_loss"}
    assert summary["evaluation"] == pytest.approx(logged, abs=1e-5)
    if schedule == PLATEAU:
        rates = [json.loads(line).get("lr") for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
        assert len({rate for rate in rates if rate is not None}) > 1


WHOLE = """\
import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torchmetrics import AUROC, Accuracy, F1Score, MeanMetric, MetricCollection

from fxpipe.adapters.lightning import lightning_hooks


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
        kind = {"task": "multiclass", "num_classes": 3}
        self.seen, self.macro, self.by_hand = (Accuracy(**kind, average=a) for a in ("micro", "macro", "micro"))
        self.auroc, self.mean = AUROC(**kind), MeanMetric()
        self.several = MetricCollection({"f1": F1Score(**kind), "acc": Accuracy(**kind)}, prefix="several_")

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.seen(logits, y)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.log("val_loss", F.cross_entropy(logits, y).reshape(1))
        self.macro(logits, y)
        self.log("macro", self.macro)
        self.log("mean_of_batches", self.auroc(logits, y))
        self.mean.update(logits.abs().mean(), weight=len(x))
        self.log("mean", self.mean)
        self.several.update(logits, y)
        self.log_dict(self.several)
        self.by_hand.update(logits.argmax(1), y)

    def on_validation_epoch_end(self):
        self.log("by_hand", self.by_hand.compute())
        self.by_hand.reset()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        steps = self.trainer.estimated_stepping_batches
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, steps)
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]


class Points(L.LightningDataModule):
    def setup(self, stage):
        x = torch.randn(520, 8, generator=torch.Generator().manual_seed(0))
        self.points = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))

    def train_dataloader(self):
        some = torch.utils.data.Subset(self.points, range(400))
        return torch.utils.data.DataLoader(some, 32, shuffle=True, generator=torch.Generator().manual_seed(3))

    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.utils.data.Subset(self.points, range(400, 520)), 32)


def settings():
    return {
        "max_epochs": 8,
        "gradient_clip_val": 0.5,
        "accelerator": "cpu",
        "callbacks": [
            EarlyStopping("macro", mode="max", patience=2, min_delta=0.05),
            ModelCheckpoint("OUT", monitor="several_f1", mode="max", save_weights_only=True),
        ],
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


globals().update(lightning_hooks(Classifier, data=Points, **settings()))
"""


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_whole_run_is_that_of_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """400 rows in batches of 32, clipping, a schedule, metrics of torchmetrics, an early end, the best weights."""
    import lightning
    from safetensors.torch import load_file

    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(WHOLE.replace("OUT", str(tmp_path / "lightning")))
    made = fxpipe("compile", "model.py", "-n", 2, "--schedule", "1f1b", "--microbatches", 2, "-o", "build", *QUICK)
    assert made.code == 0, made.err
    assert made.err.count("training_step logs 'seen': a metric of torchmetrics adds up over an epoch's batches") == 1
    found = fxpipe("run", "build", "--threads", 1, "--out", "out", "--json").json
    module = runpy.run_path("model.py")
    model, losses, metrics = module["Classifier"](), list[float](), list[dict[str, float]]()
    model.load_state_dict(load_file("build/weights.safetensors"))

    class Kept(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            losses.append(float(outputs["loss"]))

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            metrics.append({name: float(value) for name, value in trainer.callback_metrics.items() if name != "seen"})

    settings = module["settings"]()
    trainer = lightning.Trainer(
        **{**settings, "callbacks": [*settings["callbacks"], Kept()]}, num_sanity_val_steps=0, default_root_dir=tmp_path
    )
    trainer.fit(model, module["Points"]())
    assert len(losses) % 13 == 0
    assert 13 * 3 <= len(losses) < 13 * 8
    assert found["stopped"] == "patience"
    assert found["steps"] == len(losses)
    assert found["losses"] == pytest.approx(losses, rel=1e-4)
    evaluations = [each["metrics"] for each in found["evaluations"] if each["step"] <= len(losses)]
    for mine, its in zip(evaluations, metrics, strict=True):
        assert mine == pytest.approx(its, abs=1e-4)
    stored = torch.load(settings["callbacks"][1].best_model_path)["state_dict"]
    for name, value in load_file("out/best.safetensors").items():
        torch.testing.assert_close(value, stored[name], atol=1e-5, rtol=1e-4)


def of_torchmetrics(folder: Path) -> Path:
    """The model file whose metrics of torchmetrics are logged by the step alone."""
    source, _, _ = WHOLE.partition("    def on_validation_epoch_end")
    _, configure, data = WHOLE.partition("    def configure_optimizers")
    data = data.replace('EarlyStopping("macro"', 'EarlyStopping("train_loss"').replace("OUT", str(folder))
    path = folder / "model.py"
    path.write_text(source.replace("        self.by_hand.update(logits.argmax(1), y)\n", "") + configure + data)
    return path


@pytest.mark.slow
@needs("torchmetrics")
def test_the_names_of_metrics_are_known_before_an_evaluation(tmp_path: Path) -> None:
    names = runpy.run_path(str(of_torchmetrics(tmp_path)))["metrics"].names_of_all()
    assert names == ("macro", "mean_of_batches", "mean", "several_acc", "several_f1")
    (tmp_path / "model.py").write_text(WHOLE.replace("OUT", str(tmp_path)))
    assert runpy.run_path(str(tmp_path / "model.py"))["metrics"].names_of_all() == ()


@pytest.mark.slow
@needs("torchmetrics")
def test_a_monitor_that_no_evaluation_gives_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = fxpipe("compile", of_torchmetrics(tmp_path), "-n", 2, "-o", "build", *QUICK)
    assert made.code == 0, made.err
    assert "evaluation: val_loss, macro, mean_of_batches, mean, several_acc, several_f1 in" in made.out
    run = fxpipe("run", "build", "--local", "--out", "out")
    assert run.code != 0
    assert "gives no 'train_loss'" in run.err
    assert "one of val_loss, macro, mean_of_batches, mean, several_acc, several_f1" in run.err
    assert "A callback of Lightning gives it as monitor=" in run.err


@pytest.mark.parametrize("accumulated", [1, 3])
def test_updates_have_the_batches_of_the_trainer(accumulated: int, tmp_path: Path) -> None:
    """Limits, accumulation, and a last update of fewer batches, of which the last is smaller."""
    from fxpipe.adapters.lightning import lightning_hooks
    from fxpipe.task.first_batches import batch_sizes

    module = runpy.run_path(str(written(tmp_path, SGD)))
    for limits, sizes in (({}, [8] * 9 + [4]), ({"limit_train_batches": 5}, [8] * 5)):
        hooks = lightning_hooks(
            module["Classifier"], data=module["Points"], accumulate_grad_batches=accumulated, max_epochs=3, **limits
        )
        joined = [sum(sizes[at : at + accumulated]) for at in range(0, len(sizes), accumulated)]
        ragged = len(sizes) % accumulated != 0
        for _ in range(2):
            given = list(hooks["train_data"]())
            assert [len(batch.batch[0] if ragged else batch[0]) for batch in given] == joined
            if ragged:  # Lightning divides the loss of each batch by 3, of the last update, too
                rest = len(sizes) % accumulated
                assert [batch.share for batch in given] == [1.0] * (len(joined) - 1) + [rest / accumulated]
        last = joined[-1] if joined[-1] < joined[0] else None
        assert batch_sizes(hooks["train_data"]()) == (8 * accumulated, last)
        assert hooks["compile_options"]["microbatches"] == (None if accumulated == 1 else accumulated)


@pytest.mark.parametrize("make", [lambda loader: loader, lambda loader: lambda: loader], ids=["loader", "function"])
def test_loaders_that_fit_is_given_take_the_place_of_the_modules_own(make: Any, tmp_path: Path) -> None:
    from fxpipe.adapters.lightning import lightning_hooks

    kind = runpy.run_path(str(written(tmp_path, SGD)))["Classifier"]
    train, held_out = ([(torch.full((size, 6), 1.0), torch.zeros(size).long())] * 2 for size in (8, 16))
    hooks = lightning_hooks(kind, train_dataloaders=make(train), val_dataloaders=make([held_out]))
    assert [len(x) for x, _ in hooks["train_data"]()] == [8, 8]
    assert [len(x) for x, _ in hooks["eval_data"]()] == [16, 16]
    assert "eval_data" not in lightning_hooks(kind, train_dataloaders=make(train))


def test_data_that_a_pipeline_cannot_take_are_refused(tmp_path: Path) -> None:
    from fxpipe.adapters.lightning import lightning_hooks

    module = runpy.run_path(str(written(tmp_path, SGD)))
    kind, points = module["Classifier"], module["Points"]
    for given, said in (
        ({"data": ([], [])}, "data is a tuple, not a function"),
        ({"data": points()}, "data is a Points, not a function"),
        ({"data": points, "train_dataloaders": []}, "data and train_dataloaders"),
        ({}, "Classifier has no train_dataloader"),
        ({"datamodule": points()}, "data=, train_dataloaders= and val_dataloaders= take what fit() is given"),
    ):
        with pytest.raises(TaskError) as refused:
            lightning_hooks(kind, **given)
        assert said in str(refused.value)


def test_a_last_update_of_fewer_batches_has_a_part_of_the_gradient(tmp_path: Path) -> None:
    from fxpipe.adapters.lightning import lightning_hooks

    module = runpy.run_path(str(written(tmp_path, SGD)))
    hooks = lightning_hooks(module["Classifier"], data=module["Points"], accumulate_grad_batches=4, max_epochs=1)
    *_, last = hooks["train_data"]()
    model = hooks["model"]()
    x, y = last.batch
    expected = nn.functional.cross_entropy(model.net(x), y)
    (gradient,) = torch.autograd.grad(expected, [model.net[0].weight])
    loss = hooks["loss"](model, last)
    assert len(x) == 8 + 4
    assert loss.item() == expected.item()
    torch.testing.assert_close(torch.autograd.grad(loss, [model.net[0].weight])[0], gradient / 2)


def options(**settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of a compile and of runs that a Trainer's settings give, without those that are None."""
    from fxpipe.adapters.lightning_trainer import TrainerSettings

    class LightningModule:
        __module__ = "lightning.pytorch.core.module"

    made = TrainerSettings.of(settings, LightningModule)
    given = made.compile_options(), made.run_options(True, lambda: 13 * made.joined)
    compiled, runs = ({name: value for name, value in each.items() if value is not None} for each in given)
    return compiled, runs


@pytest.mark.parametrize(
    ("settings", "compiled", "runs"),
    [
        ({}, {}, {"eval_every": "epoch"}),
        ({"max_steps": 20}, {}, {"steps": 20, "eval_every": "epoch"}),
        ({"max_steps": 200, "max_epochs": 3}, {}, {"steps": 39, "eval_every": "epoch"}),
        ({"max_epochs": 3, "gradient_clip_val": 0.5}, {}, {"epochs": 3, "clip_norm": 0.5, "eval_every": "epoch"}),
        (
            {"precision": "bf16-mixed", "accelerator": "gpu"},
            {"autocast": "bf16", "device": "cuda"},
            {"eval_every": "epoch"},
        ),
        ({"precision": 16, "accelerator": "cpu"}, {"autocast": "fp16", "device": "cpu"}, {"eval_every": "epoch"}),
        ({"check_val_every_n_epoch": 2}, {}, {"eval_every": 26}),
        ({"check_val_every_n_epoch": None, "val_check_interval": 5}, {}, {"eval_every": 5}),
        ({"val_check_interval": 1.0}, {}, {"eval_every": "epoch"}),
        ({"accumulate_grad_batches": 2, "val_check_interval": 26}, {"microbatches": 2}, {"eval_every": 13}),
    ],
    ids=str,
)
def test_settings_are_options(settings: dict[str, Any], compiled: dict[str, Any], runs: dict[str, Any]) -> None:
    assert options(**settings) == (compiled, runs)


def test_intervals_that_cut_the_last_update_of_an_epoch_are_refused() -> None:
    from fxpipe.adapters.lightning_trainer import TrainerSettings

    given = {"accumulate_grad_batches": 2, "val_check_interval": 4, "check_val_every_n_epoch": None, "callbacks": []}
    with pytest.raises(TaskError, match=r"val_check_interval=1\.0"):
        TrainerSettings(given, {"max_steps": -1}).run_options(True, lambda: 13)


def test_callbacks_are_options(monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    stops = EarlyStopping("val_acc", mode="max", patience=4, min_delta=0.1)
    saves = ModelCheckpoint(monitor="val_loss")
    compiled, runs = options(callbacks=[stops, saves])
    assert compiled == {"seed": 7}
    assert runs == {
        **{"seed": 7, "eval_every": "epoch", "save_best": "-val_loss"},
        **{"patience": 4, "patience_metric": "+val_acc", "min_delta": 0.1},
    }
    for saves, every in (
        (ModelCheckpoint(), "epoch"),
        (ModelCheckpoint(every_n_train_steps=50), "50"),
        (ModelCheckpoint(every_n_epochs=2), "26"),
        (ModelCheckpoint(train_time_interval=timedelta(minutes=2)), "120s"),
    ):
        assert options(callbacks=saves)[1] == {"eval_every": "epoch", "seed": 7, "checkpoint_every": every, "keep": 1}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_epoch": 3}, "Trainer takes no 'max_epoch', did you mean 'max_epochs'"),
        ({"fast_dev_run": True}, "fast_dev_run=True: fxpipe run --steps N"),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "gradients are clipped by their norm"),
        ({"precision": "64-true"}, "precision='64-true'"),
        ({"val_check_interval": 0.5}, "hint: val_check_interval=6, check_val_every_n_epoch=None"),
        ({"val_check_interval": 5}, "in epochs of 13 batches"),
        ({"val_check_interval": 5, "accumulate_grad_batches": 2}, "hint: val_check_interval=4, check_val"),
        ({"val_check_interval": 5, "accumulate_grad_batches": 2, "check_val_every_n_epoch": None}, "interval=4, check"),
        (
            {"val_check_interval": 4, "check_val_every_n_epoch": 2},
            "val_check_interval=4 with check_val_every_n_epoch=2",
        ),
    ],
)
def test_settings_that_would_train_otherwise_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError) as refused:
        options(**settings)
    assert said in str(refused.value)


def test_averaging_callbacks_are_refused_and_others_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lightning.pytorch.callbacks import Callback, RichProgressBar, StochasticWeightAveraging, Timer

    from fxpipe.adapters.lightning import lightning_hooks

    with pytest.raises(TaskError, match="StochasticWeightAveraging: fxpipe run --ema"):
        options(callbacks=[StochasticWeightAveraging(0.1)])

    class Thaws(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            for parameter in pl_module.parameters():
                parameter.requires_grad = trainer.current_epoch > 1

    with pytest.raises(
        TaskError, match=r"Thaws.on_train_epoch_start changes requires_grad: save a checkpoint, compile"
    ):
        options(callbacks=[Thaws()])

    class Own(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.count = sum(p.numel() for p in pl_module.parameters() if p.requires_grad)

    module = runpy.run_path(str(written(tmp_path, SGD)))
    capsys.readouterr()
    callbacks = [Own(), Timer(), RichProgressBar()]
    lightning_hooks(module["Classifier"], data=module["Points"], max_time="00:01:00:00", devices=4, callbacks=callbacks)
    said = capsys.readouterr().err
    for line in ("Own of Trainer is not called", "Timer of Trainer is not called", "max_time='00:01:00:00' of Trainer"):
        assert said.count(line) == 1
    assert "devices=4 of Trainer is not followed: fxpipe compile -n N --dp R" in said
    assert "RichProgressBar" not in said


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


def test_a_module_that_thaws_is_refused(tmp_path: Path) -> None:
    thaws = "\n\n    def on_train_epoch_start(self):\n        self.requires_grad_(self.current_epoch > 1)"
    with pytest.raises(TaskError, match=r"Classifier\.on_train_epoch_start changes requires_grad of parameters, but"):
        runpy.run_path(str(written(tmp_path, "return torch.optim.SGD(self.parameters(), lr=0.1)" + thaws)))


def test_methods_that_are_not_called_are_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    more = "return torch.optim.SGD(self.parameters(), lr=0.1)\n\n    def on_train_epoch_end(self):\n        pass"
    runpy.run_path(str(written(tmp_path, more)))
    assert "Classifier.on_train_epoch_end: a pipeline does not call it" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    runpy.run_path(str(written(tmp_path, more)))
    assert capsys.readouterr().err == ""


def test_a_step_that_logs_nothing_is_refused() -> None:
    from fxpipe.adapters.lightning_steps import metrics_of

    model = nn.Linear(2, 2)
    model.validation_step = lambda batch: None
    with pytest.raises(TaskError, match="logged nothing"):
        metrics_of(model, None)


def test_a_reduction_that_is_not_followed_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    from fxpipe.adapters.lightning_steps import metrics_of

    model = nn.Linear(2, 2)
    model.validation_step = lambda batch: model.log("right", torch.ones(()), reduce_fx="sum")
    assert metrics_of(model, None) == metrics_of(model, None) == {"right": torch.ones(())}
    assert capsys.readouterr().err.count("Linear.validation_step logs 'right' with a reduce_fx of its own") == 1
