"""What travels between workers, in one process and among several."""
