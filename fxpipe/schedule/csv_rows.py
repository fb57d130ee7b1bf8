"""Schedules as text: torch's CSV of pipeline schedules, read, checked and written.

A line has the actions of one rank in a minibatch, `0F0,0F1,2I0,2W0`: the number of the stage (here: the worker), what
it does, and the number of the microbatch. F is a forward; I makes the gradients of inputs, W the gradients of weights;
B and BW make both. `(0F1;3B0)OVERLAP_F_B` is two actions, here one after the other. A file may also have sends,
receives, gathers and reductions (`0SEND_F1`, `1UNSHARD`): they are ignored, since they follow from the rest. So are
empty cells.

The form is that of `torch.distributed.pipelining`, whose schedules have `_load_csv` and `_dump_csv`, and of
torchtitan's `pipeline_parallel_schedule_csv`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice, repeat
from pathlib import Path
from typing import ClassVar, cast

from fxpipe.errors import ScheduleError
from fxpipe.plan.limits import MOST_MICROBATCHES, MOST_WORKERS
from fxpipe.plan.spec import Phase
from fxpipe.schedule.action import Action, Event
from fxpipe.schedule.base import Schedule, Table
from fxpipe.schedule.order import marked, picture, play, read

ENDING = ".csv"
NAME = "csv"
"""The name in a plan of a schedule whose rows it has."""

_NUMBER = "0|[1-9][0-9]{0,5}"
_CELL = re.compile(rf"(?P<worker>{_NUMBER})(?P<kind>BW|[FBIW])(?P<microbatch>{_NUMBER})")
_LEFT_OUT = re.compile(rf"(?:{_NUMBER})(?:UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)(?:{_NUMBER})?")
_TOGETHER = re.compile(r"\((?P<inner>[^()]*)\)OVERLAP_F_B")
_HINT = "a cell is a stage, one of F, B, I, W, and a microbatch: 0F0, 2I1, 2W1; a row has the actions of one rank"


@dataclass(frozen=True)
class RowsOfText(Table):
    """A schedule that was read from text; backwards make the weight gradients.

    Attributes:
        lines: one for each rank, as `to_csv` writes them.
        title: its name: of the schedule that a model file registered, or `NAME`.
        where: what errors call it while it is read; '' afterwards.
    """

    name: ClassVar[str] = NAME
    lines: tuple[str, ...] = ()
    title: str = NAME
    where: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.title)
        object.__setattr__(self, "called", self.where or super().called)
        super().__post_init__()

    def rows(self) -> list[list[Event]]:
        phases: dict[str, Phase] = {"F": "F", "B": "B", "I": "B", "W": "W"}
        return [[(worker, Action(phases[kind], 0, j)) for worker, kind, j in _cells(line, "")] for line in self.lines]


@dataclass(frozen=True)
class RowsOfTextApart(RowsOfText):
    """The same with separate weight gradients (W)."""

    weights_apart: ClassVar[bool] = True


AGAIN = "|"
"""Separates the beginning of an endless row from the part that it repeats."""


@dataclass(frozen=True)
class EndlessRows(Schedule):
    """A schedule without a flush: each worker's first actions, then those that it repeats for each minibatch.

    A line is `0F0,0F1|0F2,0B0`: with one microbatch in a minibatch, F3 and B1 follow. Microbatches are counted from the
    beginning.
    """

    name: ClassVar[str] = NAME
    synchronous: ClassVar[bool] = False
    lines: tuple[str, ...] = ()
    title: str = NAME

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.title)
        super().__post_init__()

    def ahead(self, worker: int) -> int:
        """The number of its forwards before its first backward, minus one."""
        phases = [action.phase for action in islice(self.actions(worker), 1 + len(self.lines[worker]))]
        return max(phases.index("B") - 1, 0) if "B" in phases else 0

    @property
    def filled_by(self) -> int:
        return 1 + max(map(self.ahead, range(self.workers)))

    def actions(self, worker: int, start: int = 0) -> Iterator[Action]:
        first, again = ([*_cells(part, "")] for part in self.lines[worker].split(AGAIN))
        for shift, part in chain([(0, first)], zip(count(0, self.microbatches), repeat(again), strict=False)):
            for _, kind, place in part:
                minibatch, microbatch = divmod(place + shift, self.microbatches)
                yield Action("B" if kind == "I" else cast(Phase, kind), start + minibatch, microbatch)


@dataclass(frozen=True)
class EndlessRowsApart(EndlessRows):
    """The same with separate weight gradients (W)."""

    weights_apart: ClassVar[bool] = True


def endless(schedule: Schedule) -> EndlessRows:
    """A schedule without a flush as rows, checked by the laws.

    Raises:
        ScheduleError: a worker does not soon repeat the same actions, or the rows break a law; or a rank has several
            workers.
    """
    if schedule.several:
        raise schedule.one_worker_on_each_rank(str(list(schedule.placement)))
    period = len(schedule.phases) * schedule.microbatches
    lines = []
    for worker in range(schedule.workers):
        row = [
            (action.phase, action.minibatch * schedule.microbatches + action.microbatch)
            for action in islice(schedule.actions(worker), 2 * (3 * schedule.filling + 4) * period)
        ]
        again = {
            i for i in range(len(row) - period) if row[i + period] == (row[i][0], row[i][1] + schedule.microbatches)
        }
        begin = next((i for i in range(len(row) // 2) if again.issuperset(range(i, len(row) - period))), None)
        if begin is None:
            raise ScheduleError(
                f"schedule '{schedule.name}' has no flush, and worker {worker} does not repeat the same actions after "
                f"{3 * schedule.filling + 4} minibatches",
                hint="begin with some forwards, and then do the same for each minibatch",
            )
        backward = "I" if schedule.weights_apart else "B"
        cells = [f"{worker}{backward if phase == 'B' else phase}{place}" for phase, place in row[: begin + period]]
        lines.append(f"{','.join(cells[:begin])}{AGAIN}{','.join(cells[begin:])}")
    return _endless("\n".join(lines), f"schedule '{schedule.name}'", schedule.name)


def _endless(text: str, where: str, title: str) -> EndlessRows:
    """Raises ScheduleError."""
    lines = text.split()
    again = [[*_cells(line.partition(AGAIN)[2], where)] if line.count(AGAIN) == 1 else [] for line in lines]
    owners = [{of for of, _, _ in _cells(line.replace(AGAIN, ","), where)} for line in lines]
    microbatches = sum(kind == "F" for _, kind, _ in again[0])
    if not all(again) or not microbatches or owners != [{worker} for worker in range(len(lines))]:
        raise ScheduleError(
            f"{where}: a row needs a beginning, a | and the part to repeat", hint="for example 0F0,0F1|0F2,0B0"
        )
    kind = EndlessRowsApart if any(kind == "W" for _, kind, _ in again[0]) else EndlessRows
    schedule = kind(len(lines), microbatches, lines=tuple(lines), title=title)
    play(schedule, read(schedule, 2 * schedule.filling + 2))
    return schedule


def from_csv(text: str, where: str = "the schedule", title: str = NAME) -> RowsOfText | EndlessRows:
    """The schedule that a text describes, which also gives the numbers of workers, microbatches and ranks.

    If it has any W, a B without its own W means both, one after the other; a B with one is an I, as in files of older
    versions of torch. Messages call the text `where`.

    Raises:
        ScheduleError: a cell is not an action, a stage is on two ranks, an action is missing or there twice, actions
            are out of order, or the rows deadlock; the message has the grid with the place marked.
    """
    if AGAIN in text:
        return _endless(text, where, title)
    lines = [line for line in text.splitlines() if line.strip(" ,\t")]
    cells = [list(_cells(line, f"{where}, row {place + 1}")) for place, line in enumerate(lines)]
    if not any(cells):
        raise ScheduleError(f"{where} has no actions", hint=_HINT)
    workers = 1 + max(worker for row in cells for worker, _, _ in row)
    microbatches = 1 + max(j for row in cells for _, _, j in row)
    if workers > MOST_WORKERS or microbatches > MOST_MICROBATCHES:
        what = f"{workers} stages and {microbatches} microbatches"
        raise ScheduleError(
            f"{where} has {what}; at most {MOST_WORKERS} and {MOST_MICROBATCHES} are possible",
            hint="count stages and microbatches from 0",
        )
    placement = _placement(cells, workers, where)
    apart = any(kind in "IW" for row in cells for _, kind, _ in row)
    with_w = {(worker, j) for row in cells for worker, kind, j in row if kind == "W"}
    written = [",".join(_written(row, apart, with_w)) for row in cells]
    kind = RowsOfTextApart if apart else RowsOfText
    schedule = kind(workers, microbatches, tuple(placement), lines=tuple(written), title=title, where=where)
    play(schedule, read(schedule, 1))
    return replace(schedule, where="")


def read_csv(path: str | Path) -> RowsOfText | EndlessRows:
    """The schedule in a file, as `from_csv`.

    Raises:
        ScheduleError: the file cannot be read, or is wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # spreadsheets begin a file with a mark
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"the schedule {path} cannot be read: {error}") from None
    return from_csv(text, f"the schedule {path}")


