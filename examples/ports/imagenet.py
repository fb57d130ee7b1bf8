"""A residual network with batch norm: smoothed labels, no decay of norms, rates by the epoch, top-1 and top-5."""

import torch
from digit_images import digit_images
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader

EPOCHS, WARMUP = 5, 2


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.layers = nn.Sequential(Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 2 * width, 1))
        self.fc = nn.Linear(2 * width, 10)

    def forward(self, x):
        return self.fc(self.layers(self.stem(x)).mean((2, 3)))


def loaders():
    train = DataLoader(digit_images(train=True), batch_size=64, shuffle=True, drop_last=True)
    return train, DataLoader(digit_images(train=False), batch_size=64)


def make_optimizer(named_parameters):
    """Weights of norms and biases do not decay."""
    named = list(named_parameters)
    groups = [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 1e-4},
        {"params": [p for _, p in named if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)


def make_scheduler(optimizer):
    warmup = LinearLR(optimizer, start_factor=0.1, total_iters=WARMUP)
    return SequentialLR(optimizer, [warmup, CosineAnnealingLR(optimizer, EPOCHS - WARMUP)], milestones=[WARMUP])


def accuracy(output, target):
    right = output.topk(5).indices == target[:, None]
    return {"top1": right[:, :1].sum(1).float().mean(), "top5": right.sum(1).float().mean()}


def main():
    torch.manual_seed(0)
    net, criterion = ResNet(), nn.CrossEntropyLoss(label_smoothing=0.1)
    torch.manual_seed(0)
    train, val = loaders()
    optimizer = make_optimizer(net.named_parameters())
    scheduler = make_scheduler(optimizer)
    losses, sums = [], {}
    for _ in range(EPOCHS):
        for images, target in train:
            loss = criterion(net(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
    net.eval()
    with torch.no_grad():
        for images, target in val:
            for name, value in accuracy(net(images), target).items():
                sums[name] = sums.get(name, 0.0) + value.item() * len(target)
    return losses, {name: value / len(val.dataset) for name, value in sums.items()}


if __name__ == "__main__":
    print(main())
