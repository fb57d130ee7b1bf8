"""`fxpipe`: the group of commands, and the one boundary where errors become messages and exit codes.

Exit codes: 0, 1 (the user's problem, explained; also a defect of fxpipe, with its traceback), 2 (usage), 130 (Ctrl-C).
"""

from __future__ import annotations

import io
import os
import shlex
import sys
import traceback
from contextlib import nullcontext
from types import TracebackType

import click

import fxpipe
from fxpipe.cli.compare import compare_command
from fxpipe.cli.compile import compile_command
from fxpipe.cli.diff import diff_command
from fxpipe.cli.doctor import doctor_command
from fxpipe.cli.explain import explain_command
from fxpipe.cli.export import export_command
from fxpipe.cli.inspect import inspect_command
from fxpipe.cli.output import OutputLost, echo, finish_stdout, forget_stdout, only_json_on_stdout, show_error
from fxpipe.cli.passes import passes_command
from fxpipe.cli.plan import plan_command
from fxpipe.cli.run import run_command
from fxpipe.errors import FxpipeError, first_line
from fxpipe.limits import check_folder, limit_hint
from fxpipe.messages import begin_here, say


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(fxpipe.__version__, prog_name="fxpipe")
def cli() -> None:
    """Pipeline-parallel training of unmodified PyTorch models.

    \b
    fxpipe compile model.py -n 2 -o build/     cut the training step into two stages
    fxpipe inspect build/                      see what runs where and what crosses
    fxpipe run build/ --steps 500              train it, with one process for each stage

    model.py is plain PyTorch with three functions: model(), loss(model, batch) and train_data(). `fxpipe COMMAND
    --help` shows the options that you need first, `fxpipe COMMAND --help-all` shows all.
    """


cli.add_command(compile_command)
cli.add_command(run_command)
cli.add_command(plan_command)
cli.add_command(inspect_command)
cli.add_command(diff_command)
cli.add_command(compare_command)
cli.add_command(export_command)
cli.add_command(passes_command)
cli.add_command(doctor_command)
cli.add_command(explain_command)


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit with its code."""
    begin_here()
    sys.excepthook = _show_defect
    code = _run(arguments)
    try:
        finish_stdout()
    except (OSError, OutputLost):
        forget_stdout()
    sys.exit(code)


def _run(arguments: list[str] | None) -> int:
    typed = sys.argv[1:] if arguments is None else arguments
    try:
        check_folder()
        with only_json_on_stdout() if "--json" in typed else nullcontext():
            result = cli.main(arguments, prog_name="fxpipe", standalone_mode=False)
        finish_stdout()
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        text = io.StringIO()
        error.show(text)
        echo(text.getvalue(), err=True, nl=False)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        echo("interrupted", err=True)
        return 130
    except FxpipeError as error:
        return _explain(error, typed)
    except OSError as error:
        if error.filename is None:
            return _limited(error, typed)
        what = f"{_short(str(error.filename))}: {error.strerror}"
        return _explain(FxpipeError(what, hint="give another path, or check this one"), typed)
    except Exception as error:
        return _limited(error, typed)
    except BaseException as error:
        from fxpipe.runtime.process import ends
        from fxpipe.task.model_file import Answered
        from fxpipe.user_lines import is_users

        if isinstance(error, (ends.Stopped, Answered)) or not is_users(error):
            raise
        who = f"worker {os.environ['RANK']}" if "RANK" in os.environ else _short(shlex.join(["fxpipe", *typed[:1]]))
        return _explain(ends.ended_by_user_code(error, who), typed)


def _explain(error: FxpipeError, arguments: list[str]) -> int:
    """Print an error; an error without a file is in an argument, so its place is the command."""
    error.where = error.where or _short(shlex.join(["fxpipe", *arguments]))
    error.hint = limit_hint(error) or error.hint
    show_error(str(error))
    return error.exit_code


def _limited(error: Exception, arguments: list[str]) -> int:
    """Explain an error that comes from a limit of the system; raise any other: it is a defect."""
    if limit_hint(error) is None:
        raise error
    what = FxpipeError(first_line(error))
    what.__cause__ = error
    return _explain(what, arguments)


def _short(text: str) -> str:
    """Shortened for one line of an error."""
    text = text.replace("\n", " ")
    return text if len(text) <= 160 else f"{text[:159]}…"


def _show_defect(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An unexpected error, through the filter: its text may come from anywhere."""
    say("".join(traceback.format_exception(kind, error, trace)).rstrip())


if __name__ == "__main__":
    main()
