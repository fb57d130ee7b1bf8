"""How each message of weight copies is written: which parameters are sent whole, and which as differences.

The messages of one owner, one reader and one prediction distance are a stream. A parameter is sent as a difference from
the reader's copy of the last version, if the stream's message of that version had it too and was sent after the
pipeline was last filled:

    version   since   since+1   since+2   since+3 …
              whole    diff      diff      diff

So each stream, and each parameter in it, begins with a whole value. If a policy's prediction distances change, this
costs bytes, but both ends always agree. Version 0, the initial weights, is not sent, since every reader has it, but
differences build on it. After a resume, versions up to the checkpoint's are sent again whole, with the values that the
readers had. No stream depends on where the run ends, so a continued run has the same bits as one that never stopped.

Both ends compute all of this from plan, schedule and policy, as they compute which messages there are (`Demand`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fxpipe.codecs import codec
from fxpipe.codecs.packs import DifferencePack, gains
from fxpipe.plan.spec import TensorSpec
from fxpipe.policy.demand import Demand, WeightMessage

STEADY = 1
"""A version whose messages are like all later ones; only version 0 serves a warm-up."""


@dataclass(frozen=True)
class Filling:
    """When a pipeline was last filled.

    Attributes:
        start: the first minibatch of the segment.
        since: the first minibatch that was not over then, which is also the version of all owners: `start`, or the step
            of the checkpoint that a run resumed from.
    """

    start: int = 0
    since: int = 0


class CopyMessages:
    """What every owner sends its readers, as bytes.

    Raises:
        CodecError: there is no codec with the name in the plan.
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
        """The messages of a version that are sent.

        They are those that an action reads, and those that a later message builds on.

        Args:
            stop: the first minibatch that will not run; None if unknown.
        """
        start, since = filling.start, filling.since
        read = self.demand.messages(owner, reader, version, start, stop, since)
        if self.codec is None or stop is None or version + 1 >= stop:
            return read
        every = self.demand.messages(owner, reader, version, start, None, since)
        if len(every) == len(read):
            return read
        ahead = {message.ahead for message in read}
        for later in self.sent(owner, reader, version + 1, filling, stop):
            if self.differences(owner, reader, version + 1, later.ahead, filling):
                ahead.add(later.ahead)
        return [message for message in every if message.ahead in ahead]

    def kept_up(self, owner: int, reader: int, version: int, filling: Filling) -> list[WeightMessage]:
        """The messages of a version in an endless run: the owner keeps their state even if it does not send them."""
        return self.demand.messages(owner, reader, version, filling.start, None, filling.since)

    def differences(self, owner: int, reader: int, version: int, ahead: int, filling: Filling) -> tuple[str, ...]:
        """The parameters that are sent as differences from the last version."""
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
            rows = [self.demand.parameters[name] for name in names]
            specs: dict[str, TensorSpec] = {row.name: row.tensor for row in rows}
            casts = {row.name: row.cast for row in rows if row.cast and row.name not in self._encoded}
            self._packs[key] = DifferencePack(specs, self.codec, key[1], casts)
        return self._packs[key]

    def base_bytes(self, owner: int, reader: int, version: int, filling: Filling) -> int:
        """The bytes that each end keeps of a version's messages, as the base of the next differences."""
        return sum(
            self.demand.parameters[name].tensor.bytes
            for message in self.kept_up(owner, reader, version, filling)
            for name in self.differences(owner, reader, version + 1, message.ahead, filling)
        )

    def _find_in_stream(self, owner: int, reader: int, version: int, ahead: int, filling: Filling) -> tuple[str, ...]:
        """The parameters of a stream's message of a version; none if there is no such message."""
        every = self.kept_up(owner, reader, version, filling)
        return next((message.names for message in every if message.ahead == ahead), ())
