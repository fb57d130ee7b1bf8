"""Energies and forces of molecules: the loss has the energy's gradient, so its backward has second derivatives.

    fxpipe compile examples/forces.py -n 2 --verify && fxpipe run build/ --steps 300

torch.compile refuses such a step ("double backward"); fxpipe traces the whole step, so the force is part of the graph.
The data are small clusters under the Lennard-Jones potential.
"""

import torch
from torch import nn
from torch.nn import functional as F

ATOMS, CHANNELS, BLOCKS = 6, 32, 4


class Block(nn.Module):
    """Messages between all pairs of atoms, weighted by a function of their distances (SchNet, Schütt et al. 2017)."""

    def __init__(self, width):
        super().__init__()
        self.filter = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.update = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, x, edges):
        messages = (self.filter(edges) * x.unsqueeze(1)).sum(2)
        return x + self.update(messages)


class Potential(nn.Module):
    """The energy of each molecule from its atoms' positions (molecules, atoms, 3)."""

    def __init__(self, width=CHANNELS, blocks=BLOCKS):
        super().__init__()
        self.atoms = nn.Parameter(torch.randn(ATOMS, width) / width**0.5)
        self.register_buffer("centres", torch.linspace(0.8, 3.0, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, positions):
        distances = pairs(positions)
        edges = torch.exp(-4 * (distances.unsqueeze(-1) - self.centres) ** 2)
        edges = edges * (1 - torch.eye(ATOMS, device=positions.device)).unsqueeze(-1)
        x = self.atoms.expand(len(positions), -1, -1)
        for block in self.blocks:
            x = block(x, edges)
        return self.head(x).sum((1, 2))


def pairs(positions):
    """The distances of all pairs of atoms; of an atom from itself a constant, whose gradient is 0."""
    between = positions.unsqueeze(1) - positions.unsqueeze(2)
    square = (between**2).sum(-1) + torch.eye(ATOMS, device=positions.device)
    return square.sqrt()


def lennard_jones(positions):
    inverse = pairs(positions).reciprocal() ** 6 * (1 - torch.eye(ATOMS))
    return 2 * (inverse**2 - inverse).sum((1, 2))


def model():
    torch.manual_seed(0)
    return Potential()


def loss(model, batch):
    positions, energies, forces = batch
    positions = positions.requires_grad_(True)
    predicted = model(positions)
    (slope,) = torch.autograd.grad(predicted.sum(), positions, create_graph=True)
    return F.mse_loss(predicted, energies) + 10 * F.mse_loss(-slope, forces)


def train_data():
    draw = torch.Generator().manual_seed(0)
    grid = torch.tensor([[i, j, k] for i in range(2) for j in range(2) for k in range(2)], dtype=torch.float32)[:ATOMS]
    while True:
        positions = (1.25 * grid + 0.05 * torch.randn(16, ATOMS, 3, generator=draw)).requires_grad_(True)
        energies = lennard_jones(positions)
        (slope,) = torch.autograd.grad(energies.sum(), positions)
        yield positions.detach(), energies.detach(), -slope


def optimizer(named_parameters):
    return torch.optim.Adam([p for _, p in named_parameters], lr=1e-3)
