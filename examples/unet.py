"""A U-Net that finds discs under noise as strong as they are, pixel by pixel.

What each level of the way down makes is read again on the way up, so every cut of the model has skips across it: where
links are slow, the planner cuts where least crosses. Plain PyTorch: this file imports nothing of fxpipe and downloads
nothing. The functions at the end are what fxpipe looks for by name. From the repository's root:

    fxpipe compile examples/unet.py -n 2 -o build/ --verify
    fxpipe run build/
"""

import torch
from torch import nn
from torch.nn import functional as F

SIDE = 64  # pixels
PATCH = 4  # pixels that become one place of the finest level
LEVELS = (64, 128, 256)  # channels, from the finest level to the coarsest
MIDDLE = 2  # blocks at the coarsest level
DISCS = 5  # in a picture; they may overlap
NOISE = 1.0

BATCH = 16  # pictures in a minibatch
EPOCH = 200  # minibatches in an epoch
LEARNING_RATE = 2e-3


class Block(nn.Module):
    """Two normalised 3×3 convolutions."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.norm1 = nn.GroupNorm(8, after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.norm2 = nn.GroupNorm(8, after)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(x)))


class UNet(nn.Module):
    """Pictures [batch, 1, side, side] in, logits of "this pixel is of a disc", of the same shape, out."""

    def __init__(self) -> None:
        super().__init__()
        coarsest = LEVELS[-1]
        self.patches = nn.Conv2d(1, LEVELS[0], PATCH, stride=PATCH)
        self.down = nn.ModuleList(Block(a, b) for a, b in zip((LEVELS[0], *LEVELS[:-2]), LEVELS[:-1], strict=True))
        self.enter = Block(LEVELS[-2], coarsest)
        self.middle = nn.ModuleList(Block(coarsest, coarsest) for _ in range(MIDDLE))
        self.up = nn.ModuleList(Block(a + b, b) for a, b in zip(LEVELS[:0:-1], LEVELS[-2::-1], strict=True))
        self.head = nn.ConvTranspose2d(LEVELS[0], 1, PATCH, stride=PATCH)

    def forward(self, x):
        x, skips = self.patches(x), []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.enter(x)
        for block in self.middle:
            x = x + block(x)
        for block, skip in zip(self.up, reversed(skips), strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skip], dim=1))
        return self.head(x)


class Pictures:
    """Minibatches of random pictures: (the picture, 1 where a disc is and 0 elsewhere)."""

    def __init__(self, batches: int, seed: int) -> None:
        self.batches = batches
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self.batches

    def __iter__(self):
        for _ in range(self.batches):
            yield self.picture()

    def picture(self):
        size = (BATCH, DISCS, 1, 1)
        y, x = (torch.randint(SIDE, size, generator=self.generator) for _ in range(2))
        radius = torch.randint(5, 12, size, generator=self.generator)
        rows, columns = (torch.arange(SIDE).view(1, 1, *shape) for shape in ((SIDE, 1), (1, SIDE)))
        disc = ((rows - y) ** 2 + (columns - x) ** 2 <= radius**2).any(1, keepdim=True)
        noise = NOISE * torch.randn(BATCH, 1, SIDE, SIDE, generator=self.generator)
        return disc + noise, disc.float()


def model():
    return UNet()


def loss(model, batch):
    picture, disc = batch
    return F.binary_cross_entropy_with_logits(model(picture), disc)


def train_data():
    return Pictures(EPOCH, seed=torch.initial_seed())


def optimizer(named_parameters):
    return torch.optim.AdamW(named_parameters, lr=LEARNING_RATE)


def eval_data():
    return list(Pictures(5, seed=0))


def metrics(model, batch):
    picture, disc = batch
    logits = model(picture)
    right = ((logits > 0) == (disc > 0)).float().mean()
    return {"loss": F.binary_cross_entropy_with_logits(logits, disc), "accuracy": right}
