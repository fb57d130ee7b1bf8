"""What several passes, and those who read a program, ask of it."""
