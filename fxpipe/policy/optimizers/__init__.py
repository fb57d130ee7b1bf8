"""What policies know about optimizers: how to predict weights and correct steps."""
