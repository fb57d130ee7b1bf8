"""The costs of a build, in records: workers, stages, optimizer, edges, engines. `costs.json` has most of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from fxpipe.plan.spec import FUNCTIONS, Phase


@dataclass(frozen=True)
class PartMemory:
    """The memory of one function of a stage, for one microbatch, in bytes; without weights and buffers.

    Attributes:
        taken: what the previous function has left for it.
        received: what it receives, which exists before it begins.
        left: what it leaves for the next function.
        sent: what it sends and does not leave: the transport holds it until it is received.
        shared: what it sends and leaves, too.
        peak: the most that it holds at once, `taken`, `received` and `batch` at its start included.
        peak_unreceived: the same while the transport holds what of `taken` was sent.
        batch: the batch's tensors in its arguments; they stay until it returns.
        inside: the most of what it makes itself that it holds at once; `results` of these bytes are there when it ends.
    """

    phase: Phase
    taken: int
    received: int
    left: int
    sent: int
    shared: int
    peak: int
    peak_unreceived: int
    batch: int = 0
    inside: int = 0
    results: int = 0

    @property
    def arguments(self) -> int:
        """Bytes of what it reads and does not make, but weights and buffers."""
        return self.taken + self.received + self.batch


@dataclass(frozen=True)
class WorkerSummary:
    """One worker, as the compiler estimates it from the costs of its nodes.

    Attributes:
        forward, backward, weight: seconds a microbatch. `backward` leaves out nodes that make only weight gradients:
            these are `weight`, of the units `weight_units`.
        update: seconds a minibatch.
        begins: the module paths where its forward and its backward begin.
        bytes_in, bytes_out: for a minibatch: every edge once for each microbatch, copies of weights once.
        owned_bytes, copy_bytes: of parameters: those owned here; copies of other workers' or of frozen ones, and what
            both ends keep as the base of encoded differences.
        saved_bytes: what forward keeps for backward, once for each microbatch in flight.
        in_flight: the number of microbatches whose saved or deferred values it keeps at once.
        memory_bytes: the most that it holds at once (`fxpipe/simulator/memory.py`).
        deferred_bytes: what backward keeps for separate weight gradients; None if they are not separate.
        again: seconds a microbatch, within `backward` and `weight`, for computing values of the worker's own forward
            again to save memory.
        spared_bytes: the saved bytes that this avoids.
        parts: the memory of its functions, in their order.
    """

    rank: int
    forward_units: tuple[int, int]
    backward_units: tuple[int, int]
    weight_units: tuple[int, int]
    begins: tuple[str, str]
    forward: float
    backward: float
    weight: float
    update: float
    owned: int
    owned_bytes: int
    copies: int
    copy_bytes: int
    bytes_in: int
    bytes_out: int
    saved_bytes: int
    in_flight: int
    memory_bytes: int
    deferred_bytes: int | None = None
    again: float = 0.0
    spared_bytes: int = 0
    parts: tuple[PartMemory, ...] = ()

    @property
    def time(self) -> StageTime:
        """Its estimated times."""
        if self.deferred_bytes is None:
            return StageTime(self.forward, self.backward + self.weight, self.update)
        return StageTime(self.forward, self.backward, self.update, self.weight)


@dataclass(frozen=True)
class StageTime:
    """One worker's times, in seconds.

    Attributes:
        forward, backward: of one microbatch. If measured: the mean over the microbatches of a minibatch, and of these
            the lower quartile over minibatches, because other work of the machine only ever adds time. With many
            microbatches, only some are timed: the first, which also predicts weights and begins the sum of gradients,
            and some of the others.
        update: once a minibatch, after its last action: keeping copies, the optimizer's step, packing weight copies.
        weight: of one microbatch's weight gradients, if they are a separate action; else part of `backward`.
    """

    forward: float
    backward: float
    update: float = 0.0
    weight: float = 0.0

    @property
    def microbatch(self) -> float:
        """The time of one microbatch, without the update."""
        return self.forward + self.backward + self.weight

    def of(self, phase: Phase) -> float:
        """The time of one microbatch in a phase."""
        return {"F": self.forward, "B": self.backward, "W": self.weight}[phase]


@dataclass(frozen=True)
class PolicyTimes:
    """A policy's work on the weights that a worker owns, in seconds per byte of them.

    Attributes:
        prediction: one prediction by the optimizer's own rule, and remembering what it needs of an update.
        repetition: one prediction that repeats the last update (`weight_form`), and remembering that update.
        repairs: of one update, for each repair its name and the seconds; one that the optimizer refuses is missing.
    """

    prediction: float = 0.0
    repetition: float = 0.0
    repairs: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class StepMemory:
    """The memory of an optimizer's step while it runs, in addition to weights, gradients and state.

    Attributes:
        of_largest: bytes per byte of the largest parameter, for an optimizer that steps one parameter at a time.
        of_all: bytes per byte of all its parameters, for one that steps them together.
        keeps_update: a policy that predicts by this optimizer's rule remembers the last update.
    """

    of_largest: float = 0.0
    of_all: float = 0.0
    keeps_update: bool = False


@dataclass(frozen=True)
class OptimizerCosts:
    """The costs of a model's optimizer.

    Attributes:
        state_bytes: of its state, per byte of trained parameters.
        seconds_per_byte: of its step, per byte of trained parameters.
        momentum: each of its groups has momentum, by its options.
        policy: the policies' work on the weights that it trains.
        step: the memory of its step while it runs.
        doubt: one sentence for a warning, if the optimizer could not be tried and the costs are assumed; else None.
    """

    state_bytes: float
    seconds_per_byte: float
    momentum: bool = False
    policy: PolicyTimes = field(default_factory=PolicyTimes)
    step: StepMemory = field(default_factory=StepMemory)
    doubt: str | None = None


UNKNOWN = OptimizerCosts(0.0, 0.0)
"""The costs of an optimizer that is not known yet."""


@dataclass(frozen=True)
class EdgeTiming:
    """One edge of the plan.

    Attributes:
        made: the share of its source's F or B, by time, that is over when the value is sent.
        needed: the share of its destination's F or B that is over when the value is waited for.
        places: of its send and of its wait among all sends and waits of the F or B, from 0; the order of those at the
            same share.
    """

    name: str
    made: float
    needed: float
    places: tuple[int, int]


@dataclass(frozen=True)
class CodecTimes:
    """The time of a codec, in seconds per byte of the value that it packs or unpacks."""

    pack: float = 0.0
    unpack: float = 0.0


@dataclass(frozen=True)
class EngineTime:
    """One part of a stage on one engine.

    Attributes:
        seconds: of one call, the median; None if the engine is left out.
        ratio: over eager's time, the median of the rounds' ratios.
        error: largest relative error against the emitted code.
        build: seconds to make it ready.
        reason: why the engine is left out.
        chosen: whether the plan takes it.
    """

    worker: int
    phase: Phase
    engine: str
    seconds: float | None = None
    ratio: float | None = None
    error: float | None = None
    build: float = 0.0
    reason: str = ""
    chosen: bool = False

    @property
    def part(self) -> str:
        """`stage_0.forward`."""
        return f"stage_{self.worker}.{FUNCTIONS[self.phase]}"


@dataclass(frozen=True)
class ScheduleForecast:
    """One simulated schedule, with the best cuts found for it.

    Attributes:
        cuts: the kind of its cuts: 'same', 'bidirectional', 'three-way' or 'pinned'; '' if nothing fits.
        seconds: of a minibatch; None if nothing fits, or the schedule is refused.
        bubble: the share of the workers' time in which they are not busy.
        memory_bytes: of the worker that holds most; if it does not fit, what that worker would need.
        enough_bytes: if nothing fits, the memory of every worker that would be enough; None if workers have different
            memories.
        staleness: how many updates a forward misses at most.
        why: what it loses, and why; '' for the chosen one.
    """

    schedule: str
    policy: str
    microbatches: int
    cuts: str = ""
    seconds: float | None = None
    bubble: float = 0.0
    memory_bytes: float = 0.0
    enough_bytes: float | None = None
    staleness: int = 0
    why: str = ""
