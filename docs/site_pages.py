"""Pages of the site that no file in docs/ is: the README, the commands, and files of the repository that pages link to.

A hook of MkDocs (`mkdocs.yml`). What is printed from the code is made here, so that it is never typed twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from fxpipe.cli.command import Command
from fxpipe.cli.main import cli

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?\)")
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
FENCE = re.compile(r"(```.*?```)", re.S)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and whatever is linked to outside docs/."""
    texts = {"reference/commands.md": commands()}
    for file in files.documentation_pages():
        texts[file.src_uri] = file.content_string
    linked = {Path("README.md")}
    for uri, text in texts.items():
        texts[uri] = _moved(text, Path("docs", uri).parent, uri, linked)
    made: set[Path] = set()
    while new := linked - made:
        for path in sorted(new):
            if path.suffix in (".png", ".svg"):
                files.append(File.generated(config, _uri(path), abs_src_path=str(ROOT / path)))
            else:
                texts[_uri(path)] = _moved(_source(path), path.parent, _uri(path), linked)
        made |= new
    for uri, text in texts.items():
        if (there := files.get_file_from_path(uri)) is not None:
            files.remove(there)
        files.append(File.generated(config, uri, content=text))
    return files


def commands() -> str:
    """Every option of every command."""
    lines = ["# Commands", "", "Printed from the code: `fxpipe COMMAND --help-all` says the same in a terminal.", ""]
    for name, command in cli.commands.items():
        lines += [f"## fxpipe {name}", "", *_help(command), ""]
    return "\n".join(lines)


def _help(command: click.Command) -> Iterator[str]:
    assert isinstance(command, Command)
    yield from _paragraphs(command.help or "")
    for title, options in command.groups.items():
        yield from ("", f"**{title}**", "", "| option | |", "|---|---|")
        for option in options:
            names = ", ".join(f"`{one}`" for one in (*option.opts, *option.secondary_opts))
            kind = f" `{option.make_metavar(click.Context(command))}`" if not option.is_flag else ""
            yield f"| {names}{kind} | {_cell(option)} |"


def _cell(option: click.Option) -> str:
    text = (option.help or "").replace("|", "\\|")
    shown = option.show_default and option.default not in (None, False, ())
    return f"{text} Default: `{option.default}`." if shown else text


def _paragraphs(text: str) -> Iterator[str]:
    """The text of a command's help; a paragraph that click does not rewrap is a block of code."""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        if paragraph.startswith("\b\n"):
            yield from ("```console", *paragraph.splitlines()[1:], "```", "")
        else:
            yield from (paragraph.replace("<", "&lt;"), "")


def _moved(text: str, folder: Path, uri: str, linked: set[Path]) -> str:
    """A text of the repository's `folder`, with its links made those of the page `uri`.

    Args:
        linked: gets what it links to outside docs/.
    """

    def one(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / match[2]))
        if target.parts[:1] == ("..",) or not (ROOT / target).exists():
            return match[0]
        if (ROOT / target / "README.md").exists():
            target /= "README.md"
        if not _in_site(target):
            linked.add(target)
        return f"{match[1]}{os.path.relpath(_uri(target), Path(uri).parent)}{match[3] or ''})"

    parts = FENCE.split(text)
    return "".join(part if i % 2 else LINK.sub(one, part) for i, part in enumerate(parts))


def _in_site(path: Path) -> bool:
    return path.parts[0] == "docs" and path.suffix in (".md", ".svg", ".png")


def _uri(path: Path) -> str:
    """Of the page of a file of the repository."""
    if path == Path("README.md"):
        return "index.md"
    if _in_site(path):
        return Path(*path.parts[1:]).as_posix()
    return f"source/{path.as_posix()}{'' if path.suffix in ('.md', '.svg', '.png') else '.md'}"


def _source(path: Path) -> str:
    """What the page of a file, or of a folder, shows."""
    if (ROOT / path).is_dir():
        return "\n".join([f"# {path}", "", *(f"- {p.name}" for p in sorted((ROOT / path).iterdir()))])
    text = (ROOT / path).read_text(encoding="utf-8")
    return text if path.suffix == ".md" else f"{UNSEARCHED}# {path}\n\n````{path.suffix[1:] or 'text'}\n{text}\n````\n"
