"""An eager training step becomes one joint program."""
