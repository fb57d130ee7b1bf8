"""An encoder-decoder learns to turn sentences round: padding on both sides, labels of -100 there, smoothed labels."""

import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

PAD, BOS, EOS, WORDS = 0, 1, 2, 20
EPOCHS, WIDTH, LONGEST, WARMUP = 2, 32, 12, 10


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(WORDS, WIDTH, padding_idx=PAD), nn.Embedding(LONGEST, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 2 * WIDTH, 0.0, "gelu", batch_first=True)
        self.generator = nn.Linear(WIDTH, WORDS)

    def forward(self, src, tgt):
        def embedded(x):
            return self.embed(x) + self.positions(torch.arange(x.size(1)))

        mask = nn.Transformer.generate_square_subsequent_mask(tgt.size(1)).isinf()
        out = self.transformer(
            embedded(src),
            embedded(tgt),
            tgt_mask=mask,
            tgt_is_causal=True,
            src_key_padding_mask=src == PAD,
            tgt_key_padding_mask=tgt == PAD,
            memory_key_padding_mask=src == PAD,
        )
        return self.generator(out)


def pairs(count, seed):
    draw = random.Random(seed)
    for _ in range(count):
        words = [draw.randrange(3, WORDS) for _ in range(draw.randint(2, LONGEST - 2))]
        yield words, words[::-1]


def collate(samples):
    """Everything as long as the longest sentence may be; labels are -100 where there is no word."""

    def padded(rows, value):
        rows = [torch.tensor(row) for row in rows]
        return pad_sequence([*rows, torch.zeros(LONGEST)], True, value)[:-1].long()

    return {
        "src": padded([[*source, EOS] for source, _ in samples], PAD),
        "tgt": padded([[BOS, *target] for _, target in samples], PAD),
        "labels": padded([[*target, EOS] for _, target in samples], -100),
    }


def loader(count, seed, shuffle):
    return DataLoader(list(pairs(count, seed)), batch_size=16, shuffle=shuffle, collate_fn=collate)


def criterion(net, batch):
    logits = net(batch["src"], batch["tgt"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100, label_smoothing=0.1)


def noam(step):
    return WARMUP**0.5 * min((step + 1) ** -0.5, (step + 1) * WARMUP**-1.5)


def main():
    torch.manual_seed(0)
    net = Seq2Seq()
    torch.manual_seed(0)
    train, val = loader(256, 0, shuffle=True), loader(72, 1, shuffle=False)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3, betas=(0.9, 0.98), eps=1e-9)
    scheduler = LambdaLR(optimizer, noam)
    losses, total, words = [], 0.0, 0
    for _ in range(EPOCHS):
        for batch in train:
            loss = criterion(net, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    net.eval()
    with torch.no_grad():
        for batch in val:
            count = (batch["labels"] != -100).sum().item()
            total, words = total + criterion(net, batch).item() * count, words + count
    return losses, {"loss": total / words}


if __name__ == "__main__":
    print(main())