def to_csv(schedule: Schedule) -> str:
    """The text of a schedule's minibatch, a line for each rank, for torch and for `from_csv`.

    Raises:
        ScheduleError: the schedule has no flush, so its minibatches overlap.
    """
    if not schedule.synchronous:
        raise ScheduleError(
            f"schedule '{schedule.name}' cannot be written as a file: its minibatches overlap",
            hint="use a schedule with a flush, such as 1f1b or interleaved; --synchronous compares only these",
        )
    backward = "I" if schedule.weights_apart else "B"
    rows = (
        ",".join(
            f"{worker}{backward if action.phase == 'B' else action.phase}{action.microbatch}" for worker, action in row
        )
        for row in read(schedule, 1)
    )
    return "\n".join(rows) + "\n"


def _cells(line: str, where: str) -> Iterator[tuple[int, str, int]]:
    """The actions of a row: worker, F, B, I or W, and microbatch.

    Raises:
        ScheduleError: a cell is not an action.
    """
    cells = [cell.strip().strip('"') for cell in line.split(",")]
    for place, cell in enumerate(cells):
        together = _TOGETHER.fullmatch(cell)
        for text in together["inner"].split(";") if together else [cell]:
            match = _CELL.fullmatch(text.strip())
            if match:
                yield int(match["worker"]), match["kind"], int(match["microbatch"])
            elif text.strip() and not _LEFT_OUT.fullmatch(text.strip()):
                shown = [marked(cell) if i == place else cell or ".." for i, cell in enumerate(cells)]
                raise ScheduleError(f"{where}: '{text.strip()[:40]}' is not an action\n  {' '.join(shown)}", hint=_HINT)


