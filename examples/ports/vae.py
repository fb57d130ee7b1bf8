"""A variational autoencoder of digits; what it draws comes with the batch, so that trainings can be compared."""

import torch
from digit_images import digit_images
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate

EPOCHS, LATENT = 3, 4


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 48)
        self.fc21, self.fc22 = nn.Linear(48, LATENT), nn.Linear(48, LATENT)
        self.fc3, self.fc4 = nn.Linear(LATENT, 48), nn.Linear(48, 64)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x, noise):
        mu, logvar = self.encode(x.flatten(1))
        return self.decode(mu + noise * torch.exp(0.5 * logvar)), mu, logvar


def parts(recon_x, x, mu, logvar):
    """Of Kingma and Welling 2014, appendix B, summed over the batch: reconstruction, and −½·Σ(1 + log σ² − μ² − σ²)."""
    reconstruction = F.binary_cross_entropy(recon_x, x.flatten(1), reduction="sum")
    return reconstruction, -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def collate(samples):
    images, _ = default_collate(samples)
    return images, torch.randn(len(images), LATENT)


def loaders():
    train = DataLoader(digit_images(train=True), batch_size=32, shuffle=True, collate_fn=collate)
    return train, DataLoader(digit_images(train=False), batch_size=50, collate_fn=collate)


def main():
    torch.manual_seed(0)
    net = VAE()
    torch.manual_seed(0)
    train, test = loaders()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    losses, sums = [], [0.0, 0.0]
    net.train()
    for _ in range(EPOCHS):
        for data, noise in train:
            optimizer.zero_grad()
            recon, mu, logvar = net(data, noise)
            loss = sum(parts(recon, data, mu, logvar))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    net.eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for data, noise in test:
            recon, mu, logvar = net(data, noise)
            sums = [s + part.item() for s, part in zip(sums, parts(recon, data, mu, logvar), strict=True)]
    count = len(test.dataset)
    return losses, {"reconstruction": sums[0] / count, "divergence": sums[1] / count}


if __name__ == "__main__":
    print(main())
