"""Two towers that learn which picture and which words belong together, as CLIP does.

Neither tower reads what the other makes until the end compares them, so their workers run side by side: of four,
workers 0 and 1 have the tower of pictures, and workers 2 and 3 that of texts. Plain PyTorch: this file imports nothing
of fxpipe and downloads nothing. From the repository's root:

    fxpipe compile examples/two_towers.py -n 4 -o build/ --verify
    fxpipe inspect build/
    fxpipe run build/ --steps 50
"""

import torch
from torch import nn
from torch.nn import functional as F

WORDS = 64  # that there are
LENGTH = 16  # words of a text, and places of a picture
PIXELS = 48  # numbers of a place
WIDTH = 96
BLOCKS = 4  # of each tower

BATCH = 32  # pairs in a minibatch
EPOCH = 200  # minibatches in an epoch
LEARNING_RATE = 1e-3


class Tower(nn.Module):
    """What an entrance makes of a picture or a text, through transformer blocks, as one vector of length 1."""

    def __init__(self, enter: nn.Module) -> None:
        super().__init__()
        self.enter = enter
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True) for _ in range(BLOCKS)
        )

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return F.normalize(x.mean(1), dim=-1)


class TwoTowers(nn.Module):
    """Pictures [batch, places, pixels] and texts [batch, words] in, how alike every two of them are out."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures = Tower(nn.Linear(PIXELS, WIDTH))
        self.texts = Tower(nn.Embedding(WORDS, WIDTH))
        self.sharpness = nn.Parameter(torch.tensor(2.0))

    def forward(self, pictures, texts):
        return self.sharpness.exp() * self.pictures(pictures) @ self.texts(texts).T


class Pairs:
    """Minibatches of (pictures, texts): each place of a picture shows the word of the same place, under noise."""

    def __init__(self, batches: int, seed: int) -> None:
        self.batches = batches
        self.shown = torch.randn(WORDS, PIXELS, generator=torch.Generator().manual_seed(1))
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self.batches

    def __iter__(self):
        for _ in range(self.batches):
            texts = torch.randint(WORDS, (BATCH, LENGTH), generator=self.generator)
            noise = torch.randn(BATCH, LENGTH, PIXELS, generator=self.generator)
            yield self.shown[texts] + noise, texts


def model():
    return TwoTowers()


def loss(model, batch):
    alike = model(*batch)
    own = torch.arange(len(alike), device=alike.device)
    return (F.cross_entropy(alike, own) + F.cross_entropy(alike.T, own)) / 2


def train_data():
    return Pairs(EPOCH, seed=torch.initial_seed())


def optimizer(named_parameters):
    return torch.optim.AdamW(named_parameters, lr=LEARNING_RATE)


def eval_data():
    return list(Pairs(5, seed=0))


def metrics(model, batch):
    alike = model(*batch)
    own = torch.arange(len(alike), device=alike.device)
    return {"loss": F.cross_entropy(alike, own), "found": (alike.argmax(1) == own).float().mean()}
