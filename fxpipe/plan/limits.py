"""Numbers that no pipeline has: what is larger is a mistake, and would take hours or all memory to find out."""

MOST_WORKERS = 1024
MOST_MICROBATCHES = 4096
MOST_THREADS = 1024
"""Of one worker."""
MOST_ELEMENTS = 1 << 45
"""Of one tensor."""


def replicas_of_text(text: str) -> tuple[int, ...] | None:
    """`2,1,1` as numbers of replicas; None if it is none."""
    parts = [part.strip() for part in text.split(",")]
    if not all(len(part) < 9 and part.isdecimal() and 0 < int(part) <= MOST_WORKERS for part in parts):
        return None
    return tuple(int(part) for part in parts)
