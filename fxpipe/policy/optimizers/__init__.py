"""What policies know of optimizers: how weights are predicted and steps repaired."""
