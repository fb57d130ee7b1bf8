"""What a run writes while it runs, read back, and where its time went."""
