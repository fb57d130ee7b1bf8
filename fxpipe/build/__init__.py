"""A build: in memory and on disk."""
