"""The user's optimizer: asks for it, and tries on small copies whether each worker may have its own."""
