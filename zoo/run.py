"""`make zoo`: checks the zoo's models and recipes, each in a process of its own, and writes docs/reference/coverage.md.

What is done is kept in .zoo/results.jsonl: a model is checked again only if its file, fxpipe, the check or a library it
needs has changed. Interrupted, it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from check import Row
from coverage_page import page, tables, verdict
from families import FILE_OF, FILES, FOLDER, RECIPES, ZOO, Recipe, ZooModel

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = ROOT / ".zoo" / "results.jsonl"
PAGE = ROOT / "docs" / "reference" / "coverage.md"
SECONDS = 600
MEMORY = 16 * 2**30  # bytes of data of one check
LIBRARIES = ("torchvision", "timm", "transformers", "diffusers", "peft", "pytorch_optimizer")
TABLE: dict[str, ZooModel | Recipe] = {**ZOO, **RECIPES}


def main() -> int:
    """Exit code 0 if every model asked for has passed or is refused as its entry says."""
    asked = _arguments()
    names = [name for name in TABLE if re.search(asked.only, name)]
    if not names:
        print(f"no model's name matches {asked.only!r}; there are {', '.join(TABLE)}", file=sys.stderr)
        return 2
    known = known_rows()
    todo = [name for name in names if name not in known]
    if len(todo) < len(names):
        print(f"{len(names) - len(todo)} of {len(names)} are known already: {RESULTS}", file=sys.stderr)
    try:
        known |= check_all(todo, asked.jobs)
    except KeyboardInterrupt:
        print("\ninterrupted; `make zoo` goes on from here", file=sys.stderr)
        return 130
    kinds = {name: entry.kind for name, entry in TABLE.items()}
    rows = [known[name] for name in names]
    print(tables(rows, kinds))
    if len(known) == len(TABLE):
        PAGE.write_text(page([known[name] for name in TABLE], kinds, versions(LIBRARIES)), encoding="utf-8")
        print(f"\nwrote {PAGE.relative_to(ROOT)}")
    else:
        missing = len(TABLE) - len(known)
        print(f"\n{PAGE.relative_to(ROOT)} is left as it is: {missing} other models are not checked with this code")
    text, good = verdict(rows)
    print(text)
    return 0 if good else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check the models of the zoo.")
    parser.add_argument("--only", default="", metavar="REGEX", help="names to check, e.g. 'llama|t5|swin_t|unet'")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="models at a time (default 2)")
    return parser.parse_args()


def check_all(names: Sequence[str], jobs: int) -> dict[str, Row]:
    """Check models, `jobs` at a time; each row is kept as soon as it is there.

    Raises:
        KeyboardInterrupt: those that run have ended, those that wait are dropped.
    """
    rows: dict[str, Row] = {}
    pool = ThreadPoolExecutor(max(1, jobs))
    waiting = [pool.submit(check_apart, TABLE[name]) for name in names]
    try:
        for number, future in enumerate(as_completed(waiting), 1):
            row, seconds = future.result()
            rows[row.name] = row
            _keep(row)
            said = f"{number}/{len(names)} {row.name}: {row.status}, {seconds:.0f} s"
            print(said + (f": {row.reason}" if row.status == "failed" else ""), file=sys.stderr, flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    return rows


def check_apart(entry: ZooModel | Recipe) -> tuple[Row, float]:
    """A model's row from a process of its own, and the seconds that this took."""
    if reason := entry.missing():
        return Row(entry.name, "failed", reason), 0.0
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fxpipe_zoo_") as folder:
        file, log = Path(folder) / "row.json", Path(folder) / "log"
        process = _processes().Process(target=_check, args=(entry.name, file, log))
        process.start()
        process.join(SECONDS)
        late = process.is_alive()
        process.kill()
        process.join()
        if late:
            row = Row(entry.name, "failed", f"took more than {SECONDS} s")
        elif file.is_file():
            row = Row(**json.loads(file.read_text(encoding="utf-8")))
        else:
            code = process.exitcode or 0
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:] if log.is_file() else []
            ended = f"killed by signal {-code}" if code < 0 else f"ended with code {code}"
            row = Row(entry.name, "failed", ": ".join([ended, *last]))
    return row, time.perf_counter() - start


@functools.cache
def _processes() -> Any:
    """Processes that are forked from one that has torch and fxpipe loaded: to import them takes as long as a model."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    return context


def _check(name: str, file: Path, log: Path) -> None:
    """In the model's process: leave its row in `file`, and what it says in `log`."""
    import torch
    from check import check
    from check_recipe import Workers, check_recipe

    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    entry = TABLE[name]
    if isinstance(entry, Recipe):
        with Workers(multiprocessing.get_context("fork")) as workers:
            row = check_recipe(entry, workers)
    else:
        row = check(entry)
    file.write_text(json.dumps(dataclasses.asdict(row)), encoding="utf-8")


def _keep(row: Row) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    line = {"digest": digest(TABLE[row.name]), **dataclasses.asdict(row)}
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def known_rows() -> dict[str, Row]:
    """The newest row of every model that was checked as it and the code are now, but for those that failed."""
    found: dict[str, Row] = {}
    for line in RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.is_file() else ():
        fields = json.loads(line)
        name, made_of = fields["name"], fields.pop("digest")
        if name in TABLE and made_of == digest(TABLE[name]):
            found[name] = Row(**fields)
    return {name: row for name, row in found.items() if row.status != "failed"}


@functools.cache
def digest(entry: ZooModel | Recipe) -> str:
    """Of all that a model's row depends on."""
    recipes = [HERE / "check_recipe.py", *sorted(FOLDER.glob("recipe*.py"))]  # they share models and batches
    own = recipes if isinstance(entry, Recipe) else [FILE_OF[entry.name]]
    return _digest(own, common_digest(), versions(set(LIBRARIES) & set(entry.needs)))


@functools.cache
def common_digest() -> str:
    """Of fxpipe's sources, the check's and what the files of the table share."""
    shared = [f for f in sorted(FOLDER.glob("*.py")) if f.stem not in (*FILES, "__init__") and not f.match("recipe*")]
    code = [f for folder in ("fxpipe", "passes") for f in sorted((ROOT / folder).rglob("*.py"))]
    return _digest([*code, *shared, HERE / "check.py"], "", versions(()))


def _digest(files: Sequence[Path], more: str, libraries: Mapping[str, str]) -> str:
    made = hashlib.sha256(f"{more} {json.dumps(libraries)}".encode())
    for file in files:
        made.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return made.hexdigest()[:16]


def versions(libraries: Sequence[str] | set[str]) -> dict[str, str]:
    """torch's version and those of the libraries that are installed."""
    found = {}
    for name in ("torch", *sorted(libraries)):
        try:
            found[name] = importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
