"""`fxpipe.adapters.transformers`: what Trainer would do, as hooks, against Trainer itself."""

from __future__ import annotations

import copy
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import QUICK, fxpipe
from families.entry import define_torchvision_ops
from packages import needs
from torch import nn

from fxpipe.errors import TaskError

pytestmark = needs("transformers", "accelerate")


@pytest.fixture(scope="module", autouse=True)
def without_torchvision() -> None:
    define_torchvision_ops()


SOURCE = """\
import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from fxpipe.adapters.transformers import trainer_hooks


def make():
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32,
                        max_position_embeddings=12, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    made = BertForSequenceClassification(config)
    PEFT
    return made


def samples(count, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        ids = torch.randint(50, (12,), generator=generator)
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "label": int(ids[0] > 24), "text": "unused"}


def make_args():
    return TrainingArguments(
        output_dir="out", per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=8, learning_rate=5e-3,
        weight_decay=0.1, warmup_steps=2, use_cpu=True, report_to=[], train_sampling_strategy="sequential",
        save_strategy="no", disable_tqdm=True, logging_steps=1, MORE
    )


train, held_out = list(samples(60, 0)), list(samples(12, 1))
globals().update(trainer_hooks(model=make, args=make_args, train_dataset=train, eval_dataset=held_out))
"""


def written(folder: Path, more: str = "", peft: str = "") -> Path:
    path = folder / "model.py"
    source = SOURCE.replace('save_strategy="no", ', "") if "save_strategy" in more else SOURCE
    path.write_text(source.replace("MORE", more).replace("PEFT", peft))
    return path


