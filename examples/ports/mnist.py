"""Handwritten digits with a small convolutional network: Adadelta, and a rate that falls after every epoch."""

import torch
from digit_images import digit_images
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

EPOCHS = 4


class Net(nn.Module):
    """Without dropout, so that two trainings can be compared."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        return F.log_softmax(self.fc2(x), dim=1)


def loaders():
    """The last batch of both is smaller."""
    train = DataLoader(digit_images(train=True), batch_size=64, shuffle=True)
    return train, DataLoader(digit_images(train=False), batch_size=50)


def train(net, loader, optimizer):
    net.train()
    losses = []
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(net(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test(net, loader):
    net.eval()
    test_loss = correct = 0
    with torch.no_grad():
        for data, target in loader:
            output = net(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += (output.argmax(dim=1) == target).sum().item()
    count = len(loader.dataset)
    return {"loss": test_loss / count, "accuracy": correct / count}


def main():
    torch.manual_seed(0)
    net = Net()
    torch.manual_seed(0)
    train_loader, test_loader = loaders()
    optimizer = torch.optim.Adadelta(net.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    losses = []
    for _ in range(EPOCHS):
        losses += train(net, train_loader, optimizer)
        scheduler.step()
    return losses, test(net, test_loader)


if __name__ == "__main__":
    print(main())
