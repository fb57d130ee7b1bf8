"""A frozen transformer learns a new text by low-rank additions to its matrices; nothing else of it is trained."""

import inspect
import math
import string
import textwrap

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

CONTEXT, WIDTH, HEADS, EPOCHS = 12, 32, 2, 3


class LoRALinear(nn.Module):
    """x·Wᵀ + b + (x·Aᵀ)·Bᵀ·alpha/r; B is zero at first."""

    def __init__(self, base, r=4, alpha=16):
        super().__init__()
        self.base, self.scaling = base, alpha / r
        self.lora_A = nn.Parameter(torch.empty(r, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x):
        return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (p(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o_proj(y)
        return x + self.down(F.silu(self.up(self.norm2(x))))


def base_model():
    """In place of one that others have trained."""
    return nn.Sequential(nn.Embedding(256, WIDTH), *(Block() for _ in range(3)), nn.Linear(WIDTH, 256))


def add_lora(net, targets=("q_proj", "v_proj", "down")):
    """Freeze everything, and put LoRALinear in the place of each layer of these names."""
    net.requires_grad_(False)
    for module in list(net.modules()):
        for name, child in list(module.named_children()):
            if name in targets:
                setattr(module, name, LoRALinear(child))
    return net


def make_model():
    return add_lora(base_model())


def loader(module):
    data = torch.tensor(list(inspect.getsource(module).encode())[: 20 * 8 * (CONTEXT + 1)])
    rows = data[: len(data) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    return DataLoader(TensorDataset(rows), batch_size=16, shuffle=module is textwrap, drop_last=True)


def next_byte(net, batch):
    (rows,) = batch
    return F.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def main():
    torch.manual_seed(0)
    net = make_model()
    torch.manual_seed(0)
    train, val = loader(textwrap), loader(string)
    optimizer = torch.optim.AdamW((p for p in net.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    for _ in range(EPOCHS):
        for batch in train:
            optimizer.zero_grad()
            loss = next_byte(net, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    with torch.no_grad():
        held_out = [next_byte(net, batch).item() for batch in val]
    return losses, {"loss": sum(held_out) / len(held_out)}


if __name__ == "__main__":
    print(main())