def by_trainer(module: dict[str, Any], state: dict[str, torch.Tensor]) -> Any:
    """Trainer itself, after training from these weights.

    Its batches are whole: Trainer adds up the losses of accumulated ones, instead of taking their mean, where a model
    takes keywords and does not count by `num_items_in_batch`, as Bert's.
    """
    from transformers import Trainer

    made = module["make"]()
    made.load_state_dict(state, strict=False)  # a build holds buffers that are not persistent, too
    data = {"train_dataset": module["train"], "eval_dataset": module["held_out"]}
    args = replace(module["make_args"](), per_device_train_batch_size=8, gradient_accumulation_steps=1)
    trainer = Trainer(model=made, args=args, **data)
    trainer.train()
    return trainer


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_pipeline_trains_as_trainer_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups, rates, warm-up, accumulation, clipping: the same weights, through two workers."""
    from safetensors.torch import load_file
    from transformers import BertForSequenceClassification

    from fxpipe.adapters.transformers import save_pretrained

    monkeypatch.chdir(tmp_path)
    path = written(tmp_path)
    made = fxpipe("compile", path, "-n", 2, "--schedule", "1f1b", "-o", "build", *QUICK)
    assert made.code == 0, made.err
    assert "--seed 42 --microbatches 2\nmodel.py gives runs --seed 42 --steps 8 --clip-norm 1.0\n" in made.err
    assert "config.problem_type" not in made.err
    run = ("run", "build", "--threads", 1, "--json")
    summary = fxpipe(*run, "--out", tmp_path / "out").json
    trainer = by_trainer(runpy.run_path(str(path)), load_file("build/weights.safetensors"))
    losses = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
    assert summary["losses"] == pytest.approx(losses, abs=2e-3)
    trained = load_file("out/model.safetensors")
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(trained[name], value, atol=2e-4, rtol=1e-3)
    assert summary["evaluation"]["loss"] == pytest.approx(trainer.evaluate()["eval_loss"], abs=1e-4)
    save_pretrained(path, "out/model.safetensors", "trained")
    again = BertForSequenceClassification.from_pretrained("trained")
    torch.testing.assert_close(again.classifier.weight.data, trained["classifier.weight"])


class Streamed(torch.utils.data.IterableDataset[Any]):
    """Samples that count epochs."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter([{"input_ids": torch.tensor([100 * self.epoch + number])} for number in range(42)])


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"seed": 3, "dataloader_num_workers": 1},
        {"data_seed": 7, "seed": 3},
        {"dataloader_drop_last": True},
        {"dataloader_drop_last": True, "gradient_accumulation_steps": 3},
        {"gradient_accumulation_steps": 3},
        {"train_sampling_strategy": "sequential"},
        {"train_sampling_strategy": "batch_rebalance", "gradient_accumulation_steps": 2},
        {"train_sampling_strategy": "group_by_length"},
        {"accelerator_config": {"use_seedable_sampler": False}},
        {"max_steps": 40, "dataloader_drop_last": True},
    ],
    ids=str,
)
def test_each_epoch_has_the_batches_of_trainer(more: dict[str, Any], tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments, set_seed

    from fxpipe.adapters.transformers import trainer_hooks

    class Model(nn.Module):
        def forward(self, x: torch.Tensor, input_ids: Any = None) -> torch.Tensor:
            return x

    def make_args() -> TrainingArguments:
        small = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": [], "per_device_train_batch_size": 4}
        return TrainingArguments(**small, **more)

    def collate(samples: list[Any]) -> Any:
        return {"x": torch.tensor([int(sample["input_ids"][0]) for sample in samples])}

    data: Any = [{"input_ids": torch.tensor([number] * (1 + number % 5))} for number in range(42)]
    data = Streamed() if "max_steps" in more else data
    hooks = trainer_hooks(model=Model, args=make_args, train_dataset=data, data_collator=collate)
    trainer = Trainer(model=Model(), args=make_args(), train_dataset=data, data_collator=collate)
    seen: list[list[int]] = []
    trainer.training_step = lambda model, inputs, *_: seen.append(inputs["x"].tolist()) or torch.zeros(())
    trainer.create_optimizer = lambda *_: setattr(trainer, "optimizer", torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    trainer.args.num_train_epochs = 3
    set_seed(trainer.args.seed)
    trainer.train()
    set_seed(trainer.args.seed)
    epochs = [[batch["x"].tolist() for batch in hooks["train_data"]()] for _ in range(3)]
    joined = [sample for epoch in epochs for batch in epoch for sample in batch]
    assert joined == [sample for batch in seen for sample in batch][: len(joined)]
    assert len(joined) >= 3 * 40
    assert sum(map(len, epochs)) == trainer.state.global_step or "max_steps" in more
    assert more.get("train_sampling_strategy") == "sequential" or epochs[0] != epochs[1] != epochs[2]


def test_an_order_that_cannot_be_trainers_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path)
    path.write_text(path.read_text().replace('"sequential"', '"group_by_length"'))
    runpy.run_path(str(path))
    assert "draws this order of samples from the same random numbers as dropout" in capsys.readouterr().err


def test_groups_and_rates_are_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Trainer

    monkeypatch.chdir(tmp_path)  # where Trainer makes its output_dir
    module = runpy.run_path(str(written(tmp_path, 'lr_scheduler_type="cosine"')))
    model = module["make"]()
    trainer = Trainer(model=model, args=module["make_args"](), train_dataset=module["train"])
    trainer.create_optimizer_and_scheduler(8)
    own = module["optimizer"](list(model.named_parameters()))
    scheduler = module["lr_scheduler"](own)
    assert type(own) is type(getattr(trainer.optimizer, "optimizer", trainer.optimizer))
    for mine, theirs in zip(own.param_groups, trainer.optimizer.param_groups, strict=True):
        assert {id(p) for p in mine["params"]} == {id(p) for p in theirs["params"]}
        assert {k: v for k, v in mine.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}
    for _ in range(8):
        assert scheduler.get_last_lr() == trainer.lr_scheduler.get_last_lr()
        own.step(), scheduler.step(), trainer.optimizer.step(), trainer.lr_scheduler.step()


def test_a_worker_may_own_parameters_of_one_kind(tmp_path: Path) -> None:
    module = runpy.run_path(str(written(tmp_path)))
    named = list(module["make"]().named_parameters())
    [group] = module["optimizer"]([pair for pair in named if "LayerNorm" in pair[0]]).param_groups
    assert group["weight_decay"] == 0
    [group] = module["optimizer"]([("classifier.weight", named[-2][1])]).param_groups
    assert group["weight_decay"] == 0.1


def test_columns_that_forward_does_not_take_are_left_out(tmp_path: Path) -> None:
    module = runpy.run_path(str(written(tmp_path)))
    batch = next(iter(module["train_data"]()))
    assert {key: tuple(value.shape) for key, value in batch.items()} == {
        "input_ids": (8, 12),
        "attention_mask": (8, 12),
        "labels": (8,),
    }


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            "neftune_noise_alpha=0.1, label_smoothing_factor=0.1",
            ["neftune_noise_alpha=0.1", "label_smoothing_factor=0.1"],
        ),
        ('optim="galore_adamw", optim_target_modules=["attn"]', ["optim='galore_adamw'", "optim_target_modules"]),
    ],
)
def test_what_a_pipeline_does_not_do_is_refused(more: str, said: list[str], tmp_path: Path) -> None:
    with pytest.raises(TaskError) as refused:
        runpy.run_path(str(written(tmp_path, more)))
    for text in said:
        assert text in str(refused.value)


