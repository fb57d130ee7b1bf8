"""Recipes that learn from preferences and rewards: two answers, advantages, values, targets that stand still."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from families.recipe import Recipe
from families.recipe_parts import CLASSES, FEATURES, OF_THE_BATCH, SIZE, kept, layers, number
from families.recipe_texts import LENGTH, WORDS, Decoder, masked, present

ATOMS = 7
VARIANCE = "a mean and a deviation over the batch: standardise in train_data()"


class Judged(nn.Module):
    """A policy on texts, and what it was before training."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Decoder()
        self.before = copy.deepcopy(self.policy).requires_grad_(False)
        nn.init.normal_(self.policy.places, std=0.5)


def answers(step: int) -> Any:
    """A better and a worse answer [texts, 2, words], and as numbers which of their words count."""
    ids = torch.randint(3, WORDS, (SIZE, 2, LENGTH))
    return ids, number(torch.stack([present(step), present(step + 3)], 1) & (torch.arange(LENGTH) > 0))


def chances(policy: nn.Module, ids: Tensor) -> Tensor:
    """Of each word after the first: its log probability; [texts, words], 0 for the first."""
    scores = policy(ids)[:, :-1].log_softmax(-1)
    return F.pad(scores.gather(2, ids[:, 1:, None])[..., 0], (1, 0))


def both(model: Any, batch: Any, mean: bool = False) -> tuple[Tensor, Tensor]:
    """How much more likely than before each answer is: [texts, 2]; and the policy's own log probabilities."""
    ids, counts = batch
    own = chances(model.policy, ids.flatten(0, 1)).unflatten(0, (-1, 2)) * counts
    with torch.no_grad():
        before = chances(model.before, ids.flatten(0, 1)).unflatten(0, (-1, 2)) * counts
    by = counts.sum(-1).clamp(min=1) if mean else 1
    return (own - before).sum(-1) / by, own


def dpo(model: Any, batch: Any) -> Tensor:
    """Direct preferences (Rafailov et al., 2023)."""
    more, _ = both(model, batch)
    return -F.logsigmoid(0.5 * (more[:, 0] - more[:, 1])).mean()


def dpo_and_words(model: Any, batch: Any) -> Tensor:
    """With the better answer's words told, as in Llama 3: over the words of the batch."""
    more, own = both(model, batch)
    return -F.logsigmoid(0.5 * (more[:, 0] - more[:, 1])).mean() - 0.2 * own[:, 0].sum() / batch[1][:, 0].sum()


def ipo(model: Any, batch: Any) -> Tensor:
    """Azar et al., 2024."""
    more, _ = both(model, batch, mean=True)
    return (more[:, 0] - more[:, 1] - 1 / 0.2).square().mean()


def orpo(model: Any, batch: Any) -> Tensor:
    """Odds of both answers, without a reference (Hong et al., 2024)."""
    ids, counts = batch
    own = (chances(model.policy, ids.flatten(0, 1)).unflatten(0, (-1, 2)) * counts).sum(-1) / counts.sum(-1).clamp(
        min=1
    )
    own = own.clamp(max=-1e-3)
    odds = own - torch.log1p(-own.exp())
    return -own[:, 0].mean() - 0.1 * F.logsigmoid(odds[:, 0] - odds[:, 1]).mean()


def kto(model: Any, batch: Any) -> Tensor:
    """Ethayarajh et al., 2024: all are measured against the batch's mean."""
    more, _ = both(model, batch)
    usual = more.mean().clamp(min=0).detach()
    return (2 - (more[:, 0] - usual).sigmoid() - (usual - more[:, 1]).sigmoid()).mean()


def rewarded(model: Any, batch: Any) -> Tensor:
    """Bradley and Terry's reward of the last word that counts."""
    ids, counts = batch
    worth = model(ids.flatten(0, 1))[..., 0].unflatten(0, (-1, 2))
    last = (counts * torch.arange(LENGTH)).argmax(-1, keepdim=True)
    worth = worth.gather(2, last)[..., 0]
    return -F.logsigmoid(worth[:, 0] - worth[:, 1]).mean() + 0.01 * worth.square().mean()


