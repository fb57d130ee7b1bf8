"""One small model through every pass, printed after each: python docs/tutorial/tutorial.py

With --markdown it prints docs/tutorial/README.md; a test holds that page up to date.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import letters
import torch
from page import Page, changes, kept
from torch import nn

import fxpipe
from fxpipe.builds.build import Build
from fxpipe.ir.printer import print_program
from fxpipe.ir.program import Program, info, unit_name
from fxpipe.ir.transform import Applied
from fxpipe.plan.cost_records import WorkerSummary
from fxpipe.planner.cuts import Cuts
from fxpipe.policy import make as make_policy
from fxpipe.policy import sees
from fxpipe.policy.recipe import choose
from fxpipe.schedule import Action, grid
from fxpipe.schedule import make as make_schedule
from fxpipe.task.batch import split

CUTS = Cuts(forward=(0, 4, 7), backward=(0, 1, 7), recompute=((1, 1, 4),))
STEPS = 40


def main(page: Page) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = letters.model()
    data = letters.train_data()

    page.heading("One model through every pass", level=1)
    page.say("""
        This page follows one small model through fxpipe: what every pass does to it, what the workers execute, and
        which weights they see. A program prints the page and checks its claims. Run it, and change it:
    """)
    page.code("python docs/tutorial/tutorial.py")
    page.say("""
        The [glossary](../concepts/README.md) explains the words.
    """)
    page.heading("The model")
    page.say("""
        The model guesses the next letter. A skip connection goes around the convolution, and `embed` and `head` share
        one weight. Both make a model hard to cut.
    """)
    page.code(Path(letters.__file__).read_text(), "python")

    program = captured(page, net, data)
    walk = Walk(page, program)
    cut = {"workers": 2, "schedule": "1f1b", "cuts": CUTS, "split_backward": True, "cost": "analytic"}
    fxpipe.lower(program, **cut, microbatches=1, observers=[walk.show])
    build = fxpipe.lower(program, **cut, microbatches=2)
    planned(page, build)
    ordinary(page, build, net, data)
    asynchronous(page, net, data)
    page.heading("The same from the command line")
    page.code("""
        fxpipe compile docs/tutorial/letters.py -n 2 --fp-cut head --bp-cut mix --schedule 1f1b -o build/ --verify
        fxpipe run build/ --steps 40 --out out/
    """)
    page.say("""
        `--fp-cut head` cuts the forward before the first unit of the module `head`. Without `--fp-cut` and `--bp-cut`
        the [planner](../concepts/planner.md) chooses. `FXPIPE_DUMP=dump` writes such programs for your model. Read on
        in the [how-to pages](../how-to/README.md), or in [concepts](../concepts/README.md).
    """)


def captured(page: Page, net: nn.Module, data: Sequence[Any]) -> Program:
    page.heading("Capture")
    program = fxpipe.capture(net, letters.loss, split(data[0], 2)[0])
    page.say("""
        `fxpipe.capture(model, loss, microbatch)` runs the training step once on fake tensors, which have shapes but no
        numbers. It records every ATen call of forward, loss and backward in one graph. The comment above a group of
        lines gives the phase (F or B), the module and your line. The comment after a line gives the type. Names in
        backward begin with `d_`.

        The table at the top has one row for the tied weight, with both of its names. The skip is visible: the
        convolution and `add` both read `transpose`. Near the end, autograd adds gradients where a value is used twice:
        first for the skip, then for the tied weight.
    """)
    page.code(kept(print_program(program), lambda line: True), "python")
    return program


class Walk:
    """Shows the program after every pass, and that it still computes what eager PyTorch does."""

    def __init__(self, page: Page, program: Program) -> None:
        self.page = page
        self.program = program  # before the pass that is shown
        self.expected = program.run()

    def show(self, applied: Applied) -> None:
        self.page.heading(f"Pass {applied.number}: {applied.step.name}")
        getattr(self, applied.step.name)(applied.program)
        self.program = applied.program

    def fold(self, program: Program) -> None:
        self.page.say("""
            `fold` drops nodes that compute nothing. Autograd detaches the values that it saves; these nodes are gone.
            It also transposes the forward's transposed weight back; now `d_head_mm_1` reads the weight itself. This is
            necessary: backward may see another version of the weights than forward, so it must compute everything from
            the weights that it is given.
        """)
        self.differences(program)
        assert all(torch.equal(a, b) for a, b in zip(self.expected, program.run(), strict=True))
        self.page.say("""
            A program can run after any pass, and passes are tested in this way. Loss and gradients are still the same,
            to the last bit.
        """)

    def keep_layouts(self, program: Program) -> None:
        self.page.say("""
            The program was traced without values, so the memory layout of each value is a prediction. Some calls, such
            as `view`, depend on it. If a kernel might give another layout, this pass adds a `contiguous`, which costs
            nothing if the prediction is right. Here all layouts are certain, as in most models: nothing changes.
        """)
        assert print_program(program) == print_program(self.program)

    def split_backward(self, program: Program) -> None:
        self.page.say("""
            The backward of a convolution makes three gradients in one call. Other workers wait for the gradient of the
            input, but only the optimizer needs that of the weight. After the split, the first does not wait for the
            second. Each call gets an empty tensor instead of the one of which it reads only the layout. This pass
            usually runs only with `--cuts three-way`; here it runs so that you can see it.
        """)
        self.differences(program)

    def units(self, program: Program) -> None:
        self.page.say("""
            `units` numbers the units: the smallest runs of nodes that a cut can separate. A forward node that computes
            something opens a unit. Views stay with the node before them, and the transposed weight (`head_t`) stays
            with its reader. A backward node has the unit of its forward node. A sum has the earliest unit of its
            inputs, so a gradient never goes to a later unit. **W** are the nodes that make only weight gradients.
        """)
        self.page.code("\n".join(line for unit in range(len(program.units)) for line in unit_lines(program, unit)))
        self.page.say("The same in the program, for one unit:")
        self.page.code(kept(print_program(program), lambda line: line.endswith(" u4")), "python")

    def cost(self, program: Program) -> None:
        self.page.say("""
            `cost` gives every node its bytes and its time. Usually `compile` measures times. Here they are computed
            from shapes (`--cost analytic`), so that this page is the same everywhere. Microseconds per unit:
        """)
        self.page.table(("unit", "", "F", "B", "W"), cost_rows(program))

    def cut(self, program: Program) -> None:
        self.page.say("""
            `cut` gives every node its worker. Usually the planner chooses the cuts. Here they are given: forward before
            u4, backward before u1. So u1 to u3 run forward on worker 0 and backward on worker 1. Units cannot be
            halved, but two sets of cuts offer more ways to distribute them.
        """)
        self.page.code(
            "Cuts(forward=(0, 4, 7), backward=(0, 1, 7), recompute=((1, 1, 4),))\n\n" + lanes(program), "python"
        )
        self.page.say("In the program, `w0` and `w1` name the worker. The sum of the skip, in forward and in backward:")
        self.page.code(kept(print_program(program), lambda line: line.startswith(("add =", "d_add ="))), "python")

    def rematerialize(self, program: Program) -> None:
        self.page.say("""
            Backward on worker 1 needs `tanh`, which forward computed on worker 0. Worker 0 could send it. But it sends
            `transpose` in any case, and `tanh` can be computed from that. So `recompute=((1, 1, 4),)` asks worker 1 to
            compute the needed nodes of u1 to u3 again. That saves a message and costs a convolution. The planner
            decides this for every boundary.
        """)
        self.differences(program)

    def comm(self, program: Program) -> None:
        self.page.say("""
            Every value that crosses gets a Send when it exists and a Recv where it is first needed. `batch_1` holds the
            targets, because only worker 0 reads data. `head_view` is the activation at the forward cut, `transpose` the
            saved value. Two gradients go back. `d_add` is the gradient at the backward cut and includes that of the
            skip. `d_head_mm` is the part of `head` in the gradient of the tied weight, which worker 0 owns.
        """)
        self.page.code(kept(print_program(program), lambda line: "send(" in line or "recv(" in line), "python")

    def cast_weights(self, program: Program) -> None:
        self.page.say("""
            `cast_weights` is for steps that compute in 16 bits. Under `--autocast` or `--params`, every call casts the
            weights that it reads: in each microbatch, forward and backward. The pass takes these casts out of the
            program, and whoever gives a stage its weights casts them, once for each version. This model computes in
            float32, so nothing changes.
        """)

    def send_early(self, program: Program) -> None:
        self.page.say("""
            While a backward makes weight gradients, the worker before it waits. `send_early` moves nodes that no sent
            value needs behind the last Send, as long as the function needs no more memory. Here the sum and its Send
            move up, before the gradients of the convolution's weights:
        """)
        self.differences(program)

    def split(self, program: Program) -> None:
        self.page.say("""
            `split` divides the graph into a forward and a backward part for each worker, and lists what goes in and
            out. The forward passes its saved values to the backward of the same microbatch.
        """)
        self.page.code("\n".join(interface(program)))

    def outline(self, program: Program) -> None:
        self.page.say("""
            `outline` finds calls that repeat, such as those of equal blocks: they will be calls of one function of the
            stage. The graphs stay as they are. Nothing in this model repeats;
            [debugging a stage](../how-to/debug.md#reading-a-stage) says how such a stage reads.
        """)

    def codegen(self, program: Program) -> None:
        self.page.say("""
            `codegen` writes each stage as a Python file: plain ATen calls, `comm` where values cross, and `del` after
            the last use. A worker executes this file. All of stage 0:
        """)
        self.page.code(kept(program.files["stage_0.py"], lambda line: True), "python")
        self.page.say("The backward of stage 1, with the forward that it computes again:")
        text = program.files["stage_1.py"]
        self.page.code(kept(text[text.index("def backward") :], lambda line: True), "python")

    def differences(self, program: Program) -> None:
        self.page.code(changes(print_program(self.program), print_program(program)), "diff")


def unit_lines(program: Program, unit: int) -> list[str]:
    """What belongs to a unit, a line for each of F, B and W."""
    rows: dict[str, list[str]] = {"F": [], "B": [], "W": []}
    for node in program:
        if info(node).unit == unit:
            rows["W" if info(node).weight else info(node).phase].append(node.name)
    return [f"u{unit} {unit_name(program.units[unit])}", *(f"   {k}  {', '.join(v)}" for k, v in rows.items() if v)]


def cost_rows(program: Program) -> list[tuple[str, ...]]:
    rows = []
    for unit, path in enumerate(program.units):
        spent = {"F": 0.0, "B": 0.0, "W": 0.0}
        for node in program:
            if info(node).unit == unit:
                spent["W" if info(node).weight else info(node).phase] += info(node).seconds or 0.0
        rows.append((f"u{unit}", unit_name(path), *(f"{seconds * 1e6:.2f}" for seconds in spent.values())))
    return rows


def lanes(program: Program) -> str:
    """The worker of every unit's F and B."""
    assert program.cuts is not None
    width = 11
    names = [f"u{i} {path or '·'}" for i, path in enumerate(program.units)]
    found = ["# unit     " + "".join(name.ljust(width) for name in names)]
    for phase, bounds in (("F", program.cuts.forward), ("B", program.cuts.backward)):
        workers = [sum(unit >= bound for bound in bounds[1:-1]) for unit in range(len(names))]
        found.append(f"# {phase} on     " + "".join(f"worker {worker}".ljust(width) for worker in workers))
    return "\n".join(line.rstrip() for line in found)


def interface(program: Program) -> list[str]:
    lines = []
    for stage in program.stages:
        for part in stage.parts.values():
            spec = part.spec
            lines.append(f"worker {stage.worker} {part.function}")
            rows = {
                "weights": spec.weights,
                "batch": spec.batch,
                "receives": spec.receives,
                "sends": spec.sends,
                "saves" if part.function == "forward" else "saved": spec.saved,
                "gradients": spec.gradients,
                "returns": ("loss",) if spec.loss else (),
            }
            lines += [f"    {title:<10} {', '.join(members)}" for title, members in rows.items() if members]
    return lines


def planned(page: Page, build: Build) -> None:
    page.heading("The plan")
    page.say("""
        `fxpipe.lower` runs these passes and makes the build: the stages, the initial weights and the plan. The plan is
        all that a worker needs to know about the others. The owners of the parameters:
    """)
    page.table(
        ("parameter", "owner", "read by"),
        (
            (", ".join(p.names), f"worker {p.owner}", ", ".join(f"{phase} on worker {w}" for w, phase in p.readers))
            for p in build.plan.parameters
        ),
    )
    page.say("""
        The owner of a parameter is the worker that makes its gradient. The owner of a tied parameter is the worker that
        adds its gradients. It sends a copy after every update to the other workers that read the parameter. For every
        microbatch these values cross (`total_0` is the number of labels in the whole minibatch, over which the loss is
        a mean):
    """)
    page.table(
        ("value", "kind", "from", "to", "bytes"),
        (
            (e.name, e.kind, f"worker {e.src}, {e.src_phase}", f"worker {e.dst}, {e.dst_phase}", e.tensor.bytes)
            for e in build.plan.edges
        ),
    )
    page.table(
        ("", "owns", "copies", "saved a microbatch", "in flight"), (worker_row(worker) for worker in build.workers)
    )


def worker_row(worker: WorkerSummary) -> tuple[str, ...]:
    return (
        f"worker {worker.rank}",
        f"{worker.owned}: {worker.owned_bytes} B",
        f"{worker.copies}: {worker.copy_bytes} B",
        f"{worker.saved_bytes} B",
        f"at most {worker.in_flight}",
    )


def ordinary(page: Page, build: Build, net: nn.Module, data: Sequence[Any]) -> None:
    page.heading("Training, with a flush")
    page.say("""
        A schedule is the order of actions on every worker. `F1.1` is the forward of minibatch 1, microbatch 1; at `..`
        the worker waits. `1f1b` empties the pipeline before every update (a flush), so every minibatch sees the weights
        after all earlier updates. That is ordinary training. Here all workers run in this process:
    """)
    page.code(grid(make_schedule("1f1b", workers=2, microbatches=2), minibatches=2))
    pipeline = build.local(optimizer=letters.optimizer)
    losses = pipeline.run(data[:STEPS])
    eager = copy.deepcopy(net)
    expected = eagerly(eager, data[:STEPS])
    page.table(
        ("step", "loss of the pipeline", "loss of eager PyTorch"),
        ((i + 1, f"{losses[i]:.3f}", f"{expected[i]:.3f}") for i in (0, 9, 19, 39)),
    )
    trained = eager.state_dict()
    worst = max((value - trained[name]).abs().max().item() for name, value in pipeline.state_dict().items())
    assert worst < 1e-5
    page.say(f"""
        After {STEPS} steps, no weight differs by more than 10⁻⁵ from that of eager PyTorch. The small differences come
        from rounding: two half batches are summed in another order than the whole batch.
    """)


def eagerly(net: nn.Module, data: Sequence[Any]) -> list[float]:
    """The usual training loop."""
    optimizer = letters.optimizer(list(net.named_parameters()))
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = letters.loss(net, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def asynchronous(page: Page, net: nn.Module, data: Sequence[Any]) -> None:
    page.heading("Training without a flush")
    build = fxpipe.compile(net, letters.loss, data[0], workers=2, cuts=CUTS, cost="analytic", schedule="async")
    page.say("""
        At a flush, workers wait. `async` has no flush, and after the start no worker waits. The price is stale weights:
        when worker 0 runs `F2`, it has not made the update of minibatch 1 yet. `F2@1` is the forward of minibatch 2
        with the weights after one update. The policy `latest` takes the newest weights, so forward and backward of one
        minibatch see different ones:
    """)
    schedule = make_schedule("async", workers=2)
    page.code(sees(make_policy("latest"), schedule, minibatches=4))
    page.say("""
        `spectrain`, the default, predicts weights. `F2@1+1` sees the weights after one update, moved one update further
        along the optimizer's momentum.
    """)
    page.code(sees(make_policy("spectrain"), schedule, minibatches=4))
    page.say("""
        These grids show each worker's own weights. Weight copies follow the same rule with their own versions. Under
        `spectrain`, forward and backward of a later minibatch m see these weights:
    """)
    page.table(("action", "weights", "owner", "sees"), seen(build, minibatch=9))
    rows = {policy: trained(build, data, policy) for policy in ("stash", "spectrain")}
    page.say("""
        The owner predicts before it sends, so a reader needs no optimizer state. To measure the gain of prediction,
        compare the weights that a forward used with those to which its update was applied. The distance is the root
        mean square of the difference. `stash` uses the old weights as they are.
    """)
    page.table(
        ("policy", "loss of the first 5 steps", "of the last 5", "distance of worker 0's weights"),
        ((policy, *row) for policy, row in rows.items()),
    )


def seen(build: Build, minibatch: int) -> list[tuple[str, ...]]:
    """What each action reads, as plan, schedule and policy say: workers negotiate nothing at run time."""
    demand = choose(build.plan, "async", "spectrain").demand
    rows = []
    for worker in range(build.plan.workers):
        for phase in ("F", "B"):
            for reading in demand.readings(worker, phase):
                action = Action(phase, minibatch)
                version = demand.version(reading, action, 0)
                ahead = demand.ahead(reading, action, version)
                behind = minibatch - version
                text = f"version m{f' − {behind}' if behind else ''}{f', predicted {ahead} ahead' if ahead else ''}"
                owner = f"worker {reading.owner}" + (": a copy" if reading.owner != worker else "")
                rows.append((f"{phase} on worker {worker}", ", ".join(reading.names), owner, text))
    return rows


def trained(build: Build, data: Sequence[Any], policy: str) -> tuple[str, ...]:
    pipeline = build.local(optimizer=letters.optimizer, policy=policy, log_staleness=True)
    losses = pipeline.run(data)
    (stale,) = [row for row in pipeline.staleness() if row["worker"] == 0]
    return (f"{sum(losses[:5]) / 5:.2f}", f"{sum(losses[-5:]) / 5:.2f}", f"{stale['rmse']:.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", action="store_true", help="print the page docs/tutorial/README.md")
    main(Page(parser.parse_args().markdown))
