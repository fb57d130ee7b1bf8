"""Schedules in torch's format: read, written, and refused where they are wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import ScheduleError
from fxpipe.schedule import SCHEDULES, check, from_csv, make, read_csv, to_csv

Cells = list[list[str]]
SYNCHRONOUS = [name for name, kind in SCHEDULES.items() if kind.synchronous]


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 4), (3, 5)])
def test_what_is_written_is_read(name: str, ranks: int, microbatches: int) -> None:
    made = make(name, ranks * SCHEDULES[name].usual_virtual, microbatches)
    found = from_csv(to_csv(made))
    assert (found.workers, found.microbatches, found.placement) == (made.workers, microbatches, made.placement)
    assert found.weights_apart == made.weights_apart
    assert [list(found.row_until(rank, 2)) for rank in range(ranks)] == [
        list(made.row_until(rank, 2)) for rank in range(ranks)
    ]
    assert to_csv(found) == to_csv(made)


def test_torchs_forms() -> None:
    """Empty cells, messages, actions that overlap, a backward that is both, the names of older versions."""
    plain = from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    for text in (
        "0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1\n\n",
        "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1",
        "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1",
        "0F0,0F1,0BW0,0BW1\r\n1F0,1BW0,1F1,1BW1\r\n",
    ):
        assert from_csv(text) == plain
    apart = from_csv("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1")
    assert apart.weights_apart
    assert not plain.weights_apart
    assert from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1,1W0,1W1") == apart
    assert from_csv("0F0,0F1,0I0,0W0,0BW1\n1F0,1I0,1F1,1I1,1W0,1W1") == apart


def test_torchs_zero_bubble_of_two_ranks_with_two_stages() -> None:
    """The order of the file that torch tests with, made by torch here."""
    torchs = pytest.importorskip("torch.distributed.pipelining.schedules")
    kind = torchs.ScheduleInterleavedZeroBubble
    made = kind.__new__(kind)
    made.n_local_stages, made.pp_group_size, made._n_microbatches, made.microbatches_per_round = 2, 2, 8, 2
    rows = [made._calculate_single_rank_operations(rank) for rank in range(2)]
    found = from_csv("\n".join(",".join("" if cell is None else str(cell) for cell in row) for row in rows))
    assert (found.workers, found.ranks, found.microbatches, found.weights_apart) == (4, 2, 8, True)
    check(found, 3)


def refused(text: str) -> str:
    with pytest.raises(ScheduleError) as caught:
        from_csv(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "what", "marked"),
    [
        ("0F0,0B0\n1F0,1X0", "'1X0' is not an action", ">1X0<"),
        ("0F0,0B0,1F0\n1F0,1B0", "stage 1 is on rank 0 and on rank 1", ">1F0<"),
        ("0F0,0B0\n2F0,2B0", "it has stage 2, but no stage 1", ""),
        ("0F0,0B0\n1F0", "worker 1 never does B0", ">B0<"),
        ("0F0,0F0,0B0\n1F0,1B0", "stage 0 does F0 twice", ">0F0<"),
        ("0B0,0F0\n1F0,1B0", "worker 0 does B0 before F0", ">B0<"),
        ("0F0,0F1,0B1,0B0\n1F0,1F1,1B0,1B1", "worker 0 does B0 after B0.1", ">B0<"),
        ("0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1", "worker 1 does F0 after F0.1", ">F0<"),
        ("0F1,0F0,0B0,0B1\n1F0,1F1,1B0,1B1", "worker 0 does F0 after F0.1", ">F0<"),
        ("0F0,0F1,0I0,0W0,0I1\n1F0,1F1,1B0,1B1", "worker 0 never does W0.1", ">W0.1<"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "deadlocks: worker 0 waits at B0 for B0 of worker 1", ">B0<"),
        ("2F0,2B0,0F0,0B0\n1F0,1B0", "deadlocks", ">2:F0<"),
        ("0F0,0B0\n1F4000000,1B0", "is not an action", ">1F4000000<"),
        ("0F0,0B0\n1F0,1F9999,1B0", "stages and 10000 microbatches", ""),
        (" , \n\n", "has no actions", ""),
    ],
)
def test_what_is_wrong_is_marked(text: str, what: str, marked: str) -> None:
    found = refused(text)
    assert what in found
    assert marked in found


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(to_csv(make("1f1b", 2, 3)))
    assert to_csv(read_csv(path)) == path.read_text()
    path.write_text("\ufeff" + path.read_text())  # as spreadsheets save it
    assert to_csv(read_csv(path)) == to_csv(make("1f1b", 2, 3))
    with pytest.raises(ScheduleError, match=r"the schedule .*no\.csv cannot be read"):
        read_csv(tmp_path / "no.csv")
    path.write_text("0F0,0B0\n1F0")
    with pytest.raises(ScheduleError, match=r"own\.csv is wrong: worker 1 never does B0"):
        read_csv(path)


def test_what_has_no_flush_cannot_be_written() -> None:
    with pytest.raises(ScheduleError, match="'async' cannot be written as a file"):
        to_csv(make("async", 2))


def judge(rows: Cells) -> bool:
    """Whether ranks that execute these cells, waiting for what they need, do everything once and in order."""
    pattern = re.compile(r"(\d+)([FIW])(\d+)")
    work = [[(int(m[1]), m[2], int(m[3])) for cell in row if (m := pattern.fullmatch(cell))] for row in rows]
    every = [cell for row in work for cell in row]
    if not every or len(set(every)) < len(every):
        return False
    stages, microbatches = 1 + max(s for s, _, _ in every), 1 + max(j for _, _, j in every)
    if len(every) != 3 * stages * microbatches:
        return False
    if any(len({rank for rank, row in enumerate(work) if any(s == k for s, _, _ in row)}) > 1 for k in range(stages)):
        return False
    if all(s != 0 for s, _, _ in work[0]):  # worker 0 is on rank 0
        return False
    for stage in range(stages):
        for kind in "FIW":
            order = [j for row in work for s, k, j in row if (s, k) == (stage, kind)]
            if order != sorted(order):
                return False
    done: set[tuple[int, str, int]] = set()
    place = [0] * len(work)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(work):
            while place[rank] < len(row):
                stage, kind, j = row[place[rank]]
                needs = {
                    "F": [(stage - 1, "F", j)] if stage else [],
                    "I": [(stage, "F", j), *([(stage + 1, "I", j)] if stage < stages - 1 else [])],
                    "W": [(stage, "I", j)],
                }[kind]
                if not done.issuperset(needs):
                    break
                done.add((stage, kind, j))
                place[rank] += 1
                moved = True
    return len(done) == len(every)


def accepts(rows: Cells) -> bool:
    try:
        from_csv("\n".join(",".join(row) for row in rows))
    except ScheduleError:
        return False
    return True


@given(st.sampled_from(["zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipev"]), st.data())
def test_exactly_what_would_run_in_order_is_accepted(name: str, data: st.DataObject) -> None:
    """Schedules that were changed at random: cells exchanged, moved, repeated, left out, given to another rank."""
    ranks = data.draw(st.integers(1, 3))
    schedule = make(name, ranks * SCHEDULES[name].usual_virtual, data.draw(st.integers(1, 4)))
    rows = [line.split(",") for line in to_csv(schedule).splitlines()]
    for _ in range(data.draw(st.integers(0, 4))):
        row = data.draw(st.sampled_from(rows))
        if not row:
            continue
        a, b = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
        change = data.draw(st.sampled_from(["exchange", "exchange", "move", "move", "drop", "repeat", "give"]))
        if change == "exchange":
            row[a], row[b] = row[b], row[a]
        elif change == "move":
            row.insert(b, row.pop(a))
        elif change == "repeat":
            row.insert(b, row[a])
        elif change == "give":
            data.draw(st.sampled_from(rows)).append(row.pop(a))
        else:
            row.pop(a)
    rows = [row for row in rows if row]
    if rows:
        assert accepts(rows) == judge(rows)
