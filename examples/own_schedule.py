"""A schedule of your own: the order of actions on every worker, in one class and one line before it.

`eager-1f1b` is such a schedule. This file is a script that compares it with 1F1B over links of some latency, by the
simulator, and a model file with which a compile knows it; the build then holds its rows. From the repository's root:

    python examples/own_schedule.py

    fxpipe compile examples/own_schedule.py -n 2 --schedule eager-1f1b --microbatches 8 -o build/
    fxpipe run build/
"""

from itertools import count
from typing import ClassVar

from digits import eval_data, loss, metrics, model, optimizer, train_data

from fxpipe import schedule
from fxpipe.plan.cost_records import StageTime
from fxpipe.planner.links import Links
from fxpipe.schedule.action import Action
from fxpipe.simulator.scenario import Message, Scenario
from fxpipe.simulator.simulate import simulate, steady_minibatches

__all__ = ["eval_data", "loss", "metrics", "model", "optimizer", "train_data"]  # what makes this a model file

WORKERS = 4
MICROBATCHES = 8


@schedule.register
class Eager1F1B(schedule.Schedule):
    """1F1B that begins with twice as many forwards, so that a message has the time of a microbatch to arrive.

        worker 0: F0   F0.1 F0.2 F0.3 ..   B0   ..   B0.1 ..   B0.2 ..   B0.3
        worker 1: ..   F0   F0.1 F0.2 B0   F0.3 B0.1 ..   B0.2 ..   B0.3
        worker 2: ..   ..   F0   B0   F0.1 B0.1 F0.2 B0.2 F0.3 B0.3

    Worker k of N begins with 2(N−1−k) forwards, and holds what that many have saved.
    From: Zhuang et al. 2023, arXiv 2211.05322.
    """

    name: ClassVar[str] = "eager-1f1b"
    synchronous: ClassVar[bool] = True  # each minibatch sees all updates before it

    def actions(self, worker, start=0):
        ahead = min(self.microbatches, 2 * (self.workers - 1 - worker))
        for minibatch in count(start):
            for microbatch in range(ahead):
                yield Action("F", minibatch, microbatch)
            for microbatch in range(self.microbatches):
                if microbatch + ahead < self.microbatches:
                    yield Action("F", minibatch, microbatch + ahead)
                yield Action("B", minibatch, microbatch)


def seconds(name, latency):
    """What a minibatch takes on equal workers, by the simulator."""
    made = schedule.make(name, WORKERS, MICROBATCHES)
    workers = tuple(StageTime(forward=1e-3, backward=2e-3) for _ in range(WORKERS))
    pairs = [(worker, worker + 1) for worker in range(WORKERS - 1)]
    messages = [Message(a, "F", b, "F", 1e3) for a, b in pairs] + [Message(b, "B", a, "B", 1e3) for a, b in pairs]
    scenario = Scenario(workers, tuple(messages), links=Links(latency=latency))
    return simulate(made, scenario, steady_minibatches(made)).seconds_per_minibatch


def main():
    """Print its grid, then what a minibatch takes next to 1F1B, over slower and slower links."""
    print(schedule.grid(schedule.make("eager-1f1b", WORKERS, MICROBATCHES), minibatches=1), end="\n\n")
    print(f"ms a minibatch on {WORKERS} workers, forwards of 1 ms and backwards of 2 ms\n")
    print(f"{'latency':<10}{'1f1b':>8}{'eager-1f1b':>12}")
    for latency in (0.0, 0.5e-3, 1e-3, 2e-3):
        plain, eager = (1e3 * seconds(name, latency) for name in ("1f1b", "eager-1f1b"))
        print(f"{1e3 * latency:>4g} ms   {plain:>8.1f}{eager:>12.1f}")


if __name__ == "__main__":
    main()
