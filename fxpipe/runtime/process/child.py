"""The first lines of a worker process: Ctrl-C ends it without a word, also while torch is still being imported."""

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fxpipe.runtime.process.rank import main

    main(sys.argv[1])
