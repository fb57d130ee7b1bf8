"""A loop with decisions: it evaluates after every epoch, lowers the rate on a plateau, keeps the best weights, ends."""

import copy

import torch
from digit_images import digit_images
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

EPOCHS, PATIENCE, RATE = 20, 2, 0.05


def make_model():
    layers = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), *layers, nn.Linear(32, 10))


def criterion(net, batch):
    images, labels = batch
    return F.cross_entropy(net(images), labels)


def measured(net, batch):
    images, labels = batch
    scores = net(images)
    return {"loss": F.cross_entropy(scores, labels), "accuracy": (scores.argmax(1) == labels).float().mean()}


def loaders():
    order = torch.Generator().manual_seed(0)  # so that no evaluation changes it
    train = DataLoader(digit_images(train=True), batch_size=64, shuffle=True, drop_last=True, generator=order)
    return train, DataLoader(digit_images(train=False), batch_size=55)


def evaluate(net, loader):
    sums = {}
    net.eval()
    with torch.no_grad():
        for batch in loader:
            for name, value in measured(net, batch).items():
                sums[name] = sums.get(name, 0.0) + value.item() * len(batch[1])
    net.train()
    return {name: value / len(loader.dataset) for name, value in sums.items()}


def main():
    torch.manual_seed(0)
    net = make_model()
    train, val = loaders()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.3, patience=0)
    losses, best, weights, since = [], float("inf"), None, 0
    for _ in range(EPOCHS):
        for batch in train:
            loss = criterion(net, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found = evaluate(net, val)["loss"]
        scheduler.step(found)
        if found < best:
            best, weights, since = found, copy.deepcopy(net.state_dict()), 0
        else:
            since += 1
        if since == PATIENCE:
            break
    net.load_state_dict(weights)
    return losses, {**evaluate(net, val), "rate": optimizer.param_groups[0]["lr"]}


if __name__ == "__main__":
    print(main())