class Actor(nn.Module):
    """Words to the next ones' scores and to a value each."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.value = Decoder(), nn.Linear(16, 1)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body.hidden(ids)
        return self.body.head(x), self.value(x)[..., 0]


def lived(step: int) -> Any:
    """Texts, the words that followed, which count, and of these: log probabilities, advantages, returns, values."""
    ids, taken, counts = masked(step)
    told, gained, returned, valued = torch.randn(4, SIZE, LENGTH).unbind(0)
    return ids, taken, counts, -told.abs() - 2, gained * (1 + step), returned, valued


def ppo(model: Any, batch: Any, standard: bool = False) -> Tensor:
    """Schulman et al., 2017, with clipped values and entropy, over the words of the batch."""
    ids, taken, counts, told, gained, returned, valued = batch
    if standard:
        gained = (gained - gained.mean()) / (gained.std() + 1e-8)
    scores, value = model(ids)
    scores = scores.log_softmax(-1)
    ratio = (scores.gather(2, taken[..., None])[..., 0] - told).exp()
    gain = torch.minimum(ratio * gained, ratio.clamp(0.8, 1.2) * gained)
    near = valued + (value - valued).clamp(-0.2, 0.2)
    off = torch.maximum((value - returned).square(), (near - returned).square())
    spread = -(scores.exp() * scores).sum(-1)
    return ((0.5 * off - gain - 0.01 * spread) * counts).sum() / counts.sum()


def grpo(model: Any, batch: Any) -> Tensor:
    """Shao et al., 2024: by answer, then by batch; near to the policy of before."""
    ids, taken, counts, told, gained, *_ = batch
    scores, _ = model(ids)
    own = scores.log_softmax(-1).gather(2, taken[..., None])[..., 0]
    ratio, gained = (own - own.detach()).exp(), gained[:, :1]
    apart = (told - own).exp() - (told - own) - 1
    gain = torch.minimum(ratio * gained, ratio.clamp(0.8, 1.28) * gained) - 0.04 * apart
    return -((gain * counts).sum(1) / counts.sum(1).clamp(min=1)).mean()


def dapo(model: Any, batch: Any) -> Tensor:
    """Yu et al., 2025: over the words of all answers."""
    ids, taken, counts, told, gained, *_ = batch
    ratio = (model(ids)[0].log_softmax(-1).gather(2, taken[..., None])[..., 0] - told).exp()
    gain = torch.minimum(ratio * gained, ratio.clamp(0.8, 1.28) * gained)
    return -(gain * counts).sum() / counts.sum()


def acted(step: int) -> Any:
    """States, actions, rewards, states after these, and as numbers whether that was the end."""
    x, later = torch.randn(2, SIZE, FEATURES).unbind(0)
    return x, torch.randint(0, CLASSES, (SIZE,)), torch.randn(SIZE), later, number(kept(step)), torch.rand(SIZE) + 0.1


def reinforce(model: nn.Module, batch: Any) -> Tensor:
    """Williams, 1992, against the batch's mean reward."""
    x, action, reward, *_ = batch
    own = model(x).log_softmax(-1).gather(1, action[:, None])[:, 0]
    return -((reward - reward.mean()) * own).mean()


class Valued(nn.Module):
    """Values of actions, and those that stand still."""

    def __init__(self, outputs: int = CLASSES) -> None:
        super().__init__()
        self.online = layers(outputs)
        self.target = layers(outputs).requires_grad_(False)


def q_learning(model: Any, batch: Any) -> Tensor:
    """Double Q (van Hasselt et al., 2016), each sample weighed as a replay memory says."""
    x, action, reward, later, ended, weight = batch
    with torch.no_grad():
        best = model.online(later).argmax(1, keepdim=True)
        wanted = reward + 0.9 * (1 - ended) * model.target(later).gather(1, best)[:, 0]
    found = model.online(x).gather(1, action[:, None])[:, 0]
    return (weight * F.smooth_l1_loss(found, wanted, reduction="none")).mean()


