"""An optimizer of your own: SOAP, Adam in the eigenbasis of Shampoo's preconditioner, on the byte-level GPT of gpt.py.

It bears stale weights well ("basis rotation": arXiv 2602.03515). It looks at each parameter alone, so that each worker
may have one, which compile is told, and its groups say by `betas` that it has momentum, so that error feedback (+ef)
accepts it. This file is plain PyTorch and imports nothing of fxpipe. From the repository's root:

    fxpipe compile examples/soap.py -n 4 --microbatches 4 --accept-optimizer-per-worker -o build/
    fxpipe run build/
"""

import torch
from gpt import eval_data, loss, lr_scheduler, metrics, model, train_data

__all__ = ["eval_data", "loss", "lr_scheduler", "metrics", "model", "optimizer", "train_data"]

LEARNING_RATE = 3e-3


class SOAP(torch.optim.Optimizer):
    """Adam, for each matrix, in the eigenbases of the moving averages of G·Gᵀ and Gᵀ·G.

        L ← β·L + (1−β)·G·Gᵀ,  R ← β·R + (1−β)·Gᵀ·G,  β = shampoo_beta
        M ← β₁·M + (1−β₁)·G;   G̃ = QLᵀ·G·QR;   V ← β₂·V + (1−β₂)·G̃²
        W ← W − lr·QL·(QLᵀ·M·QR / (√V + ε))·QRᵀ, with Adam's corrections of the bias

    Every `frequency` steps QL and QR follow the eigenvectors of L and R: one power iteration, then QR; the first are
    exact. A dimension longer than `longest`, such as a large vocabulary, is not turned: where none is, and for what is
    no matrix, this is AdamW.

    From: Vyas et al. 2024 (SOAP), arXiv 2409.11321.
    """

    def __init__(
        self,
        params,
        lr=3e-3,
        betas=(0.9, 0.95),
        shampoo_beta=0.95,
        eps=1e-8,
        weight_decay=0.01,
        frequency=10,
        longest=512,
    ):
        options = {"lr": lr, "betas": betas, "shampoo_beta": shampoo_beta, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "frequency": frequency, "longest": longest})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group, self.state[parameter])

    def _step(self, parameter, gradient, group, state):
        if not state:
            sides = parameter.shape if parameter.dim() == 2 else (0, 0)
            turn = [0 < side <= group["longest"] for side in sides]
            state["moments"] = [parameter.new_zeros(n, n) if yes else None for n, yes in zip(sides, turn, strict=True)]
            state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["step"], state["bases"] = 0, [None, None]
        for dim, moment in enumerate(state["moments"]):
            if moment is not None:
                side = gradient.mT if dim else gradient
                moment.lerp_(side @ side.mT, 1 - group["shampoo_beta"])
        if state["step"] % group["frequency"] == 0:
            self._follow(state)
        state["step"] += 1

        first, second = group["betas"]
        mean, square, bases = state["mean"], state["square"], state["bases"]
        mean.lerp_(gradient, 1 - first)
        square.lerp_(into(gradient, bases).square(), 1 - second)
        size = (square / (1 - second ** state["step"])).sqrt_().add_(group["eps"])
        way = out_of(into(mean, bases) / size, bases)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(way, alpha=-group["lr"] / (1 - first ** state["step"]))

    def _follow(self, state):
        """Turn the bases towards the moments' eigenvectors, the largest first; V keeps their order."""
        for dim, (moment, basis) in enumerate(zip(state["moments"], state["bases"], strict=True)):
            if moment is None:
                continue
            if basis is None:
                state["bases"][dim] = torch.linalg.eigh(moment).eigenvectors.flip(1)
                continue
            order = torch.linalg.vecdot(basis, moment @ basis, dim=0).argsort(descending=True)
            state["square"] = state["square"].index_select(dim, order)
            state["bases"][dim] = torch.linalg.qr(moment @ basis[:, order]).Q


def into(matrix, bases):
    """QLᵀ·matrix·QR; a basis that is None is the identity."""
    left, right = bases
    matrix = matrix if left is None else left.mT @ matrix
    return matrix if right is None else matrix @ right


def out_of(matrix, bases):
    """QL·matrix·QRᵀ."""
    left, right = bases
    matrix = matrix if left is None else left @ matrix
    return matrix if right is None else matrix @ right.mT


def optimizer(named_parameters):
    return SOAP([parameter for _, parameter in named_parameters], lr=LEARNING_RATE, weight_decay=0.1)
