"""JSON files that carry their format and a digest of the rest, so that what was changed is not taken for what was
written. Needs no torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from fxpipe.errors import FxpipeError
from fxpipe.typed_json import Malformed, parse


def signed(body: dict[str, Any]) -> str:
    """Such a file's text; the same body gives the same bytes.

    Args:
        body: with its `format`, without a digest.
    """
    return json.dumps({**body, "digest": digest_of(body)}, indent=1, ensure_ascii=False) + "\n"


def digest_of(body: dict[str, Any]) -> str:
    """The digest of what such a file holds, with its format and without its digest."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_signed(
    path: Path, what: str, form: int, *, error: type[FxpipeError], hint: str, other_form: str, finite: bool = True
) -> dict[str, Any]:
    """What such a file holds besides its format and its digest. Call it inside `explained`.

    Args:
        what: what the file is of, as `the build`.
        form: the number of the format that is read.
        hint, other_form: what to do about a file that was changed, and about another format.
        finite: as of `parse`.

    Raises:
        Malformed: it is no such file.
        error: it has another format, or was changed after it was written.
    """
    body = parse(path, finite=finite)
    if not isinstance(body, dict) or "format" not in body or "digest" not in body:
        raise Malformed("it has no format and no digest", ", $")
    if body["format"] != form:
        found = f"{what} has format {str(body['format'])[:40]}, this fxpipe reads {form}"
        raise error(found, where=str(path), hint=other_form)
    if body.pop("digest") != digest_of(body):
        raise error(f"{path.name} was changed after it was written", where=str(path), hint=hint)
    del body["format"]
    return body
