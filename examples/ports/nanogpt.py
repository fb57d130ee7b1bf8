"""A small GPT: decay by dimension, a rate that warms up and falls with a cosine, accumulated and clipped gradients."""

import inspect
import math
import textwrap

import torch
from torch import nn
from torch.nn import functional as F

BATCH, CONTEXT, WIDTH, HEADS, LAYERS = 8, 16, 32, 4, 3
ACCUMULATE, STEPS, WARMUP, RATE, CLIP = 2, 24, 4, 3e-3, 1.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, HEADS, -1).transpose(1, 2) for y in self.c_attn(self.ln_1(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h, self.ln_f = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, 256, bias=False)
        self.wte.weight = self.lm_head.weight
        for p in self.parameters():
            if p.dim() >= 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def get_batch(split, size=BATCH):
    data = torch.tensor(list(inspect.getsource(textwrap if split == "train" else inspect).encode()))
    ix = torch.randint(len(data) - CONTEXT, (size,))
    return torch.stack([data[i : i + CONTEXT] for i in ix]), torch.stack([data[i + 1 : i + 1 + CONTEXT] for i in ix])


def configure_optimizers(named_parameters):
    params = [p for _, p in named_parameters if p.requires_grad]
    decay, others = [p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))


def get_lr(it):
    if it < WARMUP:
        return RATE * (it + 1) / (WARMUP + 1)
    return RATE * (0.1 + 0.45 * (1.0 + math.cos(math.pi * (it - WARMUP) / (STEPS - WARMUP))))


def main():
    torch.manual_seed(0)
    net = GPT()
    torch.manual_seed(0)
    optimizer, losses = configure_optimizers(net.named_parameters()), []
    for it in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(it)
        losses.append(0.0)
        x, y = get_batch("train", ACCUMULATE * BATCH)
        for part in zip(x.split(BATCH), y.split(BATCH), strict=True):
            loss = net(*part)[1] / ACCUMULATE
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    with torch.no_grad():
        held_out = [net(*get_batch("val"))[1].item() for _ in range(4)]
    return losses, {"loss": sum(held_out) / len(held_out)}


if __name__ == "__main__":
    print(main())
