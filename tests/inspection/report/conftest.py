"""The report as text, and in Chromium."""

from __future__ import annotations

import re
import shutil
from base64 import b64decode
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, TreeBuilder
from zlib import decompress

import pytest

from fxpipe.inspection.report.page import page, write_report

Facts = dict[str, Any]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Written(HTMLParser):
    """A page as a browser reads it that opens all that is folded, but without scripts: `root` is its `html`."""

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self.html = page(facts)
        self._tree = TreeBuilder()
        text = re.sub(r"<(script|style)(?! type=.text/zlib).*?</\1>", "", self.html, flags=re.DOTALL)
        self.feed(re.sub(r'<script type="text/zlib">(.*?)</script>', unfolded, text))
        self.root: Element = self._tree.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("dd", "div", "dt", "li"):
            self._tree.data(" ")
        self._tree.start(tag, {name: value or "" for name, value in attrs})
        if tag in ("meta", "link", "input", "br"):
            self._tree.end(tag)

    def handle_endtag(self, tag: str) -> None:
        self._tree.end(tag)

    def handle_data(self, data: str) -> None:
        self._tree.data(data)

    def text(self, path: str) -> str:
        """What an element says: of the id `#run`, or of an ElementPath."""
        path = f".//*[@id='{path[1:]}']" if path[0] == "#" else path
        found = self.root.find(path)
        assert found is not None, path
        return told(found)

    def table(self, caption: str) -> list[list[str]]:
        """The cells of a table's rows."""
        path = f".//div[@aria-label='{caption}']/table/tbody/tr"
        return [[told(cell) for cell in row] for row in self.root.iterfind(path)]


def unfolded(script: re.Match[str]) -> str:
    """What the page makes of what is folded."""
    return decompress(b64decode(script[1])).decode()


def told(element: Element) -> str:
    """The text of an element and of all in it, its spaces as a browser shows them."""
    return " ".join("".join(element.itertext()).split())


@pytest.fixture(scope="session")
def written() -> type[Written]:
    """The page of facts as text: `written(facts)`."""
    return Written


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium without a window."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make venv")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: make browser")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Opened:
    """A report in the browser, with all that it said and asked for."""

    def __init__(self, browser: Any, path: Path, width: int, scheme: str) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        self.url = path.resolve().as_uri()
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(self.url)

    def tidy(self) -> Any:
        """The page from its top, the focus and the mouse nowhere; what a test unfolded or zoomed stays."""
        self.page.mouse.move(0, 0)
        self.page.evaluate(
            "document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex');"
            "scrollTo({top: 0, behavior: 'instant'})"
        )
        return self.page

    def check(self) -> None:
        """Whatever it said or asked for beside its own file is a failure."""
        assert self.said == []
        assert [url for url in self.asked if url not in (self.url, "data:,")] == []

    def close(self) -> None:
        """Close it, and `check`."""
        self.context.close()
        self.check()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Write facts as a report and open it: `opened(facts, width=1280, scheme="light")`."""
    made: list[Opened] = []

    def open_(facts: Facts, width: int = 1280, scheme: str = "light") -> Opened:
        path = tmp_path / f"report-{len(made)}.html"
        write_report(facts, path)
        made.append(Opened(browser, path, width, scheme))
        return made[-1]

    yield open_
    for report in made:
        report.close()


@pytest.fixture(scope="module")
def pages(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[int, Opened]]]:
    """Where shared reports are written, and those that are open, by their facts' identity."""
    made: dict[int, Opened] = {}
    yield tmp_path_factory.mktemp("reports"), made
    for report in made.values():
        report.context.close()


@pytest.fixture
def shared(browser: Any, pages: tuple[Path, dict[int, Opened]]) -> Iterator[Callable[[Facts], Any]]:
    """A page that the module's tests have in common: `shared(facts)`. Facts must live as long.

    For tests that need no page of their own: what folds, zooms and hovers stays for the next one.
    """
    folder, made = pages

    def open_(facts: Facts) -> Any:
        if id(facts) not in made:
            path = folder / f"report-{len(made)}.html"
            write_report(facts, path)
            made[id(facts)] = Opened(browser, path, 1280, "light")
        return made[id(facts)].tidy()

    yield open_
    for report in made.values():
        report.check()
