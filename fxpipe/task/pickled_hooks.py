"""Hooks as files: a model file that unpickles them, for processes that have not made them.

FOLDER/
    fitted_model.py     a model file, with the digests of the pickles
    model.pickle
    hooks.pickle        all others, in one: what they share, such as a dictionary of settings, they go on sharing

Whoever reads a pickle runs what is in it. A build has the digest of its model file, and so those of the pickles.
"""

from __future__ import annotations

import hashlib
import io
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, ClassVar

import cloudpickle
from torch import nn

from fxpipe.errors import BuildError, FxpipeError, first_line, listed
from fxpipe.files import digest
from fxpipe.task.hooks import NO_HOOKS, Hooks
from fxpipe.torch_private import PLAIN_FUNCTION

MODEL_FILE = "fitted_model.py"  # a module of the user's may be called model
_TEXT = '''\
"""What fxpipe.fit() was given, as a model file."""

import sys
from pathlib import Path

from fxpipe.task.pickled_hooks import PickledHooks

sys.path += [folder for folder in {path!r} if folder not in sys.path]
PICKLES = PickledHooks(Path(__file__).parent, {digests!r})


def model():
    return PICKLES.read("model")


globals().update(PICKLES.hooks())
'''


class PickledHooks:
    """The pickles of a folder, each with its digest. One that has changed is refused before anything is read."""

    def __init__(self, folder: Path, digests: Mapping[str, str]) -> None:
        self._folder = folder
        changed = [name for name, expected in digests.items() if _digest(_file(folder, name)) != expected]
        if changed:
            raise BuildError(
                f"{listed([_file(folder, name).name for name in changed])} changed after fxpipe.fit() wrote it",
                where=str(folder),
                hint="call fxpipe.fit() again; a pickle can run anything, so do not read it",
            )

    def read(self, name: str) -> Any:
        """What is in one of them."""
        with _file(self._folder, name).open("rb") as file:
            return cloudpickle.load(file)

    def hooks(self) -> dict[str, Any]:
        """All but the model, by name."""
        hooks: dict[str, Any] = self.read("hooks")
        return hooks


def _code(code: CodeType) -> tuple[Any, ...]:
    """Pickles code with the name of its file, which cloudpickle leaves out: errors name the user's line."""
    make, arguments = cloudpickle.CloudPickler.dispatch_table[CodeType](code)
    return _from_file, (make, arguments, code.co_filename)


def _from_file(make: Callable[..., CodeType], arguments: tuple[Any, ...], file: str) -> CodeType:
    return make(*arguments).replace(co_filename=file)


class _HookPickler(cloudpickle.CloudPickler):
    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _code}, cloudpickle.CloudPickler.dispatch_table)

    def reducer_override(self, value: Any) -> Any:
        """What torch.compile returned is pickled as the function that it was given."""
        if isinstance(value, FunctionType) and PLAIN_FUNCTION in vars(value):
            return _itself, (vars(value)[PLAIN_FUNCTION],)
        return super().reducer_override(value)


def _itself(value: Any) -> Any:
    return value


def write_hooks(folder: Path, model: nn.Module, hooks: Hooks) -> None:
    """Write the files."""
    defined = {name: value for name, value in vars(hooks).items() if value != getattr(NO_HOOKS, name)}
    digests = {}
    for name, value in {"model": model, "hooks": defined}.items():
        try:
            written = _pickled(name, value)
        except FxpipeError:
            for hook in defined if name == "hooks" else ():
                _pickled(hook, defined[hook])  # the error names it
            raise
        _file(folder, name).write_bytes(written)
        digests[name] = hashlib.sha256(written).hexdigest()
    text = _TEXT.format(path=sys.path, digests=digests)
    (folder / MODEL_FILE).write_text(text, encoding="utf-8")


def _pickled(name: str, value: Any) -> memoryview:
    written = io.BytesIO()
    try:
        _HookPickler(written).dump(value)
    except Exception as error:  # an object that cannot be pickled may raise anything
        raise FxpipeError(
            f"{name} cannot be sent to the worker processes: {type(error).__name__}: {first_line(error)}",
            hint="give a function that makes it there, such as data=lambda: DataLoader(…); or start the script "
            "with torchrun; or train in this process, with local=True",
        ) from error
    return written.getbuffer()


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.pickle"


def _digest(file: Path) -> str:
    try:
        return digest(file)
    except OSError:  # it is gone
        return ""