def given(tmp_path: Path, more: str, callbacks: str = "[]") -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a compile and of runs that TrainingArguments give, without those that are None."""
    path = written(tmp_path, more)
    path.write_text(
        path.read_text()
        .replace("eval_dataset=held_out)", f"eval_dataset=held_out, callbacks={callbacks})")
        .replace("import BertConfig", "import EarlyStoppingCallback, PrinterCallback, TrainerCallback, BertConfig")
    )
    module = runpy.run_path(str(path))
    found = ({n: v for n, v in module[name].items() if v is not None} for name in ("compile_options", "run_options"))
    compiled, runs = found
    return compiled, runs


RUNS = {"seed": 42, "steps": 8, "clip_norm": 1.0}
BEST = 'load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch"'


@pytest.mark.parametrize(
    ("more", "callbacks", "compiled", "runs"),
    [
        ("", "[]", {}, {}),
        ("bf16=True, seed=3", "[]", {"autocast": "bf16", "seed": 3}, {"seed": 3}),
        ("max_grad_norm=0.0", "[]", {}, {"clip_norm": None}),
        ('eval_strategy="steps", eval_steps=4', "[]", {}, {"eval_every": "4"}),
        ('eval_strategy="steps", eval_steps=0.3', "[]", {}, {"eval_every": "3"}),
        (
            'save_strategy="steps", save_steps=3, save_total_limit=2',
            "[]",
            {},
            {"checkpoint_every": "3", "keep": 2},
        ),
        (
            f'{BEST}, metric_for_best_model="eval_loss"',
            "[EarlyStoppingCallback(3)]",
            {},
            {
                **{"eval_every": "epoch", "checkpoint_every": "epoch", "save_best": "-loss"},
                **{"patience": 3, "patience_metric": "-loss"},
            },
        ),
        (
            f'{BEST}, metric_for_best_model="loss", greater_is_better=True',
            "[EarlyStoppingCallback]",
            {},
            {
                **{"eval_every": "epoch", "checkpoint_every": "epoch", "save_best": "+loss"},
                **{"patience": 1, "patience_metric": "+loss"},
            },
        ),
        (
            'save_strategy="best", eval_strategy="epoch", metric_for_best_model="accuracy"',
            "[]",
            {},
            {"eval_every": "epoch", "save_best": "+accuracy"},
        ),
    ],
)
def test_arguments_are_options(
    more: str, callbacks: str, compiled: dict[str, Any], runs: dict[str, Any], tmp_path: Path
) -> None:
    expected = ({"seed": 42, "microbatches": 2} | compiled, {n: v for n, v in (RUNS | runs).items() if v is not None})
    assert given(tmp_path, more, callbacks) == expected


def test_a_callback_that_thaws_is_refused(tmp_path: Path) -> None:
    thaws = (
        "[type('Thaws', (TrainerCallback,), {'on_epoch_begin': lambda *_, model, **__: model.requires_grad_(True)})]"
    )
    with pytest.raises(TaskError, match=r"Thaws\.on_epoch_begin changes requires_grad of parameters, but"):
        given(tmp_path, "", thaws)


def test_what_is_not_followed_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = 'eval_delay=7, eval_strategy="epoch"'
    given(tmp_path, more, "[PrinterCallback, EarlyStoppingCallback(2, 0.1)]")
    said = capsys.readouterr().err
    assert (
        "warning: eval_delay=7 of TrainingArguments is not followed: evaluations begin with the first interval" in said
    )
    assert said.count("PrinterCallback of Trainer is not called") == 1
    assert "early_stopping_threshold is --min-delta" in said
    assert said.count("gradient_accumulation_steps=2: the loss of an update is the mean over its samples; Trainer") == 1
    assert "EarlyStoppingCallback" not in said


WHOLE = """\
import torch
from transformers import BertConfig, BertForSequenceClassification, EarlyStoppingCallback, TrainingArguments

