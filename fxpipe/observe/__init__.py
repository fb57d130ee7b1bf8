"""What a run writes while it runs, how it is read back, and where the time went."""
