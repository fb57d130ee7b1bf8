"""The reference names every option, hook, public name and error class: it is printed from the code, and this looks."""

from __future__ import annotations

import importlib.util
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
from fxpipe.cli.main import cli

import fxpipe
from fxpipe import errors
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