from fxpipe.adapters.transformers import trainer_hooks


def make():
    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_labels=3,
                        intermediate_size=64, max_position_embeddings=16, hidden_dropout_prob=0.0,
                        attention_probs_dropout_prob=0.0)
    return BertForSequenceClassification(config)


def samples(count, seed):
    ids = torch.randint(64, (count, 12), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": int(row[0]) % 3} for row in ids]


def make_args():
    return TrainingArguments(
        output_dir="trainer", num_train_epochs=6, per_device_train_batch_size=32, per_device_eval_batch_size=32,
        learning_rate=3e-3, weight_decay=0.01, warmup_steps=0.1, lr_scheduler_type="cosine", max_grad_norm=0.5,
        eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="f1",
        use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1,
    )


def compute_metrics(evaluated):
    logits, labels = evaluated
    found = logits.argmax(-1)
    right = [((found == k) & (labels == k)).sum() for k in range(3)]
    f1 = [2 * right[k] / max(1, (found == k).sum() + (labels == k).sum()) for k in range(3)]
    return {"f1": sum(f1) / 3, "accuracy": (found == labels).mean()}


def given():
    return {"train_dataset": samples(400, 0), "eval_dataset": samples(120, 1), "compute_metrics": compute_metrics,
            "callbacks": [EarlyStoppingCallback(2)]}


globals().update(trainer_hooks(model=make, args=make_args, **given()))
"""


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_whole_run_is_that_of_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """400 rows in batches of 32, warm-up, clipping, `compute_metrics`, an early end, the best weights."""
    from safetensors.torch import load_file
    from transformers import Trainer

    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(WHOLE)
    made = fxpipe("compile", "model.py", "-n", 2, "--schedule", "1f1b", "--microbatches", 2, "-o", "build", *QUICK)
    assert made.code == 0, made.err
    found = fxpipe("run", "build", "--threads", 1, "--out", "out", "--json").json
    module = runpy.run_path("model.py")
    model = module["make"]()
    model.load_state_dict(load_file("build/weights.safetensors"), strict=False)
    trainer = Trainer(model=model, args=module["make_args"](), **module["given"]())
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 4 * 13
    assert found["stopped"] == "patience"
    assert found["steps"] == len(losses)
    assert found["losses"] == pytest.approx(losses, rel=1e-3)
    rows = [row for row in trainer.state.log_history if "eval_f1" in row]
    for mine, its in zip(found["evaluations"], rows, strict=False):
        assert mine["step"] == its["step"]
        for name in ("loss", "f1", "accuracy"):
            assert mine["metrics"][name] == pytest.approx(its[f"eval_{name}"], abs=1e-4)
    assert (found["best"]["step"], found["best"]["value"]) == (
        trainer.state.best_global_step,
        pytest.approx(trainer.state.best_metric),
    )
    best = load_file("out/best.safetensors")
    for name, value in trainer.model.state_dict().items():  # those of the best evaluation
        torch.testing.assert_close(best[name], value, atol=2e-4, rtol=1e-3)


def test_predictions_are_joined_as_trainer_joins_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several lengths, of tuples of tensors, and what is preprocessed."""
    from types import SimpleNamespace

    from transformers import Trainer, TrainingArguments

    from fxpipe.adapters.transformers import trainer_hooks

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 4)
            self.config = SimpleNamespace(keys_to_ignore_at_inference=["kept"])

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
            hidden = self.embed(input_ids)
            loss = nn.functional.cross_entropy(hidden.flatten(0, 1), labels.flatten())
            return {"loss": loss, "logits": hidden, "kept": hidden, "states": (hidden[:, 0], hidden[..., :2])}

    seen: list[Any] = []

    def compute_metrics(evaluated: Any) -> dict[str, float]:
        seen.append(evaluated)
        return {"eval_first": float(evaluated.predictions[0].sum())}

    rows = [{"input_ids": torch.arange(n) % 20, "labels": torch.arange(n) % 4} for n in (3, 3, 5, 5, 2)]
    more: dict[str, Any] = {"eval_dataset": rows, "compute_metrics": compute_metrics}
    more["preprocess_logits_for_metrics"] = lambda logits, labels: (logits[0].argmax(-1), logits[1])

    def args() -> TrainingArguments:
        return TrainingArguments(str(tmp_path), per_device_eval_batch_size=2, use_cpu=True, report_to=[])

    model = Tagger()
    trained = Trainer(model=model, args=args(), **more).evaluate()
    hooks = trainer_hooks(model=lambda: copy.deepcopy(model), args=args, train_dataset=rows, **more)
    found = [hooks["metrics"](model.eval(), batch) for batch in hooks["eval_data"]()]
    gathered = {name: [row[name].detach() for row in found] for name in found[0] if name != "loss"}
    assert hooks["metrics_of_all"](gathered) == {"first": trained["eval_first"]}
    its, mine = seen
    for one, other in zip(
        (mine.label_ids, mine.predictions[0], *mine.predictions[1]),
        (its.label_ids, its.predictions[0], *its.predictions[1]),
        strict=True,
    ):
        assert one.shape == other.shape
        assert (one == other).all()


