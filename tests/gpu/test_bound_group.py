"""Scripts that have bound their own group over NCCL to a device, as PyTorch advises, and then train with fxpipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gpu_runs import CUT, MARKS, MICROBATCHES, NET, compiled, results

pytestmark = MARKS
SCRIPT = """
import json
import sys

sys.path.insert(0, {folder!r})
import torch
import torch.distributed as dist

device = torch.device("cuda", 0)
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)

import fxpipe
from model import optimizer, train_data


def summed():
    value = torch.ones(1, device=device)
    dist.all_reduce(value)
    return int(value)


found = []
for number in range(3):
    build = fxpipe.load({folder!r} + "/build")
    summary = build.join(train_data, steps=4, optimizer=optimizer, out=f"{folder}/out{{number}}")
    if summary is not None:
        assert summary["transport"] == {wires!r}, summary["transport"]
    assert dist.is_initialized() and summed() == 2
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert summed() == 2  # both are here
    found.append(torch.cuda.mem_get_info()[0])
    assert summed() == 2
print(json.dumps(found))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("wires", "options"),
    [
        pytest.param("nccl", (*MICROBATCHES, *CUT), id="messages"),
        pytest.param("nccl", ("-n", 1, "--dp", 2, *MICROBATCHES), id="replicas"),
        pytest.param("peer memory", (*MICROBATCHES, *CUT), id="peer memory"),
    ],
)
def test_trains_beside_it(tmp_path: Path, wires: str, options: tuple[object, ...]) -> None:
    """Several times, and leaves neither memory nor files; the first time, libraries take memory that they keep."""
    compiled(tmp_path, NET, *options)
    (tmp_path / "script.py").write_text(SCRIPT.format(folder=str(tmp_path), wires=wires))
    before = set(Path("/dev/shm").glob("torch_*"))
    first, *_ = results(wires, 2, tmp_path / "script.py")
    _, second, third = json.loads(first.out.splitlines()[-1])
    assert abs(third - second) < 64 << 20
    assert set(Path("/dev/shm").glob("torch_*")) <= before
