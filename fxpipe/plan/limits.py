"""Numbers that no pipeline reaches: a larger one is a mistake, and would cost hours or all memory to find."""

MOST_WORKERS = 1024
MOST_MICROBATCHES = 4096
MOST_THREADS = 1024
"""For one worker."""
MOST_ELEMENTS = 1 << 45
"""For one tensor."""
