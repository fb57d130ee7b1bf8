"""Numbers that no pipeline has: what is larger is a mistake, and would take hours or all memory to find out."""

MOST_WORKERS = 1024
MOST_MICROBATCHES = 4096
MOST_THREADS = 1024
"""Of one worker."""
MOST_ELEMENTS = 1 << 45
"""Of one tensor."""
