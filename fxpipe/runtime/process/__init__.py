"""Starts the processes of a run, runs them to their end, and sums up what they did."""
