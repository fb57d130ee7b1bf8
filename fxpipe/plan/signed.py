"""JSON files with their format and a digest of the rest, so that changed files are detected. Needs no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from fxpipe.errors import FxpipeError
from fxpipe.typed_json import Malformed, parse


class Signed:
    """A dataclass that is the content of such a file, whose format has the number `form`."""

    _form: ClassVar[int]

    def __init_subclass__(cls, form: int) -> None:
        cls._form = form

    @property
    def digest(self) -> str:
        """The digest that identifies the content; the file has it, too."""
        return digest_of(self._body())

    def to_json(self) -> str:
        """Stable text: the same content gives the same bytes; its own digest is inside it."""
        return signed(self._body())

    def _body(self) -> dict[str, Any]:
        return {"format": self._form, **dataclasses.asdict(self)}  # type: ignore[call-overload]


def signed(body: dict[str, Any]) -> str:
    """The text of such a file; the same body gives the same bytes.

    Args:
        body: with its `format`, without a digest.
    """
    return json.dumps({**body, "digest": digest_of(body)}, indent=1, ensure_ascii=False) + "\n"


def digest_of(body: dict[str, Any]) -> str:
    """The digest of the content of such a file, with its format and without its digest."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_signed(
    path: Path, what: str, forms: Sequence[int], *, error: type[FxpipeError], hint: str, other: str, finite: bool = True
) -> dict[str, Any]:
    """The content of such a file without its format and digest. Call it inside `explained`.

    Args:
        what: what the file describes, as `the build`.
        forms: the numbers of the supported formats, the newest one first.
        hint, other: what to do about a changed file, and about another format.
        finite: as in `parse`.

    Raises:
        Malformed: it is not such a file.
        error: it has another format, or was changed after it was written.
    """
    body = parse(path, finite=finite)
    if not isinstance(body, dict) or "format" not in body or "digest" not in body:
        raise Malformed("format or digest is missing", ", $")
    if body["format"] not in forms:
        mismatch = f"{what} has format {str(body['format'])[:40]}, this fxpipe reads {forms[0]}"
        raise error(mismatch, where=str(path), hint=other)
    if body.pop("digest") != digest_of(body):
        raise error(f"{path.name} was changed after it was written", where=str(path), hint=hint)
    del body["format"]
    return body
