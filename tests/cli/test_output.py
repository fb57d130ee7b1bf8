"""Tables that fit their terminal, and how times and sizes are written in them."""

from __future__ import annotations

import io
import sys
import threading
import time
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from fxpipe.cli import output
from fxpipe.cli.output import new_console, note, print_columns, print_text, shortened, warn, working
from fxpipe.inspection.table import COUNT, NAME, SIZE, TEXT, TIME, WORKERS, Column, ShownTable, TimeUnit
from fxpipe.messages import saying, silenced


def table(width: int) -> list[str]:
    """Three columns: 30 characters that may shrink, 10 that may go, 6 that stay."""
    columns = [Column("name", "name", NAME), Column("spare", "spare", TEXT, spare=1), Column("number", "n")]
    rows = [{"name": "a" * 15 + "b" * 15, "spare": "c" * 10, "n": 1e5}, {"name": "short", "spare": "", "n": 1234567}]
    console = Console(file=io.StringIO(), width=width)
    print_columns(ShownTable(columns, rows), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_where_there_is_room_nothing_is_lost() -> None:
    assert table(53) == [
        "name                            spare          number",
        "─" * 53,
        "aaaaaaaaaaaaaaabbbbbbbbbbbbbbb  cccccccccc    100,000",
        "short                                       1,234,567",
    ]
    assert table(200) == table(53)


def test_spare_columns_go_first_then_cells_are_shortened() -> None:
    assert table(52)[2] == "aaaaaaaaaaaaaaabbbbbbbbbbbbbbb    100,000"
    shrunk = table(31)
    assert shrunk[2] == "aaaaaa…bbbbbbbbbbbbb    100,000"
    assert shrunk[3] == "short                 1,234,567"
    assert max(map(len, shrunk)) == 31


def test_times_have_one_unit() -> None:
    columns = [
        Column("on", "on", WORKERS),
        Column("took", "ms", TIME),
        Column("size", "bytes", SIZE),
        Column("n", "n", COUNT),
    ]
    rows = [{"on": ("F", 0, " → B", 1), "ms": 0.5, "bytes": 1536, "n": 1234}, {"on": 2, "ms": None, "bytes": None}]
    written = ShownTable(columns, rows).written()
    assert written == (
        ["on", "took µs", "size", "n"],
        [[("F", 0, " → B", 1), "500.0", "1.5 KiB", "1,234"], [(2,), "–", "–", "–"]],
    )


@pytest.mark.parametrize(
    ("text", "width", "expected"), [("abcdefghij", 10, "abcdefghij"), ("abcdefghij", 7, "ab…ghij"), ("abc", 1, "…")]
)
def test_the_middle_goes(text: str, width: int, expected: str) -> None:
    assert shortened(Text(text), width).plain == expected


def test_the_times_of_a_table_have_one_unit() -> None:
    small, usual, long = TimeUnit([0.012, 0.5]), TimeUnit([0.012, None, 12.0]), TimeUnit([2e5])
    assert (small.unit, small(0.5), small(0.012)) == ("µs", "500.0", "12.0")
    assert (usual.unit, usual(12.0), usual(0.012), usual(None)) == ("ms", "12.00", "0.01", "–")
    assert (long.unit, long(2e5)) == ("s", "200.0")
    assert TimeUnit([])(None) == "–"


def test_prose_is_broken_between_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    print_text(new_console(), "one two three four five-six [bold] :smile:")
    assert capsys.readouterr().out == "one two three four\nfive-six [bold]\n:smile:\n"


NASTY = "[/red] [bold]x :smile: 12\x1b[31m\x07"
SHOWN = "[/red] [bold]x :smile: 12[31m"


def test_names_are_printed_as_they_are_but_for_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    table = ShownTable([Column("[i]", "name", NAME), Column("b", "name", TEXT)], [{"name": NASTY}])
    print_columns(table, whole=True)
    print_columns(table)
    print_text(new_console(), NASTY)
    out = capsys.readouterr().out
    assert out.count(SHOWN) == 5
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


def test_work_in_a_pipe_says_soon_what_it_is_and_then_how_far(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Without a word of the work itself, too, and not a word after its end."""
    monkeypatch.setattr(output, "QUIET", 0.02)
    monkeypatch.setattr(output, "AGAIN", 0.02)
    done = 0
    lines: list[str] = []

    def wait(*texts: str) -> None:
        for text in texts:
            deadline = time.monotonic() + 30
            while not any(text in line for line in lines) and time.monotonic() < deadline:
                time.sleep(0.01)
                lines.extend(capsys.readouterr().err.splitlines())
            assert any(text in line for line in lines), (text, lines)

    with working("compiling") as say:
        wait("compiling (0 s)")
        say("capturing")
        wait("compiling: capturing (")
        with saying(lambda: f"{done} of 7"):
            wait("compiling: capturing: 0 of 7 (")
            done = 3
            wait("compiling: capturing: 3 of 7 (")
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_work_that_takes_no_second_says_nothing(capsys: Any) -> None:
    with working("compiling") as say:
        say("capturing")
    assert capsys.readouterr().err == ""


def test_other_threads_print_while_one_is_silenced(capsys: pytest.CaptureFixture[str]) -> None:
    with silenced():
        print("dropped")
        print("dropped", file=sys.stderr)
        other = threading.Thread(target=lambda: print("an error", file=sys.stderr))
        other.start()
        other.join()
    print("after")
    assert capsys.readouterr() == ("after\n", "an error\n")