def test_a_cache_is_no_prediction_and_a_count_of_trainers_own_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPT-2's class is none of those that transformers knows as causal: Trainer counts labels before their shift."""
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

    from fxpipe.adapters.transformers import trainer_hooks

    def make() -> nn.Module:
        return GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=8, n_positions=4))

    row = {"input_ids": torch.arange(4), "labels": torch.arange(4)}
    hooks = trainer_hooks(
        model=make,
        args=lambda: TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]),
        train_dataset=[row],
        eval_dataset=[row],
        compute_metrics=lambda evaluated: {"count": evaluated.predictions.size},
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    assert "Trainer divides the loss of GPT2LMHeadModel by the number of its labels" in capsys.readouterr().err
    found = hooks["metrics"](make().eval(), next(iter(hooks["eval_data"]())))
    assert found.keys() == {"loss", "predictions", "labels"}
    assert found["predictions"].shape == (1, 4)


def test_a_collator_that_pads_to_the_longest_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import DataCollatorWithPadding, TrainingArguments

    from fxpipe.adapters.transformers import trainer_hooks

    def args() -> TrainingArguments:
        return TrainingArguments(output_dir="out", use_cpu=True, report_to=[], num_train_epochs=0.5)

    collator = DataCollatorWithPadding(tokenizer=None)
    hooks = trainer_hooks(model=lambda: nn.Linear(2, 2), args=args, train_dataset=[{}] * 64, data_collator=collator)
    assert "pads each batch to its longest sample" in capsys.readouterr().err
    assert hooks["run_options"]["steps"] == 4
    assert hooks["compile_options"]["pad_to"] is None


@pytest.mark.parametrize("side", ["right", "left"])
def test_what_is_padded_follows_from_the_tokenizer(side: str, capsys: pytest.CaptureFixture[str]) -> None:
    from types import SimpleNamespace

    from transformers import TrainingArguments

    from fxpipe.adapters.transformers import trainer_hooks

    def collator(samples: list[Any]) -> Any:
        return samples[0]

    collator.padding = True  # type: ignore[attr-defined]
    collator.tokenizer = SimpleNamespace(pad_token_id=7, padding_side=side)  # type: ignore[attr-defined]
    hooks = trainer_hooks(
        model=lambda: nn.Linear(2, 2),
        args=lambda: TrainingArguments(output_dir="out", use_cpu=True, report_to=[]),
        train_dataset=[{}] * 64,
        data_collator=collator,
    )
    assert ("pad" in hooks) is (side == "right")
    said = capsys.readouterr().err
    assert hooks["compile_options"]["pad_to"] == (64 if side == "right" else None)
    assert ("pads each batch to its longest sample" in said) is (side == "left")
    if side == "right":
        batch = {"input_ids": torch.ones(2, 3), "labels": torch.ones(2), "attention_mask": torch.ones(2, 3)}
        assert hooks["pad"](batch) == {"input_ids": 7, "attention_mask": 0}


