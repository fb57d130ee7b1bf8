"""`python -m fxpipe` is the `fxpipe` command."""

from fxpipe.cli.entry import main

main()
