"""Which film does whom please: embeddings of users, films and genres beside numbers; batches are dataclasses."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

EPOCHS, USERS, FILMS, GENRES = 3, 50, 40, 8


@dataclass
class Ratings:
    user: Tensor  # [n]
    film: Tensor  # [n]
    genres: Tensor  # [n, 3]
    numbers: Tensor  # [n, 4]
    liked: Tensor  # [n]


class DeepFM(nn.Module):
    """A linear part, one of the products of all pairs of embeddings, and a deep one, as Guo et al. 2017 add them."""

    def __init__(self, width=8):
        super().__init__()
        self.users, self.films = nn.Embedding(USERS, width), nn.Embedding(FILMS, width)
        self.genres = nn.EmbeddingBag(GENRES, width, mode="mean")
        self.numbers = nn.Linear(4, width)
        self.bias = nn.ModuleDict({"user": nn.Embedding(USERS, 1), "film": nn.Embedding(FILMS, 1)})
        self.deep = nn.Sequential(nn.Linear(4 * width, 32), nn.GELU(), nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 1))

    def forward(self, batch):
        numbers = self.numbers(torch.log1p(batch.numbers))
        fields = torch.stack(
            [self.users(batch.user), self.films(batch.film), self.genres(batch.genres), numbers], dim=1
        )
        pairs = 0.5 * (fields.sum(1).square() - fields.square().sum(1)).sum(1)
        linear = self.bias["user"](batch.user) + self.bias["film"](batch.film)
        return (linear + self.deep(fields.flatten(1))).squeeze(1) + pairs


def ratings(count, seed):
    g = torch.Generator().manual_seed(seed)
    user, film = torch.randint(USERS, (count,), generator=g), torch.randint(FILMS, (count,), generator=g)
    genres = torch.stack([film % GENRES, film // 5 % GENRES, film // 7 % GENRES], 1)
    liked = ((user % 3 == film % 3) ^ (user % 5 == 0)).float()
    return Ratings(user, film, genres, torch.rand(count, 4, generator=g) * 10, liked)


class Rows:
    """One rating for each index."""

    def __init__(self, ratings):
        self.ratings = ratings

    def __len__(self):
        return len(self.ratings.user)

    def __getitem__(self, i):
        return Ratings(*(getattr(self.ratings, name)[i] for name in Ratings.__dataclass_fields__))


def collate(rows):
    return Ratings(*(torch.stack([getattr(r, name) for r in rows]) for name in Ratings.__dataclass_fields__))


def loaders():
    train = DataLoader(Rows(ratings(512, 0)), batch_size=64, shuffle=True, collate_fn=collate)
    return train, DataLoader(Rows(ratings(200, 1)), batch_size=64, collate_fn=collate)


def measured(logits, liked):
    return {
        "log_loss": F.binary_cross_entropy_with_logits(logits, liked),
        "accuracy": ((logits > 0) == liked.bool()).float().mean(),
    }


def main():
    torch.manual_seed(0)
    net = DeepFM()
    torch.manual_seed(0)
    train, test = loaders()
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.05)
    losses, sums = [], {"log_loss": 0.0, "accuracy": 0.0}
    for _ in range(EPOCHS):
        for batch in train:
            loss = F.binary_cross_entropy_with_logits(net(batch), batch.liked)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    net.eval()
    with torch.no_grad():
        for batch in test:
            for name, value in measured(net(batch), batch.liked).items():
                sums[name] += value.item() * len(batch.liked)
    return losses, {name: value / len(test.dataset) for name, value in sums.items()}


if __name__ == "__main__":
    print(main())
