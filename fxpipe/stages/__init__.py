"""An emitted stage: loaded, called once, and as pure graphs."""
