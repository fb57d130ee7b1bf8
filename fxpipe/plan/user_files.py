"""What a compile has read of the user's files and of the state that their hooks can reach."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SettingSpec:
    """A hyperparameter of the model file (`fxpipe.setting`).

    Attributes:
        value: its value when the build was compiled; None if nothing read it.
        given: the text that the compile was given for it; None if none was.
        captured: a part of the user's files that capture read and that reads it; '' if there is none.
    """

    name: str
    value: bool | int | float | str | None
    given: str | None = None
    captured: str = ""


@dataclass(frozen=True)
class ModelFileSpec:
    """The user's model file, and what a compile has read of it: other parts may change without compiling again.

    Attributes:
        path: relative to the build directory; None when compiled from objects.
        sources: digest of the file and of each file of the user's own that it imports, by relative path.
        parts: the digest of each part that counts (`fxpipe.plan.read_by_capture`); empty if that is unknown, and all of
            the files count.
        settings: all known ones.
        any_setting: a part that counts, and may have read any of them; '' if none.
        given_arguments: the model file's own command line.
        arguments: the parsed ones that parts that count read, as `model.py: args.width`, with their values as text.
        any_argument: a part that counts, and may have read any of it; '' if none.
        run_options: the options of `fxpipe run` that it gives, for runs whose command line does not.
        calls_model: whether `model()` changes what other hooks read: a run calls it, too, before them.
    """

    path: str | None = None
    sources: dict[str, str] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    settings: tuple[SettingSpec, ...] = ()
    any_setting: str = ""
    given_arguments: tuple[str, ...] = ()
    arguments: dict[str, str] = field(default_factory=dict)
    any_argument: str = ""
    run_options: dict[str, bool | int | float | str] = field(default_factory=dict)
    calls_model: bool = False

    @property
    def name(self) -> str:
        """The name of the file; '' when compiled from objects."""
        return (self.path or "").rpartition("/")[2]

    @property
    def given(self) -> dict[str, str]:
        """The texts given to the compile, by setting."""
        return {row.name: row.given for row in self.settings if row.given is not None}


@dataclass(frozen=True)
class WatchedSpec:
    """A value of the user's program that the captured step has read, and that hooks of a run can reach.

    Attributes:
        holder: the name of what holds it: an object, a container, a module of Python.
        key: in the holder: the text of an attribute, a name or a key; `*` for everything in a container.
        place: how the hooks write the value: `NET.tau`.
        value: a text by which it is compared; of an object that is no plain value, its type.
        where: the line of the step that reads it.
        buffer: of a tensor, the buffer that gets its new values; '' if none can. None: it is no tensor.
        alias: the step has the tensor from elsewhere: another tensor in this place would not be its own.
    """

    holder: str
    key: str
    place: str
    value: str
    where: str | None
    buffer: str | None = None
    alias: bool = False
