"""JSON files (and TOML): checked against a type when read, and written so that every reader accepts them.

`read` gives the caller's dataclasses. Any problem with a file becomes one error of the caller's class, with the place
in the file and what to do. `parse` and `convert` are its two halves, for callers that continue without a damaged file:
they raise only `Malformed`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from fxpipe.errors import FxpipeError, near

T = TypeVar("T")
MOST_BYTES = 1 << 30
"""The limit for a file that is read as a whole."""
_TOO_DEEP = "it is nested too deeply"


class Malformed(ValueError):
    """A problem with a file.

    Args:
        what: the problem, as a clause.
        place: where: `:3` for a line, `, $.stages[0].file` for a path inside the file, or nothing.
    """

    def __init__(self, what: str, place: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.place = place


def read(
    source: Path | str, kind: type[T], *, error: type[FxpipeError], hint: str, where: str = "", lax: bool = False
) -> T:
    """A file, or a text that is at `where`, as a value of `kind`.

    Args:
        kind: a type that msgspec knows: dataclasses, tuples, mappings, `Annotated` with bounds.
        lax: read strings of numbers as numbers, `inf` too.

    Raises:
        error: it does not exist, or is not JSON of this kind.
    """
    with explained(where or source, error=error, hint=hint):
        return convert(parse(source), kind, lax=lax)


@contextmanager
def explained(where: Path | str, *, error: type[FxpipeError], hint: str) -> Iterator[None]:
    """Turn `Malformed` into an error of that class that names the file at `where`."""
    try:
        yield
    except (Malformed, RecursionError) as found:
        problem = found if isinstance(found, Malformed) else Malformed(_TOO_DEEP)
        what = f"{Path(where).name} cannot be read: {problem.what}"
        raise error(what, where=f"{where}{problem.place}", hint=hint) from found


def parse(source: Path | str, *, finite: bool = True) -> Any:
    """The JSON in a file, or in a text.

    Args:
        finite: refuse NaN and infinity, which JSON does not have.

    Raises:
        Malformed: it does not exist, or is not UTF-8, not JSON, or nested too deeply.
    """
    text = read_text(source) if isinstance(source, Path) else source
    try:
        return json.loads(text, parse_constant=_refused, parse_float=_float) if finite else json.loads(text)
    except Malformed:
        raise
    except json.JSONDecodeError as error:
        raise Malformed(f"not JSON: {error.msg}", f":{error.lineno}") from error
    except (RecursionError, ValueError) as error:  # the latter for an integer of thousands of digits
        raise Malformed(_TOO_DEEP if isinstance(error, RecursionError) else str(error)) from error


def parse_lines(lines: Iterable[bytes]) -> Iterator[tuple[bytes, Any]]:
    """Lines of a log, possibly millions, each with the JSON in it; other lines are left out. NaN is accepted."""
    import msgspec  # as in `convert`

    decode = msgspec.json.Decoder().decode
    for line in lines:
        try:
            yield line, decode(line)
            continue
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # it is quick, and stricter than `parse`
        with suppress(Malformed, UnicodeDecodeError):
            yield line, parse(line.decode(), finite=False)


def parse_toml(path: Path) -> Any:
    """The TOML in a file. Raises Malformed as `parse` does."""
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        raise Malformed(f"not TOML: {error}", f":{line[1]}" if line else "") from error
    except RecursionError as error:
        raise Malformed(_TOO_DEEP) from error


def read_text(path: Path) -> str:
    """The text in a file that is to be read as a whole, without the mark that some editors begin it with.

    Raises:
        Malformed: it does not exist, or is not a file, far too large, or not UTF-8.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            raise Malformed("it is not a file")  # reading a pipe would block
        if status.st_size > MOST_BYTES:
            raise Malformed(f"it has {status.st_size} bytes, more than {MOST_BYTES}")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise Malformed("it is not UTF-8") from error
    except Malformed:
        raise
    except OSError as error:
        broken = path.is_symlink() and not path.exists()
        why = f"it is a link to {os.readlink(path)}, which is not there" if broken else error.strerror
        raise Malformed(why or str(error)) from error
    except ValueError as error:  # a name with a null character
        raise Malformed(str(error)) from error


def _refused(name: str) -> None:
    raise Malformed(f"{name} is not a number in JSON")


def _float(text: str) -> float:
    if math.isinf(number := float(text)):
        raise Malformed(f"the number {text[:40]} is too large")
    return number


def convert(body: Any, kind: type[T], *, lax: bool = False, extra: bool = False) -> T:
    """The result of `parse` (or of a TOML reader) as a value of `kind`.

    Args:
        lax: read strings of numbers as numbers, `inf` too.
        extra: leave out fields that `kind` does not have, instead of refusing them.

    Raises:
        Malformed: a wrong type, a value out of bounds, a missing field, or an unknown one.
    """
    import msgspec  # here: the command line writes JSON, and must start at once

    try:
        value: T = msgspec.convert(body, kind, strict=not lax, str_keys=True)
        if not extra:
            _refuse_unknown(body, value, "$")
    except FxpipeError as error:  # from a dataclass that checks its fields
        raise Malformed(error.what) from error
    except msgspec.ValidationError as error:
        what, _, place = str(error).replace("`", "").partition(" - at ")
        raise Malformed(what[:1].lower() + what[1:], f", {place or '$'}") from error
    except RecursionError as error:
        raise Malformed(_TOO_DEEP) from error
    return value


def _refuse_unknown(body: Any, result: Any, place: str) -> None:
    """Refuse keys of objects that became dataclasses or typed dictionaries without such a field."""
    if isinstance(body, dict):
        fields = dataclasses.is_dataclass(result)
        names = {f.name for f in dataclasses.fields(result)} if fields else set(result)
        for key, inner in body.items():
            if key not in names:
                raise Malformed(f"there is no {key[:80]!r}{near(key, sorted(names))}", f", {place}")
            if isinstance(inner, (dict, list)):
                value = getattr(result, key) if fields else result[key]
                _refuse_unknown(inner, value, f"{place}.{key}")
    elif isinstance(body, list):
        for i, (inner, value) in enumerate(zip(body, result, strict=True)):
            if isinstance(inner, (dict, list)):
                _refuse_unknown(inner, value, f"{place}[{i}]")


def dumps(data: Any, indent: int | None = None) -> str:
    """The data as text, with null for numbers that are not finite."""
    try:
        return json.dumps(data, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(finite(data), indent=indent, allow_nan=False)


def finite(value: Any) -> Any:
    """The value with null for every number in it that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value
