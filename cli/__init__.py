"""The command line: one file for each command. Torch is imported only when a command needs it."""
