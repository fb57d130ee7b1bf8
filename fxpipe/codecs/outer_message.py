"""What a replica that trains separately sends in an outer step, and how many bytes that is."""

from __future__ import annotations

from collections.abc import Mapping

from fxpipe.codecs import codec
from fxpipe.codecs.codec import OUTER
from fxpipe.codecs.packs import EncodedPack, gains
from fxpipe.plan.spec import Plan, TensorSpec


def outer_message(text: str, specs: Mapping[str, TensorSpec]) -> EncodedPack:
    """The message of one replica: each parameter encoded if that saves bytes.

    Raises:
        CodecError: there is no such codec.
    """
    chosen = codec(text)
    return EncodedPack(specs, chosen, [name for name, spec in specs.items() if gains(chosen, spec)], OUTER)


def outer_bytes(plan: Plan, worker: int, text: str) -> float:
    """The bytes that each replica of a worker sends in an outer step with this codec, or with '' for none.

    Without one, R replicas add up vectors, and each sends 2(R − 1)/R of them; else each sends a message to all others.

    Raises:
        CodecError: there is no such codec.
    """
    replicas, trained = plan.replicas_of(worker), {p.name: p.tensor for p in plan.owned(worker) if p.trained}
    if text:
        return (replicas - 1) * outer_message(text, trained).bytes
    return 2 * (replicas - 1) / replicas * sum(spec.bytes for spec in trained.values())
