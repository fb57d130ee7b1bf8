"""One thread for small tensors, as in tests/."""

import torch

torch.set_num_threads(1)
