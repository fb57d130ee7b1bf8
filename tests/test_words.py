"""A class name means one thing in the whole product; and some words that mislead a reader do not occur in it."""

from __future__ import annotations

import ast
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("fxpipe", "passes", "cli")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

INSTEAD = {
    r"nobody": "nothing, no process, no one",
    r"besides?": "next to, as well as, in addition",
    r"(hears|heard|hearing)": "receive, learn",
    r"(tells|told|telling)": "send, say",
    r"l(ies|ying)": "is",
    r"whom": "which",
    r"otherwise than": "different from",
    r"as soon (?!as)": "as fast",
    r"(?<!drift )apart(?! from)": "separate, separately, independent",
    r"in whichever": "in any",
    r"than (that|those) of all": "say of what",
}
"""Words that a reader stumbles over, and what says it."""

TEXT = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
ROOMS = sorted({path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")})


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The comments and the texts of a file, with their lines; without the names of code in them."""
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type in TEXT:
                yield token.start[0], re.sub(r"""`[^`]*`|\w*_\w*|--[\w-]+|^["']\w+["']$""", "", token.string)


@pytest.mark.parametrize(
    "room",
    ROOMS,
    ids=lambda room: str(room.relative_to(ROOT)),
)
def test_words_that_mislead_do_not_occur(room: Path) -> None:
    found = [(path, misled) for path in sorted(room.glob("*.py")) for misled in misleading(prose(path))]
    assert not found, "".join(f"\n{path.relative_to(ROOT)}:{misled}" for path, misled in found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_words_that_mislead_do_not_occur_on_a_page(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", lambda code: "\n" * code[0].count("\n"), page.read_text("utf-8"), flags=re.S)
    assert not (found := list(misleading([(1, text)]))), "\n" + "\n".join(found)


def misleading(texts: Iterable[tuple[int, str]]) -> Iterator[str]:
    """The words in texts that begin at these lines, each with its line."""
    for line, text in texts:
        for word, better in INSTEAD.items():
            for match in re.finditer(rf"\b{word}\b", text, re.I):
                yield f"{line + text[: match.start()].count(chr(10))}: {match[0]!r}; write {better}"


def test_a_class_name_means_one_thing() -> None:
    """A leading underscore makes no other name: who reads `_Worker` thinks of `Worker`."""
    places = defaultdict(list)
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    places[node.name.lstrip("_")].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
