"""Damages files and arguments, seeded, and runs the command line on them: `python fuzzing.py FOLDER SEED CASES`.

One process runs all cases, because importing torch takes longer than most of them. It prints a JSON object: how many
cases there were of each kind and exit code, and each case that ended otherwise than by a value or an error with its
place and a hint.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

EVALUATED = """

def eval_data():
    return train_data()


def metrics(model, batch):
    return {"loss": loss(model, batch)}
"""
SECONDS = 60
"""A case that takes longer hangs."""
MEMORY = 6 << 30
"""Bytes that a case may take on top: a number in a file must not decide how much memory is asked for."""
DEEP = "[" * 100_000
STRANGE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 10**9, -(10**9), 10**30, 0.5, -0.5, 1e-320, 1e308, float("nan"),
    float("inf"), "", "x", "0", "inf", "..", "../x", "/etc/passwd", "a\0b", "\x1b]0;x\x07", "\u202e", "x" * 5000,
    "float32", "eager", "inductor", "async", "F", [], [[]], [0], [1, 1], ["x"], {}, {"x": 1}, {"0": []},
)  # fmt: skip
ARGUMENTS = (
    "", "0", "1", "2", "-1", "3", "1e999", "nan", "inf", "-inf", "1e-400", "0x10", "9" * 400, "1000000000", "x", "..",
    "/", "/dev/null", "/nonexistent/x", "x" * 5000, "a\nb", "\x1b[31mred", "\u202e", "\udcff", "1,1", "1,,1", ",", "=",
    "stash+x", "+", "1GB/s", "1 parsec", "-", "--", "*", "async", "blocks.1", "blocks", "$HOME", "%s", "{}", "'", '"',
)  # fmt: skip


class Hang(BaseException):
    """A case took too long."""


def damaged(body: Any, rng: random.Random) -> Any:
    """A copy in which one value is strange, missing, one too many, or that of another place."""
    body = copy.deepcopy(body)
    if not isinstance(body, (dict, list)) or not body:
        return rng.choice(STRANGE)
    place, key = _somewhere(body, rng)
    kind = rng.random()
    if kind < 0.1:
        del place[key]
    elif kind < 0.15 and isinstance(place, dict):
        place["unheard_of"] = 1
    elif kind < 0.25 and isinstance(place, list):
        place.insert(rng.randrange(len(place) + 1), copy.deepcopy(place[key]))
    elif kind < 0.3 and isinstance(place, list):
        rng.shuffle(place)
    elif kind < 0.5:
        other, there = _somewhere(body, rng)
        place[key] = copy.deepcopy(other[there])
    elif kind < 0.6 and isinstance(place[key], (int, float)) and not isinstance(place[key], bool):
        place[key] += rng.choice((-1, 1, 10, -10))
    else:
        place[key] = rng.choice(STRANGE)
    return body


def _somewhere(body: Any, rng: random.Random) -> tuple[Any, Any]:
    place, key = body, rng.choice(list(body) if isinstance(body, dict) else range(len(body)))
    while isinstance(place[key], (dict, list)) and place[key] and rng.random() < 0.85:
        place = place[key]
        key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
    return place, key


def damaged_bytes(content: bytes, rng: random.Random, head: int | None = None) -> bytes:
    """A byte flipped, a piece cut off, put in, doubled; or nothing left.

    Args:
        head: so many first bytes are damaged more often than the rest.
    """
    kind = rng.random()
    if not content or kind < 0.03:
        return rng.choice((b"", b"null", b"[]", b"{}", b"\xff\xfe", b"\0", DEEP.encode(), b'{"a":' + DEEP.encode()))
    at = rng.randrange(min(len(content), head) if head and rng.random() < 0.7 else len(content))
    if kind < 0.2:
        return content[:at]
    if kind < 0.7:
        return content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]
    if kind < 0.8:
        return content[:at] + rng.randbytes(rng.randrange(1, 9)) + content[at:]
    end = min(len(content), at + rng.randrange(1, 200))
    return content[:at] + content[end:] if kind < 0.9 else content[:end] + content[at:]


def _json(content: bytes, rng: random.Random) -> bytes:
    """Of a JSON file: values more often than bytes."""
    if rng.random() < 0.2:
        return damaged_bytes(content, rng)
    body = json.loads(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        body = damaged(body, rng)
    return json.dumps(body).encode()


def _plan(content: bytes, rng: random.Random) -> bytes:
    """Of a plan, which is signed again afterwards."""
    from fxpipe.plan.signed import signed

    if rng.random() < 0.05:
        return _json(content, rng)
    body = json.loads(content)
    body.pop("digest")
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        body = damaged(body, rng)
    if not isinstance(body, dict):
        return json.dumps(body).encode()
    return signed(body).encode()


def _lines(content: bytes, rng: random.Random) -> bytes:
    """Of a file with a JSON object a line."""
    if rng.random() < 0.3:
        return damaged_bytes(content, rng)
    lines = content.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    text = lines[at].strip().rstrip(b",")
    try:
        lines[at] = _json(text, rng) + lines[at][len(text) :]
    except ValueError:  # the first or the last line of a trace
        lines[at] = damaged_bytes(lines[at], rng)
    return b"".join(lines)


def _tensors(content: bytes, rng: random.Random) -> bytes:
    """Of a safetensors file: its header more often than its data."""
    size = 8 + int.from_bytes(content[:8], "little")
    if rng.random() < 0.5:
        return damaged_bytes(content, rng, size)
    text = _json(content[8:size], rng)  # most with a digest that is no longer right
    if rng.random() < 0.5:
        body = json.loads(content[8:size])
        body.pop("__metadata__", None)  # as another program writes it
        text = _json(json.dumps(body).encode(), rng)
    return len(text).to_bytes(8, "little") + text + content[size:]


@dataclass(frozen=True)
class Kind:
    """A kind of case.

    Attributes:
        file: what is damaged, relative to the folder; None damages the arguments.
        damage: how.
        commands: those that read it.
    """

    file: str | None
    damage: Callable[[bytes, random.Random], bytes]
    commands: tuple[tuple[str, ...], ...]
    weight: float = 1.0


LOOK = (
    ("inspect", "build"),
    ("inspect", "build", "--json"),
    ("inspect", "build", "--stage", "1"),
    ("inspect", "build", "--node", "first.weight"),
    ("inspect", "build", "--schedule", "1f1b"),
    ("inspect", "build", "--html", "page.html"),
    ("diff", "build", "other"),
    ("diff", "other", "build", "--json"),
)
RUN = (("run", "build", "--local", "--steps", "1", "--out", "fresh"),)
OLD_RUN = (
    ("compare", "run", "second"),
    ("compare", "second", "run", "--json"),
    ("inspect", "build", "--run", "run"),
    ("inspect", "build", "--run", "run", "--html", "page.html"),
)
WEIGHTS = (("run", "build", "--local", "--steps", "1", "--out", "fresh", "--weights", "weights"),)
EXPORT = ("export", "build", "-o", "onnx", "--weights", "initializers", "--trained", "run/model.safetensors")
PLANS = (
    ("plan", "profile.json", "-n", "2"),
    ("plan", "profile.json", "-n", "3", "--json"),
    ("plan", "profile.json", "-n", "2", "--microbatches", "1,4", "--schedule", "1f1b"),
)
OTHER_MACHINE = (
    ("plan", "model.py", "-n", "2", "--device-spec", "machine.toml"),
    ("plan", "profile.json", "-n", "2", "--links", "links.toml"),
)
KINDS = (
    Kind("build/plan.json", _plan, (*LOOK, *RUN, *RUN), 6),
    Kind("build/costs.json", _json, (*LOOK, *RUN), 2),
    Kind("build/program.json", _json, LOOK, 2),
    Kind("build/profile.json", _json, LOOK, 1),
    Kind("build/passes.txt", damaged_bytes, LOOK, 0.3),
    Kind("build/stage_0.py", damaged_bytes, (*LOOK, *RUN), 1),
    Kind("build/weights.safetensors", _tensors, (*RUN, EXPORT), 0.7),
    Kind("run/run.json", _json, OLD_RUN, 2),
    Kind("run/metrics.jsonl", _lines, OLD_RUN, 1),
    Kind("run/trace.json", _lines, OLD_RUN, 2),
    Kind("run/model.safetensors", _tensors, (EXPORT,), 0.3),
    Kind("weights/model-1.safetensors", _tensors, WEIGHTS, 1),
    Kind("weights/model.safetensors.index.json", _json, WEIGHTS, 1),
    Kind("profile.json", _json, PLANS, 2),
    Kind("vgg.txt", damaged_bytes, (("plan", "vgg.txt", "-n", "2"),), 0.5),
    Kind("machine.toml", damaged_bytes, OTHER_MACHINE[:1], 0.7),
    Kind("links.toml", damaged_bytes, OTHER_MACHINE[1:], 0.7),
    Kind(None, damaged_bytes, (*LOOK, *RUN, *OLD_RUN, *WEIGHTS, *PLANS, *OTHER_MACHINE, ("explain", "item")), 5),
)


def prepare(folder: Path) -> None:
    """Everything that the commands read, in `folder`."""
    from model_files import write_model

    model = write_model(folder)
    quick = ("--cost", "analytic", "--threads", "1")
    model.write_text(model.read_text() + EVALUATED)
    _must(folder, "compile", "model.py", "-o", "build", "--save-profile", "profile.json", *quick)
    _must(folder, "compile", "model.py", "-o", "other", "--fp-cut", "blocks.1", "--bp-cut", "blocks.2", *quick)
    for name in ("run", "second"):
        more = ("--trace", f"{name}/trace.json", "--log-staleness") if name == "run" else ()
        (folder / name).mkdir()
        _must(folder, "run", "build", "--local", "--steps", "4", "--out", name, *more)
    (folder / "weights").mkdir()
    shutil.copy(folder / "run" / "model.safetensors", folder / "weights" / "model-1.safetensors")
    content = (folder / "weights" / "model-1.safetensors").read_bytes()
    names = [n for n in json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]) if n != "__metadata__"]
    index = {"metadata": {"total_size": len(content)}, "weight_map": dict.fromkeys(names, "model-1.safetensors")}
    (folder / "weights" / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "machine.toml").write_text(
        '[device]\nflops = {float32 = "10T", bfloat16 = "100T"}\nbandwidth = "1TB/s"\n\n'
        '[links]\nbandwidth = "10GB/s"\nlatency = "10us"\n'
    )
    (folder / "links.toml").write_text('[links]\nbandwidth = [[0, "1GB/s"], ["2GB/s", 0]]\nlatency = "10us"\n')
    (folder / "vgg.txt").write_text(
        "node1 -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=0.0, "
        "parameter_size=0.000\n"
        "node2 -- Conv2d -- forward_compute_time=2.0, backward_compute_time=4.0, activation_size=100.0, "
        "parameter_size=7168.000\n"
        "node3 -- ReLU -- forward_compute_time=1.0, backward_compute_time=1.0, activation_size=100.0, "
        "parameter_size=0.000\n\tnode1 -- node2\n\tnode2 -- node3\n"
    )


def _must(folder: Path, *arguments: str) -> None:
    code, out, err = invoke(folder, arguments)
    assert code == 0, (arguments, out, err)


def invoke(folder: Path, arguments: Sequence[str]) -> tuple[int, str, str]:
    """Run a command in this process; its exit code and what it wrote."""
    from fxpipe.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(arguments))
        except SystemExit as stopped:
            code = stopped.code if isinstance(stopped.code, int) else 1
    return code, out.getvalue(), err.getvalue()


def arguments_damaged(arguments: Sequence[str], rng: random.Random) -> list[str]:
    """The arguments of a command, one or two of them strange, left out, or options of the command put in."""
    from fxpipe.cli.main import cli

    command, *rest = arguments
    for _ in range(rng.choice((1, 1, 2))):
        kind = rng.random()
        at = rng.randrange(len(rest) + 1)
        if kind < 0.3 and rest:
            rest[at % len(rest)] = rng.choice(ARGUMENTS)
        elif kind < 0.35 and rest:
            del rest[at % len(rest)]
        elif kind < 0.4:
            rest.insert(at, rng.choice(ARGUMENTS))
        else:
            options = [o for o in cli.commands[command].params if o.opts[0].startswith("-")]
            if not options:
                continue
            option = rng.choice(options)
            choices = getattr(option.type, "choices", ())
            value = rng.choice(tuple(choices)) if choices and rng.random() < 0.5 else rng.choice(ARGUMENTS)
            rest += [rng.choice(option.opts)] + ([] if getattr(option, "is_flag", False) else [str(value)])
    return [command, *rest]


def too_long(arguments: Sequence[str]) -> bool:
    """Whether a case asks for work that takes long, and may."""
    text = " ".join(arguments)
    if any(f"{flag} 1000000000" in text for flag in ("--steps", "--epochs")) or "--epochs 3" in text:
        return True
    return arguments[0] == "run" and ("--local" not in arguments or "--steps 1" not in text)


def cases(seed: int, count: int) -> Iterator[tuple[Kind, random.Random]]:
    rng = random.Random(seed)
    for _ in range(count):
        (kind,) = rng.choices(KINDS, [k.weight for k in KINDS])
        yield kind, random.Random(rng.random())


def explained(code: int, err: str, arguments_changed: bool) -> str | None:
    """What is wrong with how a command ended; None if nothing is."""
    if "Traceback (most recent call last)" in err or "a defect of fxpipe" in err:
        return "a traceback"
    if code == 0:
        return None
    if code == 2:
        return None if arguments_changed and re.search(r"^Error: .*", err, re.MULTILINE) else "wrong usage"
    if code != 1:
        return f"exit code {code}"
    error = err[err.rfind("error: ") :]
    if "error: " not in err:
        return "exit code 1 without an error"
    if "\n  at: " not in error:
        return "an error without a place"
    if "\n  hint: " not in error:
        return "an error without a hint"
    return None


def run_cases(folder: Path, seed: int, count: int) -> dict[str, Any]:
    """Run them; gives the counts and the failures."""
    prepare(folder)
    for arguments in dict.fromkeys(command for kind in KINDS for command in kind.commands):
        _must(folder, *arguments)  # undamaged, all of them end well: what the cases find is of the damage
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    counts: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    for number, (kind, rng) in enumerate(cases(seed, count)):
        arguments, path = list(rng.choice(kind.commands)), folder / (kind.file or "")
        if kind.file is None:
            arguments = arguments_damaged(arguments, rng)
            if too_long(arguments):
                continue
        else:
            path.write_bytes(kind.damage(before[path], rng))
        begin = time.monotonic()
        wrong, code, err = _guarded(folder, arguments, kind.file is None)
        counts[f"{kind.file or 'arguments'}: exit {code}"] += 1
        if wrong is not None:
            damage = None if kind.file is None else _difference(before[path], path.read_bytes())
            failures.append(
                {"case": number, "wrong": wrong, "arguments": arguments, "file": kind.file, "code": code,
                 "damage": damage, "error": err[-1500:], "seconds": round(time.monotonic() - begin, 1)}
            )  # fmt: skip
        _restore(folder, before)
    return {"counts": dict(counts), "failures": failures}


def _guarded(folder: Path, arguments: Sequence[str], changed: bool) -> tuple[str | None, int, str]:
    """Run a command that may do anything: what is wrong with how it ended, its exit code and its stderr."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        code, _, err = invoke(folder, arguments)
    except Hang:
        return "it hangs", -1, traceback.format_exc()
    except BaseException as error:
        return f"{type(error).__name__} escaped", -1, traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return explained(code, err, changed), code, err


def _difference(old: bytes, new: bytes) -> str:
    """Where two texts begin to differ."""
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    return f"at {at}: {old[max(at - 30, 0) : at + 40]!r} became {new[max(at - 30, 0) : at + 40]!r}"


def _restore(folder: Path, before: dict[Path, bytes]) -> None:
    """Put back what was damaged, and remove what was made."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file() and path not in before:
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    for path, content in before.items():
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def main() -> None:
    folder, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    import torch

    torch.set_num_threads(1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    with tempfile.TemporaryDirectory() as home:
        tempfile.tempdir = home
        print(json.dumps(run_cases(folder, seed, count), indent=1, default=repr))


if __name__ == "__main__":
    main()
