"""A language model of bytes with an LSTM: time comes first in its batches, and gradients are clipped."""

import inspect
import textwrap

import torch
from torch import nn

BATCH, BPTT, CLIP = 8, 12, 0.25


class RNNModel(nn.Module):
    """Its state is zero where a batch begins."""

    def __init__(self, ninp=24, nhid=24, nlayers=2):
        super().__init__()
        self.encoder = nn.Embedding(256, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers)
        self.decoder = nn.Linear(nhid, 256)
        self.decoder.weight = self.encoder.weight  # tied

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return tuple(weight.new_zeros(self.rnn.num_layers, bsz, self.rnn.hidden_size) for _ in range(2))

    def forward(self, tokens):
        output, _ = self.rnn(self.encoder(tokens), self.init_hidden(tokens.size(1)))
        return self.decoder(output)


def batchify(train):
    """The text of a module of Python in BATCH columns, one for training and another for validation."""
    data = torch.tensor(list(inspect.getsource(textwrap if train else inspect).encode())[: 3000 if train else 800])
    nbatch = data.size(0) // BATCH
    return data[: nbatch * BATCH].view(BATCH, -1).t().contiguous()


def batches(source):
    """Each BPTT steps of time, and the same one byte later."""
    for i in range(0, source.size(0) - BPTT, BPTT):
        yield source[i : i + BPTT], source[i + 1 : i + 1 + BPTT]


def criterion(output, targets):
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def main():
    torch.manual_seed(0)
    net = RNNModel()
    optimizer = torch.optim.SGD(net.parameters(), lr=2.0)
    losses, held_out = [], []
    for data, targets in batches(batchify(train=True)):
        net.zero_grad()
        loss = criterion(net(data), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    net.eval()
    with torch.no_grad():
        for data, targets in batches(batchify(train=False)):
            held_out.append(criterion(net(data), targets).item())
    return losses, {"loss": sum(held_out) / len(held_out)}


if __name__ == "__main__":
    print(main())
