"""What codecs lost in the accuracy study: it decides what `auto` may use, and what compile and run warn of."""

from __future__ import annotations

LOST: dict[tuple[str, str], tuple[float, float]] = {
    ("int8", "gpt"): (0.0000, 0.0189),
    ("int8", "vgg"): (0.0012, 0.0086),
    ("int8", "lstm"): (-0.0002, 0.0167),
    ("int4", "gpt"): (0.0252, 0.0189),
    ("int4", "vgg"): (0.0021, 0.0086),
    ("int4", "lstm"): (0.0079, 0.0167),
}
"""By codec, as in `--codec` for all kinds, and workload of benchmarks/accuracy: the share of the result without a codec
(accuracy, or nats per byte) that was lost, and one standard deviation over the seeds as a share of that result; both
as means over policies and numbers of workers. Negative numbers are gains."""

STUDIED = tuple(dict.fromkeys(codec for codec, _ in LOST))
"""The codecs that were studied, the one with the fewest bytes last."""

KINDS = ("input", "activation", "saved", "gradient")
"""The kinds of edges that the study covers. It has activations and gradients; saved values and inputs are values of the
forward, too. It does not have copies of weights."""


def keeps_the_result(codec: str) -> bool:
    """Whether a codec was studied and lost less than a standard deviation on every workload."""
    return codec in STUDIED and all(lost <= deviation for (name, _), (lost, deviation) in LOST.items() if name == codec)


HARMLESS = tuple(codec for codec in STUDIED if keeps_the_result(codec))
"""What `auto` may use."""


def worst(codec: str) -> tuple[str, float, float]:
    """The workload on which a studied codec lost most standard deviations; the share lost, and one deviation."""
    rows = {workload: row for (name, workload), row in LOST.items() if name == codec}
    workload = max(rows, key=lambda load: rows[load][0] / rows[load][1])
    return workload, *rows[workload]
