"""The head of the page: the build's settings, its key numbers, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.inspection.table import Json, count, number, plural, share, size, text
from fxpipe.runtime.options import SHOWN
from fxpipe.schedule.graph import graph_text


def elsewhere(facts: Json) -> str:
    """` under gpipe · latest` if that is shown instead of the build's own schedule and policy; else empty."""
    shown, build = facts["forecast"] or facts["grid"], facts["build"]
    pair = shown["schedule"], shown["policy"]
    return "" if pair == (build["schedule"], build["policy"]) else f" under {pair[0]} · {pair[1]}"


def settings(build: Json) -> list[tuple[str, str]]:
    """How the build was compiled."""
    names = ["schedule", "policy", "cuts", "microbatches", "samples", "autocast", "params", "codec", "device"]
    names += ["costs", "torch"]
    labels = {"samples": "samples a minibatch"}
    unset = {"autocast": None, "params": None, "codec": "none"}
    model_settings = [(f"setting {name}", text(row["value"])) for name, row in build["settings"].items()]
    shown = [(labels.get(name, name), text(build[name])) for name in names if build[name] != unset.get(name, "")]
    name, _, order = graph_text(tuple(map(tuple, build["graph"]))).partition(": ")
    shown += [(name, order)] if order else []
    return shown + model_settings + ([("arguments", " ".join(build["arguments"]))] if build["arguments"] else [])


def run_settings(run: Json) -> list[tuple[str, str]]:
    """How the build was run, as far as known, and the results."""
    forms = {
        "folder": text, "steps": count, "samples": count, "seconds": number, "transport": text, "device": text,
        "throttle": text, "threads": count, **dict.fromkeys(SHOWN, text),
    }  # fmt: skip
    rows = [(name, run.get(name), form) for name, form in forms.items()]
    rows += [(f"setting {name}", value, text) for name, value in (run.get("settings") or {}).items()]
    scaling = run.get("loss_scaling") or {}
    rows += [("loss scale", scaling.get("scale"), number), ("steps skipped", scaling.get("skipped_steps"), count)]
    held_out = [(f"held out {name}", value, number) for name, value in (run.get("evaluation") or {}).items()]
    labels = {"samples": "samples a step"}
    named = [(labels.get(name, name.replace("_", " ")), value, form) for name, value, form in rows] + held_out
    return [(name, form(value)) for name, value, form in named if value is not None]


def key_figures(facts: Json) -> Iterator[tuple[str, str, str]]:
    """The key numbers: a name, the measured value or else the forecast, and the forecast next to a measured value."""
    forecast, run, other = facts["forecast"] or {}, facts["run"] or {}, elsewhere(facts)
    rate, samples = run.get("samples_per_second"), run.get("samples")
    pairs = [
        ("samples a second", rate, forecast.get("samples_per_second"), number),
        (
            "milliseconds a minibatch",
            1e3 * samples / rate if rate and samples else None,
            forecast.get("milliseconds"),
            number,
        ),
        ("bubble", run.get("bubble"), forecast.get("bubble"), share),
    ]
    for name, measured, planned, form in pairs:
        if measured is not None:
            yield name, form(measured), "" if planned is None else f"forecast{other} {form(planned)}"
        elif planned is not None:
            yield f"{name}, forecast{other}", form(planned), ""
    if run.get("efficiency"):
        yield "full pipeline: measured over forecast", share(run["efficiency"]), ""
    if run.get("tokens_per_second"):
        yield "tokens a second", number(run["tokens_per_second"]), ""
    if run.get("mfu"):
        yield "model FLOPs utilisation", share(run["mfu"]), ""
    elif run.get("tflops_per_device"):
        yield "TFLOP/s a device", number(run["tflops_per_device"]), ""
    for partition in facts["partitions"]:
        if partition["chosen"]:
            yield f"balance{other}: ideal over slowest worker", share(partition["efficiency"]), ""
    fullest = max((w["memory_bytes"] or 0 for w in facts["workers"]), default=0)
    if fullest:
        yield f"memory of the fullest worker{other}", size(fullest), ""
    crossing = sum(edge["bytes"] or 0 for edge in facts["edges"] if edge["kind"] != "weights")
    yield "crosses workers, a microbatch", size(crossing), ""


def placement(units: list[Json]) -> str:
    """One sentence on how many units run on more than one worker."""
    several = sum(bool(unit["apart"]) for unit in units)
    if not several:
        return "Every unit runs forward and backward on the same worker."
    of = f"{plural(several, 'unit')} of {count(len(units))}"
    if any(unit["weights"] != unit["backward"] for unit in units):
        return (
            f"{of} {'does' if several == 1 else 'do'} not run forward, backward and weight gradients all on one worker."
        )
    return f"{of} {'runs' if several == 1 else 'run'} forward on one worker and backward on another."


def warnings(facts: Json) -> list[str]:
    """What is wrong with the build and the run."""
    build, run = facts["build"], facts["run"] or {}
    return [
        *(f"Edited: {file} was changed after compiling. What it does may differ from what is shown."
          for file in build["edited"]),
        *(f"Stale: since this was compiled, {what}." for what in build["stale"]),
        *(f"Run: {problem}" for problem in run.get("problems", ())),
    ]  # fmt: skip
