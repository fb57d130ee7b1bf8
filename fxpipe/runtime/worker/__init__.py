"""One worker: its stage, its weights, its optimizer, its data."""
