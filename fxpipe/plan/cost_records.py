"""What a build costs, in records: workers, stages, optimizer, edges, engines. `costs.json` keeps most of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from fxpipe.plan.spec import FUNCTIONS, Phase


@dataclass(frozen=True)
class PartMemory:
    """What one function of a stage holds, for one microbatch, in bytes; without weights and buffers.

    Attributes:
        taken: what the function before it has left for it.
        received: what it receives, which is there before it begins.
        left: what it leaves for the next one.
        sent: what it sends and does not leave: the transport holds it until it has been received.
        shared: what it sends and leaves, too.
        peak: the most that it holds at once, `taken`, `received` and `batch` at its start included.
        peak_unreceived: the same while the transport holds what of `taken` was sent.
        batch: the tensors of the batch that it is given; they stay until it returns.
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


@dataclass(frozen=True)
class WorkerSummary:
    """One worker, as the compiler estimates it from the costs of its nodes.

    Attributes:
        forward, backward, weight: seconds a microbatch. `backward` leaves out what makes only weight gradients: that is
            `weight`, of the units `weight_units`.
        update: seconds a minibatch.
        begins: the module paths where its forward and its backward begin.
        bytes_in, bytes_out: a minibatch's: every edge once for each microbatch, copies of weights once.
        owned_bytes, copy_bytes: of parameters: owned here; copies of those of other workers, or frozen, and what
            is kept at both ends for encoded differences to build on.
        saved_bytes: what forward keeps for backward, once for each microbatch in flight.
        in_flight: of how many microbatches it keeps saved or deferred values at once.
        memory_bytes: the most that it holds at once (`fxpipe/simulator/memory.py`).
        deferred_bytes: what backward keeps for weight gradients, where these are apart; None where they are not.
        again: of `backward` and `weight`, seconds a microbatch in which they compute values of the worker's own forward
            again because memory is short.
        spared_bytes: what its forward saves less for that.
        parts: what its functions hold, in their order.
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
        """Its times, by this estimate."""
        if self.deferred_bytes is None:
            return StageTime(self.forward, self.backward + self.weight, self.update)
        return StageTime(self.forward, self.backward, self.update, self.weight)


@dataclass(frozen=True)
class StageTime:
    """One worker's times, in seconds.

    Attributes:
        forward, backward: of one microbatch. If measured: the mean over the microbatches of a minibatch, and of these
            the lower quartile over minibatches, because other work of the machine only ever adds time. Of many
            microbatches, some represent all: the first, which also predicts weights and begins the sum of gradients,
            and some of the others.
        update: once a minibatch, after its last action: keeping copies, the optimizer's step, packing weight copies.
        weight: of one microbatch's weight gradients, where they are an action of their own; else part of `backward`.
    """

    forward: float
    backward: float
    update: float = 0.0
    weight: float = 0.0

    @property
    def microbatch(self) -> float:
        """Of one microbatch, all of it but the update."""
        return self.forward + self.backward + self.weight

    def of(self, phase: Phase) -> float:
        """Of one microbatch in a phase."""
        return {"F": self.forward, "B": self.backward, "W": self.weight}[phase]


@dataclass(frozen=True)
class PolicyTimes:
    """What a policy does to the weights that a worker owns, in seconds for each byte of them.

    Attributes:
        prediction: one prediction by the optimizer's own rule, and what that must remember of an update.
        repetition: one prediction that repeats the last update (`weight_form`), and remembering that.
        feedback: error feedback of one update.
    """

    prediction: float = 0.0
    repetition: float = 0.0
    feedback: float = 0.0


@dataclass(frozen=True)
class StepMemory:
    """What an optimizer's step holds while it runs, beside weights, gradients and state.

    Attributes:
        of_largest: bytes for each byte of the largest parameter, of an optimizer that goes from parameter to parameter.
        of_all: bytes for each byte of all that it trains, of one that takes them together.
        keeps_update: a policy that predicts by this optimizer's rule remembers the last update.
    """

    of_largest: float = 0.0
    of_all: float = 0.0
    keeps_update: bool = False


@dataclass(frozen=True)
class OptimizerCosts:
    """What a model's optimizer costs.

    Attributes:
        state_bytes: of its state, for each byte of trained parameters.
        seconds_per_byte: of its step, for each byte of trained parameters.
        momentum: each of its groups has momentum, by its options.
        policy: what policies do to the weights that it trains.
        step: what its step holds while it runs.
        doubt: one sentence for a warning, if the optimizer could not be tried and the costs are assumed; else None.
    """

    state_bytes: float
    seconds_per_byte: float
    momentum: bool = False
    policy: PolicyTimes = field(default_factory=PolicyTimes)
    step: StepMemory = field(default_factory=StepMemory)
    doubt: str | None = None


UNKNOWN = OptimizerCosts(0.0, 0.0)
"""Of an optimizer that is not known yet."""


@dataclass(frozen=True)
class EdgeTiming:
    """One edge of the plan.

    Attributes:
        made: the share of its source's F or B, by time, that is over when the value is sent.
        needed: the share of its destination's F or B that is over when the value is waited for.
        places: of its send, and of its wait, among all sends and waits of the F or B, from 0: those at the same share
            come in that order.
    """

    name: str
    made: float
    needed: float
    places: tuple[int, int]


@dataclass(frozen=True)
class CodecTimes:
    """What a codec takes, in seconds for each byte of the value that it packs or unpacks."""

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
    """One schedule that was compared, with the best cuts that were found for it, as simulated.

    Attributes:
        cuts: the kind of its cuts: 'same', 'bidirectional', 'three-way' or 'pinned'; '' where nothing fits.
        seconds: of a minibatch; None where nothing fits, or the schedule is refused.
        bubble: the share of the workers' time in which they are not busy.
        memory_bytes: of the worker that holds most; of one that does not fit, what that worker would need.
        enough_bytes: where nothing fits, the memory of every worker that would be enough; None if they have different
            memories.
        staleness: how many updates a forward misses at most.
        why: what it loses, and why; '' of the one that was taken.
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
