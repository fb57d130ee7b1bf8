"""A picture as SVG text: boxes, words and arrows; legible on light and dark, with nothing fetched from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

WORKERS = ("#4477AA", "#EE7733", "#228833", "#CC3311", "#AA3377", "#33BBEE", "#CCBB44", "#777777")
"""The colour of a worker, by its rank modulo 8; its number always stands beside it."""

LETTER = 0.61  # the width of a letter, of its size
_STYLE = """
text { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.card { fill: #ffffff; stroke: #d0d7de; }
.ink { fill: #1f2328; }
.soft { fill: #59636e; }
.line { stroke: #59636e; fill: none; }
.tip { fill: #59636e; }
.idle { fill: #eceff3; }
.stale { fill: #ffe2dd; }
.ahead { fill: #dcebff; }
.plain { fill: #f3f5f7; }
@media (prefers-color-scheme: dark) {
  .card { fill: #0d1117; stroke: #3d444d; }
  .ink { fill: #f0f6fc; }
  .soft { fill: #a5afba; }
  .line { stroke: #a5afba; }
  .tip { fill: #a5afba; }
  .idle { fill: #1e242c; }
  .stale { fill: #5c2018; }
  .ahead { fill: #173a66; }
  .plain { fill: #21262d; }
}
"""


@dataclass
class Picture:
    """What is drawn, in order, on a card of a width and a height; `title` and `words` are read aloud."""

    width: float
    height: float
    title: str
    words: str
    elements: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, kind: str = "plain", radius: float = 3) -> None:
        self.elements.append(f'<rect {_at(x, y, width, height)} rx="{_n(radius)}" class="{kind}"/>')

    def worker(
        self, rank: int, x: float, y: float, width: float, height: float, text: str, faint: bool, dashed: bool = False
    ) -> None:
        """A box in a worker's colour with a word in it: full for forward, faint for backward, dashed for W."""
        colour = WORKERS[rank % len(WORKERS)]
        fill = f'fill="{colour}" stroke="{colour}"' + (' fill-opacity="0.28"' if faint else "")
        fill += ' stroke-dasharray="3 2"' if dashed else ""
        self.elements.append(f'<rect {_at(x, y, width, height)} rx="2" {fill}/>')
        if text:
            size = min(12.0, (width - 2) / (LETTER * len(text)))
            middle = (x + width / 2, y + height / 2 + 0.35 * size)
            self.text(*middle, text, size, "middle", "ink" if faint else "", None if faint else _on(colour))

    def text(
        self, x: float, y: float, text: str, size: float = 12, anchor: str = "start", kind: str = "ink",
        colour: str | None = None, bold: bool = False, length: float | None = None,
    ) -> None:  # fmt: skip
        """Words; `length` is the width that they must fill, whatever the font."""
        look = f'fill="{colour}"' if colour else f'class="{kind}"'
        weight = ' font-weight="bold"' if bold else ""
        weight += f' textLength="{_n(length)}"' if length else ""
        place = f'x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" text-anchor="{anchor}"'
        self.elements.append(f"<text {place} {look}{weight}>{escape(text)}</text>")

    def line(self, points: Sequence[tuple[float, float]], arrow: bool = False, dashed: bool = False) -> None:
        """A line through points; an arrow ends at the last one."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self.elements.append(f'<polyline points="{path}" class="line" stroke-width="1.5"{dashes}/>')
        if arrow:
            (x0, y0), (x, y) = points[-2:]
            length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
            dx, dy = 8 * (x - x0) / length, 8 * (y - y0) / length
            tip = ((x, y), (x - dx - dy / 2, y - dy + dx / 2), (x - dx + dy / 2, y - dy - dx / 2))
            self.elements.append(f'<polygon points="{" ".join(f"{_n(a)},{_n(b)}" for a, b in tip)}" class="tip"/>')

    def render(self) -> str:
        """The file's text."""
        size = f'viewBox="0 0 {_n(self.width)} {_n(self.height)}" width="{_n(self.width)}" height="{_n(self.height)}"'
        card = (
            f'<rect x="0.5" y="0.5" width="{_n(self.width - 1)}" height="{_n(self.height - 1)}" rx="6" class="card"/>'
        )
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{escape(self.title)}</title>",
            f"<desc>{escape(self.words)}</desc>",
            f"<style>{_STYLE}</style>",
            card,
        ]
        return "\n".join([*head, *self.elements, "</svg>"]) + "\n"


def _on(colour: str) -> str:
    """White on a colour where its contrast is enough (4.5, WCAG), else black."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#ffffff" if 1.05 / (luminance + 0.05) >= 4.5 else "#000000"


def _at(x: float, y: float, width: float, height: float) -> str:
    return f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'


def _n(number: float) -> str:
    """At most one decimal, so that the last bits of a sum are in no file."""
    return f"{number:.1f}".removesuffix(".0")
