"""What several passes, and other readers of a program, need to know about it."""
