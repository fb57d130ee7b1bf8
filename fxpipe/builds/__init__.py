"""A build, in memory and on disk, and how a user starts runs and loops of it."""
