"""docs/how-to/lora.md: its model file trains adapters alone, with --meta too, and what is saved is what it says."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import QUICK, fxpipe
from families.entry import define_torchvision_ops

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "lora.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_adapters_are_trained_and_saved_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("transformers", "peft"):
        pytest.importorskip(package, reason=f"{package} is not installed; `make venv` installs it")
    define_torchvision_ops()
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.chdir(tmp_path)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained("base")
    shutil.copy(ROOT / "examples" / "hf_llama.py", tmp_path)
    code, loads, _ = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    (tmp_path / "lora.py").write_text(code)
    losses = {}
    for build, *options in (("build", "--verify"), ("meta", "--meta")):
        made = fxpipe("compile", "lora.py", "-n", 2, "-o", build, *QUICK, *options)
        assert made.code == 0, made.err
        run = ("run", build, "--local", "--threads", 1, "--steps", 3, "--checkpoint-every", 3, "--out", f"{build}-out")
        losses[build] = fxpipe(*run, "--json").json["losses"]
    assert losses["build"][0] == losses["meta"][0]  # B is zero at first: it is the base's loss
    base, trained = load_file("base/model.safetensors"), load_file("build-out/model.safetensors")
    for name, value in base.items():
        there = f"base_model.model.{name}"
        there = there if there in trained else there.replace(".weight", ".base_layer.weight")
        assert torch.equal(trained[there], value), name
    kept = load_file("build-out/checkpoints/step-3/optimizer-00001-of-00002.safetensors")
    assert kept
    assert all(".lora_" in name for name in kept)
    assert fxpipe("run", "meta", "--local", "--weights", "base", "--steps", 1, "--out", "no").code == 1

    monkeypatch.setattr(sys, "argv", ["", "lora.py", "build-out/model.safetensors", "adapter"])
    monkeypatch.delitem(sys.modules, "fxpipe.adapters.transformers", raising=False)  # as in a process of its own
    runpy.run_module("fxpipe.adapters.transformers", run_name="__main__")
    from peft import PeftModel

    names: dict[str, Any] = {"PeftModel": PeftModel, "LlamaForCausalLM": LlamaForCausalLM}
    exec(loads, names)
    tuned = names["tuned"].state_dict()
    assert {name for name in trained if ".lora_" in name} == {name for name in tuned if ".lora_" in name}
    assert all(torch.equal(tuned[name], value) for name, value in trained.items() if ".lora_" in name)
