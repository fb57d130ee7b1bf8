"""The hooks as a run calls them, with defaults, and errors that say where; and the file that has them."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from fxpipe.errors import FxpipeError, TaskError
from fxpipe.plan.build_folder import model_path
from fxpipe.plan.plan import Plan
from fxpipe.random_state import random_state_kept
from fxpipe.settings import pairs, use
from fxpipe.task.callbacks import ARGUMENTS, CALLBACKS, Callbacks, check_signature
from fxpipe.task.captured import check_arguments
from fxpipe.task.first_batches import FirstBatches, first_batches
from fxpipe.task.hooks import Hooks, Loss, Metrics
from fxpipe.task.loss_weights import LossWeight
from fxpipe.task.model_view import ModelViews, asks_for_model, no_model
from fxpipe.task.one_optimizer import one_optimizer
from fxpipe.task.reset_buffers import Rows, buffers_after
from fxpipe.task.step_hooks import StepHooks, uncompiled
from fxpipe.user_lines import definition, is_own, user_traceback

REQUIRED = ("model", "loss", "train_data")
VALUES = ("microbatch_dims", "pad", "pad_to", "constant_batch", "compile_options", "run_options")
"""The hooks that are not, or need not be, functions."""
NONE: Mapping[str, str] = {}
OPTIONAL = tuple(field.name for field in fields(Hooks) if field.name not in (*REQUIRED, *VALUES))
SIGNATURES = {
    "model": "def model() -> nn.Module",
    "loss": "def loss(model, batch) -> Tensor",
    "train_data": "def train_data() -> Iterable[batch]",
}


def default_optimizer(named_parameters: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """The optimizer if the user defines none."""
    return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=0.01, momentum=0.9)


class Answered(SystemExit):
    """The model file has ended the command without an error, as it does after printing its --help."""


@dataclass(frozen=True)
class Task:
    """The user's hooks as methods, with defaults for the optional ones."""

    hooks: Hooks
    # the file that was loaded; None for hooks that were given in Python: their errors are raised unchanged
    path: Path | None = None
    warnings: tuple[str, ...] = ()  # functions whose names look like a misspelt optional hook
    # gives the model of which `optimizer` and `reset` get views, if there is no `model`
    seen: Callable[[], nn.Module] | None = None
    compiled: StepHooks | None = None  # what the build was compiled from, for a step if the hooks are missing

    def __post_init__(self) -> None:
        optimizer = self.hooks.optimizer
        for name, arguments in {**ARGUMENTS, **CALLBACKS}.items():
            if (hook := getattr(self.hooks, name)) is not None:
                more = name == "optimizer" and asks_for_model(hook)
                check_signature(name, hook, "(named_parameters, model)" if more else arguments, self.path)
        asks = {"optimizer()": optimizer and asks_for_model(optimizer), "reset(model)": self.hooks.reset}
        for hook in (hook for hook, asks_for_it in asks.items() if asks_for_it):
            if self.hooks.model is None and self.seen is None:
                raise no_model(hook)

    @property
    def file(self) -> str | None:
        """The name of the file."""
        return None if self.path is None else self.path.name

    def model(self) -> nn.Module:
        """A new model from the user's hook."""
        if self.hooks.model is None:
            raise TaskError(
                "the build has no parameter values (--meta), and no model to initialise them",
                hint="give a checkpoint (weights=...), or model=, a function that makes the model",
            )
        module = self._call("model")
        if not isinstance(module, nn.Module):
            raise TaskError(
                f"model() returned {type(module).__name__}, not a torch.nn.Module", where=self._place("model")
            )
        return uncompiled(module)

    @property
    def loss(self) -> Loss:
        """The user's own function; capture explains its errors and says where they are."""
        assert self.hooks.loss is not None
        return self.hooks.loss

    @property
    def step_hooks(self) -> StepHooks | None:
        """What a step can be captured from during a run; None if the model or the loss is missing."""
        if self.hooks.model is None or self.hooks.loss is None:
            return self.compiled
        return StepHooks(self.model, self.hooks.loss, self.hooks.loss_weight, between=self.hooks.of_run)

    def train_data(self) -> Iterable[Any]:
        """A new iterable of batches: one epoch."""
        return self._data("train_data")

    def eval_data(self) -> Iterable[Any]:
        """A new iterable of the evaluated batches; only if `validates`."""
        return self._data("eval_data")

    @property
    def metrics(self) -> Metrics:
        """The user's own function, like `loss`; only if `validates`."""
        assert self.hooks.metrics is not None
        return self.hooks.metrics

    @property
    def gathers(self) -> bool:
        """Whether `metrics` may return tensors with dimensions, from which `metrics_of_all` makes numbers."""
        return self.hooks.metrics_of_all is not None

    def metrics_of_all(self, gathered: dict[str, list[torch.Tensor]]) -> dict[str, float]:
        """The result of the user's hook for the tensors of all batches; random generators stay unchanged."""
        if not self.gathers:
            raise TaskError(
                f"metrics(model, batch) returns {', '.join(gathered)} of each batch, but there is no metrics_of_all()",
                hint="give metrics_of_all=, with which the build was compiled",
            )
        with random_state_kept():
            result = self._call("metrics_of_all", gathered)
        if not isinstance(result, Mapping):
            what = f"metrics_of_all() returned {type(result).__name__}, not a dictionary of numbers"
            raise TaskError(what, where=self._place("metrics_of_all"))
        numbers: dict[str, float] = {}
        for name, value in result.items():
            try:
                numbers[str(name)] = float(value)
            except (TypeError, ValueError, RuntimeError) as error:
                what = f"metrics_of_all() returned {name!r} as a {type(value).__name__}, not as a number"
                raise TaskError(what, where=self._place("metrics_of_all")) from error
        return numbers

    def example(self) -> Any:
        """The first batch of the training data."""
        return self.first(1).batches[0]

    def first(self, count: int) -> FirstBatches:
        """The first batches of the training data, at most `count`, and what the data say about the others."""
        try:
            first = first_batches(self.train_data(), count)
        except FxpipeError:
            raise
        except Exception as error:
            raise hook_raised("train_data", error, self.path, self._place("train_data")) from error
        if not first.batches:
            raise TaskError("train_data() gave no batch", where=self._place("train_data"))
        return first

    def optimizer(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """The user's optimizer for these parameters; SGD(lr=0.01, momentum=0.9) if none is defined."""
        if self.hooks.optimizer is not None:
            hook, arguments = "optimizer", [named_parameters]
            alone = not asks_for_model(self.hooks.optimizer)
        elif self.hooks.configure_optimizers is not None:
            hook, arguments, alone = "configure_optimizers", [], False
        else:
            return default_optimizer(named_parameters)
        if alone:
            return one_optimizer(self._call(hook, *arguments), self._place(hook))
        call = functools.partial(self._call, hook, *arguments)
        return self._views.optimizer(call, named_parameters, self._place(hook))

    @functools.cached_property
    def _views(self) -> ModelViews:
        return ModelViews(self.seen if self.hooks.model is None and self.seen else self.model)

    def make_model(self) -> None:
        """Call `model()`, if there is one, for what it leaves where other hooks find it; parameters have no values."""
        if self.hooks.model is not None or self.seen is not None:
            _ = self._views.model

    @property
    def view(self) -> nn.Module | None:
        """The model of which the optimizer and `reset` have had views; None if they have had none."""
        views = vars(self).get("_views")
        return None if views is None else vars(views).get("model")

    def lr_scheduler(self, optimizer: torch.optim.Optimizer) -> Any | None:
        """The result of the user's hook: see `fxpipe.task.paced_scheduler`; None if none is defined."""
        return None if self.hooks.lr_scheduler is None else self._call("lr_scheduler", optimizer)

    @property
    def loss_weight(self) -> LossWeight | None:
        """How much a microbatch counts in its minibatch's loss; None without a hook."""
        return self.hooks.loss_weight

    @property
    def constant_batch(self) -> Sequence[str]:
        """The tensors of a batch that are constants of the capture: by their names or keys."""
        names = self.hooks.constant_batch
        if not isinstance(names, (list, tuple, set)) or not all(isinstance(name, str) for name in names):
            raise TaskError(
                f"constant_batch is {names!r}, not a list of names",
                where=self.file,
                hint='such as constant_batch = ["image_grid_thw"], or ["batch[2]"] in a tuple',
            )
        return tuple(names)

    @property
    def compile_options(self) -> dict[str, Any]:
        """The options of a compile from the file."""
        return self._options("compile_options")

    @property
    def run_options(self) -> dict[str, Any]:
        """The options of a run from the file; errors as `compile_options`."""
        return self._options("run_options")

    def _options(self, hook: str) -> dict[str, Any]:
        options = getattr(self.hooks, hook)
        if not isinstance(options, Mapping):
            raise TaskError(f"{hook} is {type(options).__name__}, not a dictionary of options", where=self.file)
        for name, value in options.items():
            if not isinstance(value, (bool, int, float, str, type(None))):
                raise TaskError(
                    f"{hook} has {name}={value!r}", where=self.file, hint="give numbers, strings, True or False"
                )
        return {str(name): value for name, value in options.items() if value is not None}

    @property
    def averages(self) -> bool:
        """Whether a hook says where the optimizer keeps averaged weights."""
        return self.hooks.averaged is not None

    def averaged(self, optimizer: torch.optim.Optimizer, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> Any:
        """The optimizer's averages of these parameters, by name; only if `averages`."""
        return self._call("averaged", optimizer, named_parameters)

    @property
    def callbacks(self) -> Callbacks:
        """The functions that the run calls while it trains."""
        return Callbacks(path=self.path, **{name: getattr(self.hooks, name) for name in CALLBACKS})

    @property
    def resets(self) -> bool:
        """Whether there is `reset(model)`."""
        return self.hooks.reset is not None

    def reset(self, buffers: Rows) -> dict[str, torch.Tensor]:
        """The buffers after `reset(model)`; see `fxpipe.task.reset_buffers`. Only if `resets`."""
        return buffers_after(self._views.model, self.reset_model, buffers, self._place("reset"))

    def reset_model(self, model: nn.Module) -> None:
        """Call `reset(model)`, if there is one."""
        if self.resets:
            self._call("reset", model)

    @property
    def validates(self) -> bool:
        """Whether there is validation: eval_data, and metrics in the file or in the build."""
        hooks = ("eval_data",) if self.path is None else ("eval_data", "metrics")
        return all(callable(getattr(self.hooks, hook)) for hook in hooks)

    def _data(self, hook: str) -> Iterable[Any]:
        data: Iterable[Any] = self._call(hook)
        if not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
            raise TaskError(
                f"{hook}() returned {type(data).__name__}, which cannot be iterated",
                where=self._place(hook),
                hint="return a list of batches, a generator or a DataLoader",
            )
        return data

    def _place(self, hook: str) -> str | None:
        function = getattr(self.hooks, hook)
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        if self.path is None or code is None:
            return self.file
        return definition(function, hook) if is_own(code.co_filename) else None

    def _call(self, hook: str, *args: Any) -> Any:
        try:
            return getattr(self.hooks, hook)(*args)
        except FxpipeError as error:
            error.where = error.where or self._place(hook)
            raise
        except Exception as error:
            if self.path is None:
                raise
            raise hook_raised(hook, error, self.path, self._place(hook)) from error


def hook_raised(hook: str, error: Exception, path: Path | None, default_place: str | None = None) -> TaskError:
    """The error that says that a user's hook raised `error`, and where: at the default place, or in the file, if no
    frame of it is the user's."""
    where = user_traceback(error) or default_place
    if path is not None:
        where = place_in(error, path) or where or path.name
    return TaskError(f"{hook}() raised {type(error).__name__}: {error}", where=where, hint=_to_install(error))


EXTRAS = {
    "sklearn": "examples",
    "transformers": "transformers",
    "accelerate": "transformers",
    "peft": "peft",
    "lightning": "lightning",
    "trl": "trl",
    "datasets": "trl",
    "bitsandbytes": "packed",
    "torchao": "packed",
}
"""By the name of a module that a model file may import, the extra of fxpipe that installs it."""


def _to_install(error: Exception) -> str | None:
    """What to install, if the missing module comes with an extra."""
    extra = EXTRAS.get((error.name or "").partition(".")[0]) if isinstance(error, ModuleNotFoundError) else None
    return f"pip install -c constraints.txt 'fxpipe[{extra}]', or '.[{extra}]' in the repository" if extra else None


def place_in(error: BaseException, path: Path) -> str | None:
    """`model.py:12: the line` of the deepest frame of `error` in `path`; None if there is none."""
    place = None
    for frame in traceback.extract_tb(error.__traceback__):
        if os.path.realpath(frame.filename) == os.path.realpath(path):
            place = f"{path.name}:{frame.lineno}: {frame.line}"
    return place


def load_task(path: str | Path, settings: Mapping[str, str] = NONE, arguments: Sequence[str] = ()) -> Task:
    """Import the user's file, with these settings and this command line from now on, and check its hooks."""
    path = Path(path)
    if not path.is_file():
        raise TaskError(
            f"there is no file {str(path)!r}", hint="give the path of a Python file with model() and loss()"
        )
    use(settings)
    sys.argv = [str(path), *arguments]
    module = imported(path)
    hooks = (*REQUIRED, *OPTIONAL)
    functions = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    unknown = [name for name in functions if name not in hooks and _defined_here(vars(module)[name], module)]
    missing = [name for name in REQUIRED if not callable(getattr(module, name, None))]
    if missing:
        lines = [SIGNATURES[name] for name in missing]
        guesses = [f"{g!r} to {name!r}" for name in missing for g in difflib.get_close_matches(name, unknown, 1, 0.6)]
        raise TaskError(
            f"{path.name} does not define {', '.join(missing)}",
            where=str(path),
            hint=(f"rename {', '.join(guesses)}" if guesses else "add:\n    " + "\n    ".join(lines)),
        )
    warnings = []
    used = {node.id for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.Name)}
    unknown = [name for name in unknown if name not in used]  # a function that the file calls is not a misspelt hook
    for name in OPTIONAL:
        instead = {"optimizer": "configure_optimizers", "configure_optimizers": "optimizer"}.get(name, name)
        if not hasattr(module, name) and not hasattr(module, instead):
            warnings += [
                f"{path.name} defines {guess}(), which is not a hook; do you mean {name}()?"
                for guess in difflib.get_close_matches(name, unknown, 1, 0.75)
            ]
    if hasattr(module, "eval_data") != hasattr(module, "metrics"):
        warnings.append(f"{path.name} defines only one of eval_data() and metrics(): nothing will be evaluated")
    hook_values = {field.name: getattr(module, field.name) for field in fields(Hooks) if hasattr(module, field.name)}
    return Task(Hooks(**hook_values), path, tuple(warnings))


def task_of_build(
    plan: Plan,
    folder: str,
    model_file: str | None = None,
    settings: Sequence[str] = (),
    arguments: Sequence[str] | None = None,
) -> Task:
    """The model file given, else the one that the plan of the build in `folder` names, loaded.

    It has the settings of the compile, but for those that are given as `name=value`, and its arguments, unless others
    are.
    """
    path = model_path(plan, folder, model_file)
    if path is None:
        raise TaskError(
            "the build was compiled from objects, so there is no file with train_data()",
            hint="use the Python API: fxpipe.load(BUILD).local(...)",
        )
    compiled = plan.model_file
    file_arguments = compiled.given_arguments if arguments is None else arguments
    task = load_task(path, compiled.given | pairs(settings), file_arguments)
    check_arguments(compiled, path)
    if task.run_options != compiled.run_options:
        names = sorted(
            name
            for name in {*task.run_options, *compiled.run_options}
            if task.run_options.get(name) != compiled.run_options.get(name)
        )
        raise TaskError(
            f"run_options has other values of {', '.join(names)} than when the build was compiled",
            where=path.name,
            hint="compile again, or change the file back and give the option to `fxpipe run`",
        )
    return task


def _defined_here(value: Callable[..., Any], module: ModuleType) -> bool:
    return isinstance(value, FunctionType) and value.__module__ == module.__name__


def imported(path: Path) -> ModuleType:
    """The user's file as a module."""
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # so that it finds the files next to it, as under `python model.py`
    name = f"fxpipe_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TaskError(f"{str(path)!r} is not a Python file", hint="it must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        del sys.modules[name]
        line = (error.text or "").strip()
        raise TaskError(f"syntax error: {error.msg}", where=f"{path.name}:{error.lineno}: {line}") from error
    except FxpipeError as error:
        del sys.modules[name]
        error.where = error.where or place_in(error, path) or path.name
        raise
    except SystemExit as error:
        if not error.code:
            raise Answered(0) from error
        raise TaskError(
            f"it ended with exit code {error.code} while it was imported",
            where=place_in(error, path) or path.name,
            hint="its own arguments come last, after two dashes: fxpipe compile MODEL … -- --width 64",
        ) from error
    except Exception as error:
        del sys.modules[name]
        raise TaskError(
            f"importing it raised {type(error).__name__}: {error}",
            where=place_in(error, path) or path.name,
            hint=_to_install(error),
        ) from error
    return module
