"""Compiles the model of a run again, for other speeds or another number of workers, in a process of its own.

It is the command that a user would give, `fxpipe compile MODEL --like BUILD --speed 1,0.5`, with what else is known of
the build's own compile. So a build that a run has made is like any other. Imports no torch.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from fxpipe.errors import RunError
from fxpipe.files import remove_abandoned
from fxpipe.plan.build_folder import ENGINES, PLAN, model_path
from fxpipe.plan.plan import Plan
from fxpipe.planner.costs_file import BuildCosts
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.device import links_toml
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.guardian import Guardian

REBALANCED = "rebalanced"
"""The folder in a run's output folder that has the builds which the run has made."""

_LINKS, _SAID = ".toml", ".txt"
"""Endings of files next to a build while it is not used: the links to compile for, and what the compile says."""


def remove_unfinished(out: str) -> None:
    """Remove the builds that a killed run had begun to make and did not use."""
    parent = Path(out) / REBALANCED
    remove_abandoned(parent)
    for path in [*parent.glob(f"*{_LINKS}"), *parent.glob(f"*{_SAID}")]:
        shutil.rmtree(path.with_suffix(""), ignore_errors=True)
        with suppress(OSError):
            path.unlink()


class NewBuild:
    """A compile that has begun, into `folder`, for so many workers, of these speeds if they are not equal.

    Plan and costs are of the build that the run was started with, but `costs.links` are those to compile for. The
    guardian ends the compile if this process is killed.
    """

    def __init__(
        self,
        options: RunOptions,
        plan: Plan,
        costs: BuildCosts,
        workers: int,
        speeds: Sequence[float],
        guardian: Guardian,
    ) -> None:
        self.folder = _free(Path(str(options.out)) / REBALANCED)
        self._links, self._said = (self.folder.with_suffix(ending) for ending in (_LINKS, _SAID))
        model = model_path(plan, options.build, options.model_file)
        command = [
            *(sys.executable, "-m", "fxpipe", "compile", str(model), "--like", options.build),
            *("-o", str(self.folder), "-n", str(workers), "--links", str(self._links)),
            *(() if not speeds else ("--speed", ",".join(f"{speed:.6g}" for speed in speeds))),
            *(() if options.threads is None else ("--threads", str(options.threads))),
            *_as_before(plan, costs),
        ]
        # Under torchrun, the compile is none of the run's processes.
        alone = {name: value for name, value in os.environ.items() if not name.endswith(("RANK", "WORLD_SIZE"))}
        with ExitStack() as failed:
            failed.callback(self._remove)
            _take_over(Path(options.build), self.folder)
            self._links.write_text(links_toml(costs.links))
            with self._said.open("wb") as stderr:
                self._process = subprocess.Popen(
                    command,
                    env=alone,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    start_new_session=True,
                )
            failed.pop_all()
        guardian.guard(self._process.pid)

    def ended(self) -> bool:
        """Whether it has."""
        return self._process.poll() is not None

    def check(self) -> None:
        """Refuse a compile that has failed.

        Raises:
            RunError: says why.
        """
        lines = self._said.read_text(errors="replace").splitlines()
        if self._process.returncode == 0:
            return
        why = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
        raise RunError(why or (lines or ["the compile ended without a word"])[-1], where=str(self.folder))

    def use(self) -> None:
        """The run goes on with it."""
        for file in (self._links, self._said):
            with suppress(OSError):
                file.unlink()

    def give_up(self) -> None:
        """End it, and remove what it has made."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._remove()

    def _remove(self) -> None:
        self.use()
        shutil.rmtree(self.folder, ignore_errors=True)


def _free(parent: Path) -> Path:
    """A folder that is not there yet, with the next number."""
    numbers = [int(path.name) for path in parent.glob("*") if path.name.isdecimal()]
    return parent / str(max(numbers, default=0) + 1)


def _take_over(build: Path, folder: Path) -> None:
    """What a compile needs of the build that it replaces: nodes that were measured are not measured again."""
    folder.mkdir(parents=True)
    for name in (PLAN, "node_costs.json"):
        if (build / name).is_file():
            shutil.copy(build / name, folder)
    if (build / ENGINES).is_dir():
        shutil.copytree(build / ENGINES, folder / ENGINES)


def _as_before(plan: Plan, costs: BuildCosts) -> list[str]:
    """The options of a build's compile that `--like` does not take from it."""
    flags = ["--accept-optimizer-per-worker", "--cost", "measured" if costs.times else "analytic"]
    if plan.device in ("cuda", "mps"):
        flags += ["--device", plan.device]
    if plan.weights.meta:
        flags += ["--meta"]
    if not plan.rows and plan.virtual:
        flags += ["--virtual", str(plan.workers // plan.ranks)]
    flags += _cuts(plan, costs)
    engines = {engine for stage in plan.stages for engine in stage.engines}
    if engines != {"eager"}:
        flags += ["--backend", *(engines if len(engines) == 1 else ("auto",))]
    if costs.memory:
        flags += ["--memory", f"{min(costs.memory):.0f}B"]
    elif any(stage.again for stage in plan.stages):
        flags += ["--recompute", "full"]
    if plan.padding:
        flags += ["--pad-to", str(plan.padding[0].multiple)]
    if plan.microbatches > 1:
        dims = {leaf.name: leaf.dim for leaf in plan.step.given if leaf.tensor}
        flags += ["--microbatch-dims", ",".join(f"{name}={'none' if d is None else d}" for name, d in dims.items())]
    for leaf in plan.step.given:
        flags += ["--constant-batch", leaf.name] if leaf.tensor is None and leaf.read else []
    for name, value in plan.model_file.given.items():
        flags += ["--set", f"{name}={value}"]
    arguments = plan.model_file.given_arguments
    return [*flags, "--", *arguments] if arguments else flags


def _cuts(plan: Plan, costs: BuildCosts) -> list[str]:
    """Which kind of cuts the planner may choose: what it compared, or what was given to it."""
    cuts = Cuts.of(plan)
    modes = {partition.mode for partition in costs.partitions}
    if "three-way" in modes or cuts.weights != cuts.backward:
        return ["--cuts", "three-way"]
    if "bidirectional" in modes:
        return []  # auto compares both
    return ["--cuts", "same" if cuts.forward == cuts.backward else "bidirectional"]
