"""The reference names every option, hook, public name and error class: it is printed from the code, and this looks."""

from __future__ import annotations

import importlib.util
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import errors
from fxpipe.cli.main import cli
from fxpipe.inspection.tables import staleness
from fxpipe.task.hooks import Hooks

DOCS = Path(__file__).parents[2] / "docs"


def page(name: str) -> str:
    return (DOCS / "reference" / name).read_text(encoding="utf-8")


def test_every_option_of_every_command_is_on_its_page() -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed; `make venv` installs it")
    spec = importlib.util.spec_from_file_location("site_pages", DOCS / "site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    sections = dict(re.findall(r"^## fxpipe (\w+)\n(.*?)(?=^## |\Z)", pages.commands(), re.S | re.M))
    assert sections.keys() == cli.commands.keys()
    for name, command in cli.commands.items():
        for flag in (flag for parameter in command.params for flag in parameter.opts if flag.startswith("-")):
            assert f"`{flag}`" in sections[name], f"fxpipe {name} {flag}"


def test_every_hook_is_described() -> None:
    assert "::: fxpipe.task.hooks.Hooks" in page("hooks.md")
    described = re.findall(r"^ {4}(\w+(?:, \w+)*):", inspect.getdoc(Hooks) or "", re.M)
    assert sorted(name for names in described for name in names.split(", ")) == sorted(f.name for f in fields(Hooks))


def test_every_public_name_is_printed() -> None:
    printed = set(re.findall(r"::: fxpipe\.(\w+)$", page("python.md"), re.M))
    assert printed >= set(fxpipe.__all__) - {"__version__", "FxpipeError"}


def test_the_columns_of_staleness_are_those_of_the_table() -> None:
    text = (DOCS / "how-to" / "policies.md").read_text(encoding="utf-8")
    _, written, _ = re.split(r"^With `--log-staleness`|^To see what prediction gains", text, flags=re.M)
    assert "  ".join(column.title for column in staleness(()).columns) in written


def test_every_error_class_says_what_it_means() -> None:
    assert "::: fxpipe.errors" in page("error-classes.md")
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.FxpipeError)]
    assert all(kind.__doc__ for kind in kinds)


def test_the_initial_weights_of_a_build_are_loaded_as_its_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mid, self.head = nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
            self.head.weight = self.embed.weight
            self.unread = nn.Parameter(torch.ones(2))
            self.register_buffer("mask", torch.ones(4), persistent=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.mid(self.embed(ids)) * self.mask)
            return out

    classes = torch.tensor([1.0, 2.0, 3.0, 4.0])
    first, model, ids = Tied(), Tied(), torch.tensor([0, 1, 2, 3])
    loss = lambda model, ids: nn.functional.cross_entropy(model(ids), ids, classes)  # noqa: E731
    monkeypatch.chdir(tmp_path)
    fxpipe.compile(first, loss, ids, workers=2, microbatches=1, cost="analytic").save("build")
    (code,) = re.findall(r"^```python\n((?:(?!```).)*build/weights\.safetensors.*?)```", page("files.md"), re.S | re.M)
    exec(code, {"model": model})
    assert not torch.equal(Tied().mid.weight, first.mid.weight)
    for name, value in first.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
