"""`python -m fxpipe` is the `fxpipe` command."""

from fxpipe.cli.main import main

main()