def distributed(model: Any, batch: Any) -> Tensor:
    """C51 (Bellemare et al., 2017): a distribution over returns, moved and put onto its atoms again."""
    x, action, reward, later, ended, _ = batch
    atoms = torch.linspace(-2, 2, ATOMS)
    with torch.no_grad():
        after = model.target(later).unflatten(1, (CLASSES, ATOMS)).softmax(-1)
        best = (after * atoms).sum(-1).argmax(1)
        after = after[torch.arange(len(x)), best]
        place = ((reward[:, None] + 0.9 * (1 - ended[:, None]) * atoms).clamp(-2, 2) + 2) / (4 / (ATOMS - 1))
        low = place.floor().clamp(max=ATOMS - 2)
        wanted = torch.zeros_like(after).scatter_add(1, low.long(), after * (low + 1 - place))
        wanted = wanted.scatter_add(1, low.long() + 1, after * (place - low))
    found = model.online(x).unflatten(1, (CLASSES, ATOMS))[torch.arange(len(x)), action].log_softmax(-1)
    return -(wanted * found).sum(-1).mean()


def by_quantile(model: Any, batch: Any) -> Tensor:
    """QR-DQN (Dabney et al., 2018)."""
    x, action, reward, later, ended, _ = batch
    found = model.online(x).unflatten(1, (CLASSES, ATOMS))[torch.arange(len(x)), action]
    with torch.no_grad():
        after = model.target(later).unflatten(1, (CLASSES, ATOMS))
        best = after.mean(-1).argmax(1)
        wanted = reward[:, None] + 0.9 * (1 - ended[:, None]) * after[torch.arange(len(x)), best]
    ways = wanted[:, None] - found[:, :, None]
    share = (torch.arange(ATOMS) + 0.5) / ATOMS
    weight = (share[:, None] - number(ways.detach() < 0)).abs()
    return (weight * F.huber_loss(ways, torch.zeros_like(ways), reduction="none")).sum(1).mean()


class Player(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.critic = layers(2), layers(1, FEATURES + 2)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)


def actor_and_critic(model: Any, batch: Any) -> Tensor:
    """Deterministic policy gradients (Lillicrap et al., 2016): the policy's loss passes a critic that stands."""
    x, _, reward, later, ended, _ = batch
    did = x[:, :2]
    with torch.no_grad():
        wanted = reward + 0.9 * (1 - ended) * model.target(torch.cat([later, model.policy(later).tanh()], 1))[:, 0]
    critic = F.mse_loss(model.critic(torch.cat([x, did], 1))[:, 0], wanted)
    fixed = {name: p.detach() for name, p in model.critic.named_parameters()}
    said = torch.func.functional_call(model.critic, fixed, (torch.cat([x, model.policy(x).tanh()], 1),))
    return critic - 0.5 * said.mean()


def _of(name: str, loss: Any, batch: Any, model: Callable[[], nn.Module], **more: Any) -> Recipe:
    return Recipe(f"recipe_{name}", model, loss, batch, **more)


RECIPES = (
    _of("dpo", dpo, answers, Judged),
    _of("dpo_and_words", dpo_and_words, answers, Judged),
    _of("ipo", ipo, answers, Judged, clip=1.0),
    _of("orpo", orpo, answers, Judged),
    _of("kto", kto, answers, Judged, differs=("mean over the batch|not linear in a", OF_THE_BATCH)),
    _of("reward_model", rewarded, answers, lambda: Decoder(1, tied=False)),
    _of("ppo", ppo, lived, Actor, clip=0.5),
    _of("ppo_standardised", lambda m, b: ppo(m, b, standard=True), lived, Actor, clip=0.5,
        differs=("(?s).", VARIANCE)),
    _of("grpo", grpo, lived, Actor),
    _of("dapo", dapo, lived, Actor, clip=1.0),
    _of("reinforce", reinforce, acted, lambda: layers(CLASSES)),
    _of("double_q", q_learning, acted, Valued),
    _of("distributed_q", distributed, acted, lambda: Valued(CLASSES * ATOMS)),
    _of("quantile_q", by_quantile, acted, lambda: Valued(CLASSES * ATOMS)),
    _of("actor_and_critic", actor_and_critic, acted, Player),
)  # fmt: skip
