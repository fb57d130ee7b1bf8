"""`fxpipe.adapters.trl`: the losses and the training of TRL's trainers, against these trainers."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import QUICK, fxpipe
from families.entry import define_torchvision_ops
from packages import needs

from fxpipe.errors import TaskError

pytestmark = needs("trl", "peft")


@pytest.fixture(scope="module", autouse=True)
def without_torchvision() -> None:
    define_torchvision_ops()


SOURCE = """\
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from fxpipe.adapters.trl import trl_hooks


def make():
    config = LlamaConfig(vocab_size=258, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
    return LlamaForCausalLM(config)


def make_args():
    return KINDConfig(
        output_dir="trainer", per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=2,
        learning_rate=3e-2, weight_decay=0.1, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True,
        save_strategy="no", eval_strategy="epoch", logging_steps=1, gradient_checkpointing=False, MORE
    )


def bytes_as_tokens():
    names = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def rows(numbers):
    good, bad = ([f"{n}{text}" * (1 + n % 3) for n in numbers] for text in (" is good", "bad"))
    answers = {"completion": good} if "KIND" == "SFT" else {"chosen": good, "rejected": bad}
    return Dataset.from_dict({"prompt": [f"number {n}: " for n in numbers], **answers})


def given():
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    return {"train_dataset": rows(range(16)), "eval_dataset": rows(range(50, 54)),
            "processing_class": bytes_as_tokens(), "peft_config": lora} | GIVEN


globals().update(trl_hooks(KINDTrainer, model=make, args=make_args, **given()))
"""


def written(folder: Path, kind: str, more: str = "", given: str = "{}") -> Path:
    path = folder / "model.py"
    path.write_text(SOURCE.replace("KIND", kind).replace("MORE", more).replace("GIVEN", given))
    return path


def trainer_of(module: dict[str, Any], kind: str) -> Any:
    torch.manual_seed(42)  # so do the hooks, with the arguments' seed
    return module[f"{kind}Trainer"](model=module["make"](), args=module["make_args"](), **module["given"]())


LOSSES = ["sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"]
LOSSES += ["apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("SFT", ""),
        ("SFT", 'loss_type="dft"'),
        ("DPO", f"loss_type={LOSSES}, label_smoothing=0.1"),
        ("DPO", "use_weighting=True, ld_alpha=0.3"),
        ("DPO", 'f_divergence_type="js_divergence"'),
        ("DPO", "precompute_ref_log_probs=True, beta=0.3"),
    ],
)
def test_loss_gradients_and_metrics_are_the_trainers(
    kind: str, more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a batch with lengths of its own, and adapters that have begun to learn."""
    monkeypatch.chdir(tmp_path)
    module = runpy.run_path(str(written(tmp_path, kind, more)))
    model, trainer = module["model"](), trainer_of(module, kind)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator) * parameter.requires_grad
    trainer.model.load_state_dict(model.state_dict())
    batch = next(iter(module["train_data"]()))
    assert {len(leaf) for leaf in batch.values()} == {8}
    loss, logged = module["loss"](model, batch)
    loss.backward()
    rows = {
        name: leaf.transpose(0, 1).flatten(0, 1) if kind == "DPO" and leaf.dim() > 2 else leaf
        for name, leaf in batch.items()
    }
    expected = trainer.compute_loss(trainer.model, dict(rows))
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for mine, its in zip(model.parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)
    seen = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    assert {name: float(value) for name, value in logged.items()} == pytest.approx(
        {name: value for name, value in seen.items() if not name.startswith(("num_tokens", "logits/"))}, abs=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more", "given"),
    [
        ("SFT", "", "{}"),
        ("DPO", "", "{}"),
        ("DPO", "precompute_ref_log_probs=True", '{"peft_config": None}'),
    ],
    ids=["sft", "dpo", "dpo of all weights"],
)
def test_a_pipeline_trains_as_the_trainer_does(
    kind: str, more: str, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, kind, more, given)
    made = fxpipe("compile", path, "-n", 2, "--schedule", "1f1b", "-o", "build", *QUICK)
    assert made.code == 0, made.err
    summary = fxpipe("run", "build", "--local", "--threads", 1, "--out", "out", "--json").json
    module = runpy.run_path(str(path))
    trainer = trainer_of(module, kind)
    first = load_file("build/weights.safetensors")
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(first[name], value)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 4
    assert summary["losses"] == pytest.approx(losses, abs=1e-4)
    trained = load_file("out/model.safetensors")
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(trained[name], value, atol=1e-4, rtol=1e-3)
    [evaluated] = [row for row in trainer.state.log_history if "eval_loss" in row and row["step"] == 4]
    for name, value in summary["evaluation"].items():
        assert value == pytest.approx(evaluated[f"eval_{name}"], abs=1e-3)


@pytest.mark.parametrize(
    ("kind", "more", "given", "said"),
    [
        ("DPO", "", '{"peft_config": None}', "the reference of DPO is a second model here"),
        ("DPO", "", '{"ref_model": make()}', "the reference of DPO is a second model here"),
        ("SFT", "packing=True, max_length=32", "{}", "packing_strategy='bfd' joins the samples of a batch to one row"),
        ("DPO", "sync_ref_model=True", "{}", "the reference of a pipeline does not change"),
        ("SFT", "use_liger_kernel=True", "{}", "use_liger_kernel=True: change the model in its factory"),
        (
            "SFT",
            "",
            '{"compute_metrics": len}',
            "SFTTrainer is given compute_metrics, which a pipeline does not follow",
        ),
        ("SFT", "", '{"eval_dataset": {"a": [], "b": []}}', "give one of them: a, b"),
    ],
)
def test_what_a_pipeline_does_not_do_is_refused(
    kind: str, more: str, given: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TaskError) as refused:
        runpy.run_path(str(written(tmp_path, kind, more, given)))["model"]()
    assert said in f"{refused.value} {refused.value.hint}"


def test_other_trainers_and_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl import RewardTrainer
    from trl.trainer import utils

    from fxpipe.adapters.trl import trl_hooks

    with pytest.raises(TaskError, match="RewardTrainer is neither SFTTrainer nor DPOTrainer"):
        trl_hooks(RewardTrainer, model=torch.nn.Identity, args=None)
    monkeypatch.delattr(utils, "add_fused_lm_head")
    with pytest.raises(TaskError) as refused:
        trl_hooks(RewardTrainer, model=torch.nn.Identity, args=None)
    assert "pip install -c constraints.txt 'fxpipe[trl]'" in str(refused.value.hint)
