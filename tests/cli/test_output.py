"""Tables that fit their terminal, and how times and sizes are written in them."""

from __future__ import annotations

import io

import pytest
from fxpipe.cli.output import (
    TextColumn,
    TimeUnit,
    note,
    print_columns,
    print_table,
    print_text,
    short_size,
    shortened,
    stdout_console,
    warn,
    working,
)
from rich.console import Console


def table(width: int) -> list[str]:
    """Three columns: 30 characters that may shrink, 10 that may go, 6 that stay."""
    columns = [TextColumn("name", elastic=True), TextColumn("spare", spare=1), TextColumn("number", right=True)]
    console = Console(file=io.StringIO(), width=width)
    print_columns(columns, [["a" * 15 + "b" * 15, "c" * 10, "1"], ["short", "", "200000"]], console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_where_there_is_room_nothing_is_lost() -> None:
    assert table(50) == [
        "name                            spare       number",
        "─" * 50,
        "aaaaaaaaaaaaaaabbbbbbbbbbbbbbb  cccccccccc       1",
        "short                                       200000",
    ]
    assert table(200) == table(50)


def test_spare_columns_go_first_then_cells_are_shortened() -> None:
    assert table(49)[2] == "aaaaaaaaaaaaaaabbbbbbbbbbbbbbb       1"
    shrunk = table(28)
    assert shrunk[2] == "aaaaaa…bbbbbbbbbbbbb       1"
    assert shrunk[3] == "short                 200000"
    assert max(map(len, shrunk)) == 28


@pytest.mark.parametrize(
    ("text", "width", "expected"), [("abcdefghij", 10, "abcdefghij"), ("abcdefghij", 7, "ab…ghij"), ("abc", 1, "…")]
)
def test_the_middle_goes(text: str, width: int, expected: str) -> None:
    assert shortened(text, width).plain == expected


def test_the_times_of_a_table_have_one_unit() -> None:
    small, usual, long = TimeUnit([0.012, 0.5]), TimeUnit([0.012, None, 12.0]), TimeUnit([2e5])
    assert (small.unit, small(0.5), small(0.012)) == ("µs", "500.0", "12.0")
    assert (usual.unit, usual(12.0), usual(0.012), usual(None)) == ("ms", "12.00", "0.01", "–")
    assert (long.unit, long(2e5)) == ("s", "200.0")
    assert TimeUnit([])(None) == "–"


def test_short_sizes() -> None:
    assert [short_size(count) for count in (0, 1023, 1536, 200 * 2**20)] == ["0B", "1023B", "1.5K", "200M"]


def test_prose_is_broken_between_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    print_text(stdout_console(), "one two three four five-six [bold] :smile:")
    assert capsys.readouterr().out == "one two three four\nfive-six [bold]\n:smile:\n"


NASTY = "[/red] [bold]x :smile: 12\x1b[31m\x07"
SHOWN = "[/red] [bold]x :smile: 12[31m"


def test_names_are_printed_as_they_are_but_for_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    print_table(["[i]", "b"], [[NASTY, NASTY]])
    print_columns([TextColumn("[i]", elastic=True)], [[NASTY]], stdout_console())
    print_text(stdout_console(), NASTY)
    out = capsys.readouterr().out
    assert out.count(SHOWN) == 4
    assert out.count("[i]") == 2
    assert "\x1b" not in out
    warn(NASTY)
    note(NASTY)
    assert capsys.readouterr().err == f"warning: {SHOWN}\n{SHOWN}\n"


def test_a_spinners_text_is_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with working("[/red]") as say:
        say(NASTY)
