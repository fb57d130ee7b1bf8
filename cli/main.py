"""`fxpipe`: the group of commands, and the one boundary where errors become messages and exit codes.

Exit codes: 0, 1 (the user's problem, explained; also a defect of fxpipe, with its traceback), 2 (usage), 130 (Ctrl-C).
"""

from __future__ import annotations

import sys

import click
from fxpipe.cli.compare import compare_command
from fxpipe.cli.compile import compile_command
from fxpipe.cli.diff import diff_command
from fxpipe.cli.doctor import doctor_command
from fxpipe.cli.explain import explain_command
from fxpipe.cli.export import export_command
from fxpipe.cli.inspect import inspect_command
from fxpipe.cli.plan import plan_command
from fxpipe.cli.run import run_command

import fxpipe
from fxpipe.errors import FxpipeError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(fxpipe.__version__, prog_name="fxpipe")
def cli() -> None:
    """Pipeline-parallel training of unmodified PyTorch models.

    \b
    fxpipe compile model.py -n 2 -o build/     cut the training step into two stages
    fxpipe inspect build/                      see what runs where and what crosses
    fxpipe run build/ --steps 500              train it, one process a stage

    model.py is plain PyTorch with three functions: model(), loss(model, batch) and train_data().
    """


cli.add_command(compile_command)
cli.add_command(run_command)
cli.add_command(plan_command)
cli.add_command(inspect_command)
cli.add_command(diff_command)
cli.add_command(compare_command)
cli.add_command(export_command)
cli.add_command(doctor_command)
cli.add_command(explain_command)


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit with its code."""
    sys.exit(_run(arguments))


def _run(arguments: list[str] | None) -> int:
    try:
        result = cli.main(arguments, prog_name="fxpipe", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return 130
    except FxpipeError as error:
        click.echo(click.style("error: ", fg="red", bold=True) + str(error), err=True)
        return error.exit_code


if __name__ == "__main__":
    main()