def test_an_own_collator_pads_as_the_tokenizer_of_the_trainer_does() -> None:
    """Whether its batches have several lengths is not known: --pad-to is not the default."""
    from types import SimpleNamespace

    from transformers import TrainingArguments

    from fxpipe.adapters.transformers import trainer_hooks

    hooks = trainer_hooks(
        model=lambda: nn.Linear(2, 2),
        args=lambda: TrainingArguments(output_dir="out", use_cpu=True, report_to=[]),
        train_dataset=[{}] * 64,
        data_collator=lambda samples: samples[0],
        processing_class=SimpleNamespace(pad_token_id=7, padding_side="right"),
    )
    assert hooks["pad"]({"input_ids": torch.ones(2, 3)}) == {"input_ids": 7}
    assert hooks["compile_options"]["pad_to"] is None


def test_arguments_that_would_wait_for_other_processes_are_refused(tmp_path: Path) -> None:
    source = written(tmp_path).read_text().replace("args=make_args", "args=make_args()")
    (tmp_path / "model.py").write_text(source)
    with pytest.raises(TaskError, match="args=lambda"):
        runpy.run_path(str(tmp_path / "model.py"))


def saved_by_the_command(*arguments: object) -> None:
    """Run `python -m fxpipe.adapters.transformers`, as in a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "fxpipe.adapters.transformers", raising=False)
        patch.setattr(sys, "argv", ["", *map(str, arguments)])
        runpy.run_module("fxpipe.adapters.transformers", run_name="__main__")


INNER = """\
from torch import nn


class Saves(nn.Linear):
    def save_pretrained(self, folder):
        from pathlib import Path

        Path(folder).mkdir(exist_ok=True)
        (Path(folder) / "weights.txt").write_text(str(self.weight.tolist()))


def model():
    return WHOLE


def loss(model, batch):
    return model(batch).sum()


def train_data():
    return []
"""


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("out/missing.safetensors", "error: out/missing.safetensors is no file of weights"),
        ("out", "error: out is no file of weights"),
        ("broken.safetensors", "error: broken.safetensors cannot be read"),
        ("other.safetensors", "error: other.safetensors does not fit the model"),
        ("inner.safetensors", "error: Sequential has no save_pretrained()"),
        ("inner.safetensors", "made.get_submodule('0').save_pretrained("),
    ],
)
def test_what_cannot_be_saved_is_an_error_without_a_traceback(
    weights: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save_file

    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    whole = "nn.Sequential(Saves(2, 2))" if weights == "inner.safetensors" else "Saves(2, 2)"
    (tmp_path / "model.py").write_text(INNER.replace("WHOLE", whole))
    (tmp_path / "broken.safetensors").write_text("no weights")
    save_file({"other": torch.ones(2)}, "other.safetensors")
    save_file({"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}, "inner.safetensors")
    with pytest.raises(SystemExit) as ended:
        saved_by_the_command("model.py", weights, "trained")
    assert said in str(ended.value)


def test_the_command_says_which_files_it_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import save_file

    monkeypatch.chdir(tmp_path)
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "of_before.txt").write_text("")
    (tmp_path / "model.py").write_text(INNER.replace("WHOLE", "Saves(2, 2)"))
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, "model.safetensors")
    saved_by_the_command("model.py", "model.safetensors", "trained/")
    assert capsys.readouterr().err == "wrote trained: weights.txt\n"


@pytest.mark.slow
@needs("peft")
def test_of_a_peft_model_the_adapter_is_trained_and_saved_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lora = (
        "from peft import LoraConfig, get_peft_model; "
        'made = get_peft_model(made, LoraConfig(r=4, target_modules=["query", "value"], task_type="SEQ_CLS"))'
    )
    path = written(tmp_path, peft=lora)
    made = fxpipe("compile", path, "-n", 2, "--verify", "-o", "build", *QUICK)
    assert made.code == 0, made.err
    assert fxpipe("run", "build", "--local", "--threads", 1, "--out", "out").code == 0
    saved_by_the_command(path, "out/model.safetensors", "trained")
    from safetensors.torch import load_file

    saved, trained = load_file("trained/adapter_model.safetensors"), load_file("out/model.safetensors")
    assert not list(Path("trained").glob("model*"))
    assert len(saved) == 2 * 2 * 4 + 2
    for name, value in saved.items():
        parts = name.rpartition(".")
        alias = [n for n in trained if n.startswith(parts[0]) and n.endswith(parts[2]) and "original" not in n]
        assert len(alias) == 1
        torch.testing.assert_close(trained[alias[0]], value)
