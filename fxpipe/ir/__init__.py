"""The program: one torch.fx graph of the whole step with its tables, its law, its text, and what a pass is."""