def _placement(cells: Sequence[Sequence[tuple[int, str, int]]], workers: int, where: str) -> list[int]:
    """The rank of each worker: the row that has it.

    Refuses a cell that is there twice: what comes after a rank's last action would never be checked.
    """
    placement: dict[int, int] = {}
    seen: set[tuple[int, str, int]] = set()
    for rank, row in enumerate(cells):
        for place, (worker, kind, j) in enumerate(row):
            if placement.setdefault(worker, rank) != rank:
                what = f": stage {worker} is on rank {placement[worker]} and on rank {rank}"
                hint = "put all actions of a stage into one row"
            elif row[place] in seen:
                what, hint = f" is wrong: stage {worker} does {kind}{j} twice", "write every action once"
            else:
                seen.add(row[place])
                continue
            shown = [["".join(map(str, cell)) for cell in other] for other in cells]
            shown[rank][place] = marked(shown[rank][place])
            raise ScheduleError(f"{where}{what}\n{picture(shown, '  rank')}", hint=hint)
    missing = [worker for worker in range(workers) if worker not in placement]
    if missing:
        raise ScheduleError(
            f"{where}: it has stage {workers - 1}, but no stage {missing[0]}", hint="number the stages 0, 1, 2, …"
        )
    return [placement[worker] for worker in range(workers)]


def _written(row: Sequence[tuple[int, str, int]], apart: bool, with_w: set[tuple[int, int]]) -> Iterator[str]:
    """The cells of a row as `to_csv` writes them."""
    for worker, kind, j in row:
        if kind in ("B", "BW") and apart:
            yield f"{worker}I{j}"
            if kind == "BW" or (worker, j) not in with_w:
                yield f"{worker}W{j}"
        else:
            yield f"{worker}{kind[0]}{j}"
