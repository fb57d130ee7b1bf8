"""The accuracy of asynchronous pipeline training, by policy and by codec, beside synchronous training: README.md."""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from journal import Journal
from plots import draw
from pool import results
from published import published
from study import FULL, METHODS, QUICK, Job, Study
from summary import summarize, write_summary
from tables import tables, write_between_markers
from training import NONE, Run
from workloads import WORKLOADS

from fxpipe.threads import cores

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def main() -> int:
    """Run what is missing, then make result.json, plots and tables; the committed ones with --publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small study, in minutes")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, metavar="WORKLOAD", help=", ".join(WORKLOADS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD", help=", ".join(METHODS))
    parser.add_argument("--codecs", action="store_true", help="run the codecs alone, at rates that are known already")
    parser.add_argument("--jobs", type=int, default=cores(), help="processes, of one thread each; default: the cores")
    parser.add_argument("--out", type=Path, help="working folder; default: build-accuracy, or build-accuracy-quick")
    parser.add_argument("--report", action="store_true", help="run nothing: plots and tables of what is there")
    parser.add_argument("--publish", action="store_true", help="of the full study, also here, – where a run is missing")
    options = parser.parse_args()
    study = QUICK if options.quick else FULL
    if options.only:
        study = study.only(options.only)
    if options.methods:
        study = study.of(options.methods)
    if options.codecs:
        study = study.of_codecs()
    out = options.out or ROOT / ("build-accuracy-quick" if options.quick else "build-accuracy")
    journal = Journal(out / "results.jsonl")
    if not options.quick:
        journal.begin_with(published(HERE / "result.json", FULL))
    failed = 0
    if not options.report:
        try:
            failed = run(study, journal, options.jobs)
        except KeyboardInterrupt:
            print(f"\nstopped; the same command goes on from {journal.path}", file=sys.stderr)
            return 130
    report(study, journal, [out, HERE] if options.publish and study == FULL else [out])
    return 1 if failed else 0


def run(study: Study, journal: Journal, processes: int) -> int:
    """Run all jobs that have no result yet, grid by grid; how many failed."""
    failed: set[Job] = set()
    grids = (*study.grids, *study.codecs)
    for number, grid in enumerate(grids, start=1):
        # The best rate of the first seed is that of the others: so there are new jobs once it is known.
        while missing := [job for job in grid.runs(journal) if job not in journal and job not in failed]:
            failed |= _run(missing, journal, processes, f"grid {number} of {len(grids)}")
    failed |= _run([job for job in study.once() if job not in journal], journal, processes, "checks")
    return len(failed)


def _run(jobs: Sequence[Job], journal: Journal, processes: int, what: str) -> set[Job]:
    print(f"{what}: {len(jobs)} jobs in {processes} processes", flush=True)
    begin, failed = time.monotonic(), set()
    for done, (job, result, error) in enumerate(results(jobs, min(processes, len(jobs) or 1)), start=1):
        if result is None:
            failed.add(job)
            print(f"{job} failed:\n{error}", file=sys.stderr)
        else:
            journal.add(job, result)
        left = (time.monotonic() - begin) / done * (len(jobs) - done)
        print(f"{done}/{len(jobs)}  {_clock(left)} left  {_line(job, result)}", flush=True)
    return failed


def report(study: Study, journal: Journal, folders: Sequence[Path]) -> None:
    """Result, plots and tables into these folders."""
    summary = summarize(study, journal)
    text = tables(summary)
    for folder in folders:
        write_summary(summary, folder / "result.json")
        draw(summary, folder / "plots")
        if folder == HERE:
            write_between_markers(text, HERE / "README.md")
        else:
            (folder / "tables.md").write_text(text)
    print(f"written: {', '.join(str(folder) for folder in folders)}")


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


def _line(job: Job, result: dict[str, object] | None) -> str:
    if not isinstance(job, Run) or result is None:
        return f"{type(job).__name__} {job.workload} {job.optimizer}"
    said = f"diverged at step {result['diverged']}" if "diverged" in result else f"{result['final']:.4f}"
    method = f"{job.method} N={job.workers} M={job.microbatches} rate {job.rate:g} seed {job.seed}"
    method += "" if job.codec == NONE else f" {job.codec}"
    return f"{job.workload} {job.optimizer} {method}: {said} in {result['seconds']:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
