"""A process of a case's runs, as torchrun starts one: python rank.py FOLDER '[[PORT, OPTIONS], …]' [WIRES [FAULT]]"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import nccl

from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.ends import end_process
from fxpipe.runtime.process.start import join

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    nccl.use(*sys.argv[3:])
    for number, (port, options) in enumerate(json.loads(sys.argv[2])):
        os.environ["MASTER_PORT"] = str(port)
        summary = join(RunOptions.from_json(options))
        if summary is not None:
            (folder / f"summary_{number}.json").write_text(json.dumps(summary))
    nccl.finish()
    end_process(0)
