"""The command line: one file a command. Torch is imported only when a command needs it."""
