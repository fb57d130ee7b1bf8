"""What other training libraries know of a training, as the hooks of a model file; each file needs its own package."""
