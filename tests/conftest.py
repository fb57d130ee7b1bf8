"""One thread for small tensors: more of them only wait for each other."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
