"""What `fxpipe compile` says of the build that it has written: facts as JSON, and the same in a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property

from fxpipe.builds.build import Build
from fxpipe.cli.output import echo, note, print_columns, warn
from fxpipe.cli.terminal.overview import print_schedules
from fxpipe.codecs.accuracy_warnings import not_studied, used_by
from fxpipe.errors import listed
from fxpipe.inspection import sentences, tables
from fxpipe.inspection.facts import build_facts
from fxpipe.inspection.subject import subject_of
from fxpipe.inspection.table import Json
from fxpipe.inspection.workers import again_text, partition_rows, worker_rows
from fxpipe.lowering.agreement import Agreement
from fxpipe.lowering.codec_effect import CodecEffect
from fxpipe.lowering.own_rounding import rounding_text
from fxpipe.messages import plain
from fxpipe.observe.rates import samples_of
from fxpipe.plan.cost_records import WorkerSummary
from fxpipe.policy.recipe import choose
from fxpipe.schedule import of_plan
from fxpipe.schedule.graph import graph_text
from fxpipe.simulator.of_build import forecast, late_instead

MOST_SHOWN = 4
"""How many of the compared schedules are shown: the best one and the next three."""


@dataclass(frozen=True)
class WrittenBuild:
    """A build, and what was tried on it."""

    build: Build
    out: str  # its folder
    device: str | None  # the device that its costs were computed for; None for the default one
    agreement: Agreement | None  # with eager PyTorch; None if it was not verified
    effect: CodecEffect | None  # of its codecs on a step; None if it was not verified, or has none

    @property
    def samples(self) -> int:
        """Of a minibatch."""
        return samples_of(self.build.plan)

    @cached_property
    def staleness(self) -> sentences.Staleness:
        recipe = choose(self.build.plan)
        return sentences.staleness_of(recipe.policy, recipe.demand.versions)

    @cached_property
    def facts(self) -> Json:
        """One object of plain JSON."""
        plan, costs, facts = self.build.plan, self.build.costs, build_facts(subject_of(self.build))
        simulation, modules = forecast(plan, costs), [*plan.step.units, None]  # None: the cut is at the end
        whole = ("outer", "outer_step", "microbatch_loss", "shapes", "padding")
        tried = {"verify": self.agreement, "codec_effect": self.effect}
        return {
            "out": self.out,
            **{name: facts[name] for name in ("schedule", "policy", "microbatches")},
            "dp": plan.dp,
            **{name: facts[name] for name in whole},
            "forward_cuts": [modules[stage.forward_units[0]] for stage in plan.stages[1:]],
            "backward_cuts": [modules[stage.backward_units[0]] for stage in plan.stages[1:]],
            "weight_cuts": [modules[stage.weight_units[0]] for stage in plan.stages[1:]],
            "partitions": {partition.mode: partition.efficiency for partition in costs.partitions},
            "moved_bytes": {partition.mode: partition.moved for partition in costs.partitions},
            "cuts": facts["cuts"],
            "cuts_refused": facts["cuts_refused"],
            "forecast": {
                "samples_per_second": simulation.samples_per_second(facts["samples"]),
                "milliseconds": 1e3 * simulation.seconds_per_minibatch,
                "bubble": simulation.bubble,
            },
            "staleness": asdict(self.staleness),
            "evaluation": facts["evaluation"],
            "workers": [_milliseconds(worker) for worker in costs.workers],
            "times": [
                {**asdict(measured), "nodes": [w.time.forward, w.time.backward + w.time.weight]}
                for measured, w in zip(costs.times, costs.workers, strict=False)
            ],
            "engines": [asdict(time) for time in costs.engines],
            "codecs": sentences.codec_facts(plan, costs),
            "warnings": list(self.build.warnings),
            "schedules": [asdict(row) for row in costs.schedules],
            **{name: asdict(result) for name, result in tried.items() if result is not None},
        }

    def show(self, facts: Json) -> None:
        """Tables of the workers, engines and schedules, then a line for each fact that a user may not expect."""
        plan, costs = self.build.plan, self.build.costs
        print_columns(tables.workers({"workers": worker_rows(subject_of(self.build))}), whole=True)
        if costs.engines:
            print_columns(tables.engines(costs.engines), whole=True)
            echo()
            for reason in sentences.engines_left_out(costs.engines):
                note(reason)
        if costs.schedules:
            print_schedules(costs.schedules, self.samples, MOST_SHOWN)
        for line in (self._recipe(), *sentences.microbatch_lines(plan), *sentences.shape_lines(plan), *self._costs()):
            echo(line)
        if facts["outer_step"]:
            echo(sentences.outer_text(facts["outer_step"]))
        if facts["codecs"]:
            self._show_codecs(facts["codecs"])
        if self.agreement is not None:
            self._show_agreement(self.agreement)
        if self.effect is not None:
            name, error = self.effect.worst
            echo(
                f"codecs change the loss of this batch by {self.effect.loss:.1e}, its gradients by "
                f"{self.effect.gradients:.1e} (most: {plain(name)}, {error:.1e})"
            )
        if plan.weights.meta:
            echo("weights: none (--meta); a run calls model() to make them on each worker, or reads --weights")
        if plan.evaluations:
            echo(sentences.evaluation_text(facts["evaluation"]))
        echo(f"wrote {self.out}: {', '.join(s.file for s in plan.stages)}, plan.json, weights.safetensors")

    def _recipe(self) -> str:
        plan = self.build.plan
        parts = [plan.schedule, plan.policy, f"{plan.microbatches} microbatch{'es' if plan.microbatches > 1 else ''}"]
        parts += [f"{plan.dp} replicas of each worker"] if plan.dp > 1 else []
        parts += [] if plan.outer is None else [str(plan.outer)]
        parts += [f"{listed([str(count) for count in plan.replicas])} replicas"] if plan.crossing else []
        return " · ".join([*parts, f"{len(plan.edges)} edges"])

    def _costs(self) -> Iterator[str]:
        """The order of workers, the cuts, and how fast a run is expected to be."""
        plan, costs, expected = self.build.plan, self.build.costs, self.facts["forecast"]
        schedule = of_plan(plan)
        if text := graph_text(schedule.after):
            yield text
        if not schedule.synchronous:
            yield f"staleness: {self.staleness}"
        if costs.partitions:
            rows = partition_rows(costs.partitions)
            yield f"cuts: {sentences.cuts_text(self.facts['cuts'], rows, self.facts['cuts_refused'])}"
        if again := again_text(costs):
            yield again
        if not costs.times:
            yield f"costs: computed{'' if self.device is None else f' for {self.device}'}, not measured"
        yield f"forecast: {expected['samples_per_second']:.1f} samples/s, bubble {100 * expected['bubble']:.0f} %"
        if faster := late_instead(plan, costs, expected["milliseconds"] / 1e3):
            name, seconds = faster
            yield (
                f"updates wait for sums over replicas: with --schedule {name}, one update later, "
                f"{self.samples / seconds:.1f} samples/s"
            )

    def _show_codecs(self, codecs: Json) -> None:
        text = sentences.codec_text(codecs)
        if codecs["plain_seconds"] and codecs["seconds"]:
            rates = [self.samples / codecs[key] for key in ("seconds", "plain_seconds")]
            text += "; by the operators' costs {:.1f} samples/s, {:.1f} without codecs and cut for that".format(*rates)
        echo(text)
        if unknown := not_studied(used_by(self.build.plan)):
            note(unknown)

    def _show_agreement(self, agreement: Agreement) -> None:
        plan, (name, error) = self.build.plan, agreement.worst_gradient
        if agreement.not_compared:
            note(f"loss and gradients were not compared: {agreement.not_compared}")
        if agreement.not_finite:
            warn(f"infinite or NaN in eager PyTorch too, so only partly compared: {listed(agreement.not_finite, 6)}")
        if agreement.rounding:
            note(rounding_text(agreement))
        for text in agreement.notes:
            note(text)
        if agreement.zero:
            note(f"zero for the example batch in eager PyTorch: the gradients of {listed(agreement.zero, 6)}")
        plainly = ", without codecs" if self.effect else ""
        if plan.loss.batch_norm and plan.microbatches > 1:
            plainly += f", with batch norm on microbatches of {self.samples // plan.microbatches}"
        echo(
            f"against eager PyTorch{plainly}: loss {agreement.loss:.1e}, "
            f"largest gradient error {error:.1e} ({plain(name)}), "
            f"largest buffer error {max(agreement.buffers.values(), default=0.0):.1e}"
            + (f", largest metric error {max(agreement.metrics.values()):.1e}" if agreement.metrics else "")
        )


def _milliseconds(worker: WorkerSummary) -> Json:
    """The worker's record with times in milliseconds, under names that say so."""
    times = ("forward", "backward", "weight", "update", "again")
    return {f"{n}_ms" if n in times else n: 1e3 * v if n in times else v for n, v in asdict(worker).items()}
