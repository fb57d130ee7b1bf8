"""The pictures of docs/pictures: `python tests/inspection/report/pictures.py report.html`.

It photographs a report, light and dark.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).parents[3] / "docs" / "pictures"
WIDTH, HEIGHT = 1280, 1660


def main(report: Path) -> None:
    """Write report-light.png and report-dark.png: the head of the page and its model."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)
            page.goto(report.resolve().as_uri())
            page.screenshot(path=FOLDER / f"report-{scheme}.png")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
