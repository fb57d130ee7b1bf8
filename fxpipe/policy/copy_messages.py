"""How each message of weight copies is written: which parameters travel whole, and which as differences.

The messages of one owner, one reader and one prediction distance are a stream. A parameter travels as a difference to
what the reader made of the version before, if the stream's message of that version held it too and was sent after the
pipeline was last filled:

    version   since   since+1   since+2   since+3 …
              whole    diff      diff      diff

So each stream, and each parameter in it, begins whole where it begins, and a policy whose predictions come and go costs
bytes, never agreement. Version 0, the initial weights that every reader has, is not sent, but differences build on it.
After a resume, what is sent again of versions up to the checkpoint's is whole, in the values that the readers had. No
stream depends on where the run ends: a run can be made longer with the bits of one that was never shorter.

Both ends compute all of this from plan, schedule and policy, as they do who sends what (`Demand`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fxpipe.codecs import codec
from fxpipe.codecs.difference_pack import DifferencePack, gains
from fxpipe.plan.spec import TensorSpec
from fxpipe.policy.demand import Demand, WeightMessage

STEADY = 1
"""A version whose messages are like those of all later ones; only the first version serves a warm-up."""


@dataclass(frozen=True)
class Filling:
    """When a pipeline was last filled.

    Attributes:
        start: the minibatch that the segment began with.
        since: the first minibatch that was not over then, and the version of all owners: `start`, or the step of the
            checkpoint that a run went on from.
    """

    start: int = 0
    since: int = 0


class CopyMessages:
    """What every owner sends its readers, as bytes.

    Raises:
        CodecError: there is no codec of the plan's name.
    """

    def __init__(self, demand: Demand) -> None:
        self.demand = demand
        plan = demand.plan
        self.codec = codec(plan.weights_codec) if plan.weights_codec else None
        self._encoded = frozenset(
            p.name for p in plan.parameters if p.trained and self.codec is not None and gains(self.codec, p.tensor)
        )
        self._packs: dict[tuple[tuple[str, ...], tuple[str, ...]], DifferencePack] = {}
        self._in_stream = lru_cache(maxsize=256)(self._find_in_stream)

    def sent(self, owner: int, reader: int, version: int, filling: Filling, stop: int | None) -> list[WeightMessage]:
        """The messages of a version that are sent if `stop` is the first minibatch that never comes, None if unknown.

        They are those that an action reads, and those without which a later one could not be read.
        """
        start, since = filling.start, filling.since
        read = self.demand.messages(owner, reader, version, start, stop, since)
        if self.codec is None or stop is None or version + 1 >= stop:
            return read
        every = self.demand.messages(owner, reader, version, start, None, since)
        if len(every) == len(read):
            return read
        wanted = {message.ahead for message in read}
        for later in self.sent(owner, reader, version + 1, filling, stop):
            if self.differences(owner, reader, version + 1, later.ahead, filling):
                wanted.add(later.ahead)
        return [message for message in every if message.ahead in wanted]

    def kept_up(self, owner: int, reader: int, version: int, filling: Filling) -> list[WeightMessage]:
        """The messages of a version in a run without an end: what the owner follows, whether it sends them or not."""
        return self.demand.messages(owner, reader, version, filling.start, None, filling.since)

    def differences(self, owner: int, reader: int, version: int, ahead: int, filling: Filling) -> tuple[str, ...]:
        """The parameters that travel as differences to the version before."""
        if self.codec is None or version <= filling.since:
            return ()
        before = set(self._in_stream(owner, reader, version - 1, ahead, filling))
        names = self._in_stream(owner, reader, version, ahead, filling)
        return tuple(name for name in names if name in before and name in self._encoded)

    def pack(self, owner: int, reader: int, version: int, ahead: int, filling: Filling) -> DifferencePack:
        """How a message is written."""
        names = self._in_stream(owner, reader, version, ahead, filling)
        key = names, self.differences(owner, reader, version, ahead, filling)
        if key not in self._packs:
            specs: dict[str, TensorSpec] = {name: self.demand.parameters[name].tensor for name in names}
            self._packs[key] = DifferencePack(specs, self.codec, key[1])
        return self._packs[key]

    def base_bytes(self, owner: int, reader: int, version: int, filling: Filling) -> int:
        """What each of both ends keeps of the messages of a version for the differences of the next."""
        return sum(
            self.demand.parameters[name].tensor.bytes
            for message in self.kept_up(owner, reader, version, filling)
            for name in self.differences(owner, reader, version + 1, message.ahead, filling)
        )

    def _find_in_stream(self, owner: int, reader: int, version: int, ahead: int, filling: Filling) -> tuple[str, ...]:
        """The parameters of a stream's message of a version; none if there is no such message."""
        every = self.kept_up(owner, reader, version, filling)
        return next((message.names for message in every if message.ahead == ahead), ())
