"""A small U-Net that reads handwritten digits: convolutions, batch norm and skip connections.

Plain PyTorch on scikit-learn's bundled 8x8 digits: no download, nothing of fxpipe. What `stem` and `down1`
make is used again by `up2` and `up1`, so a cut between them sends more than one value. From the repository's
root:

    fxpipe compile examples/digits.py -n 2 -o build/ --verify
    fxpipe run build/
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

WIDTH = 16
BATCH = 32  # images in a minibatch
EVAL_BATCHES = 11  # minibatches held out: 352 of 1797 images


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class Up(nn.Module):
    """Twice the size, then the skip beside it, then a convolution over both."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.grow = nn.ConvTranspose2d(inputs, outputs, 2, stride=2)
        self.merge = conv(2 * outputs, outputs)

    def forward(self, x, skip):
        return self.merge(torch.cat([self.grow(x), skip], dim=1))


class UNet(nn.Module):
    """Images [batch, 1, 8, 8] in, logits of the ten digits [batch, 10] out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(1, WIDTH)  # 8x8
        self.down1 = conv(WIDTH, 2 * WIDTH, stride=2)  # 4x4
        self.down2 = conv(2 * WIDTH, 4 * WIDTH, stride=2)  # 2x2
        self.middle = conv(4 * WIDTH, 4 * WIDTH)
        self.up1 = Up(4 * WIDTH, 2 * WIDTH)  # 4x4
        self.up2 = Up(2 * WIDTH, WIDTH)  # 8x8
        self.head = nn.Linear(WIDTH * 8 * 8, 10)

    def forward(self, images):
        full = self.stem(images)
        half = self.down1(full)
        deep = self.middle(self.down2(half))
        return self.head(self.up2(self.up1(deep, half), full).flatten(1))


def read_digits(held_out: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Images in [0, 1] and their labels; always the same ones are held out."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    kept = order[: EVAL_BATCHES * BATCH] if held_out else order[EVAL_BATCHES * BATCH :]
    return images[kept], labels[kept]


class Batches:
    """Minibatches of images and labels, in a new order every time round; the last, partial one is dropped."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, seed: int) -> None:
        self.images, self.labels = images, labels
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.labels) // BATCH

    def __iter__(self):
        order = torch.randperm(len(self.labels), generator=self.generator)
        for chosen in order[: len(self) * BATCH].split(BATCH):
            yield {"images": self.images[chosen], "labels": self.labels[chosen]}


def model():
    return UNet()


def loss(model, batch):
    return F.cross_entropy(model(batch["images"]), batch["labels"])


def train_data():
    return Batches(*read_digits(held_out=False), seed=torch.initial_seed())


def optimizer(named_parameters):
    return torch.optim.SGD(named_parameters, lr=0.01, momentum=0.9, weight_decay=1e-4)


def eval_data():
    return list(Batches(*read_digits(held_out=True), seed=0))


def metrics(model, batch):
    right = model(batch["images"]).argmax(1) == batch["labels"]
    return {"accuracy": right.float().mean()}
