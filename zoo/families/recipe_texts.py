"""Recipes on texts: padded in many ways, masked, packed, distilled, tagged, translated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from families.entry import own_loss
from families.recipe import Recipe

SIZE, LENGTH, WORDS, WIDTH, PAD = 8, 7, 23, 16, 0


def lengths(step: int, size: int = SIZE, most: int = LENGTH) -> Tensor:
    """How many words of each text are no padding: more in later microbatches, others each step."""
    return 1 + (torch.arange(size) * (most - 1) // (size - 1) + step) % most


def present(step: int, most: int = LENGTH) -> Tensor:
    """[texts, words]: what is no padding."""
    return torch.arange(most) < lengths(step, most=most)[:, None]


def texts(step: int) -> Tensor:
    """[texts, words], padded."""
    return torch.randint(3, WORDS, (SIZE, LENGTH)).masked_fill(~present(step), PAD)


def pairs(step: int) -> tuple[Tensor, Tensor]:
    """Texts, and for each word the next one, -100 where there is none."""
    ids = texts(step)
    following = torch.cat([ids[:, 1:], torch.full((SIZE, 1), PAD)], 1)
    return ids, following.masked_fill(following == PAD, -100)


def masked(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Texts, a target for each word, and as numbers which of them are no padding."""
    return texts(step), torch.randint(0, WORDS, (SIZE, LENGTH)), present(step).to(torch.get_default_dtype())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = self.project(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask=seen)[:, 0])
        return x + self.wide(x)


class Decoder(nn.Module):
    """Words [texts, length] to the next ones' scores, [texts, length, words]; the scores' weights are the words'."""

    def __init__(self, words: int = WORDS, tied: bool = True, thrifty: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH, padding_idx=PAD), nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head, self.thrifty = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, words, bias=False), thrifty
        nn.init.normal_(self.words.weight, std=0.3)
        if tied:
            self.head.weight = self.words.weight

    def hidden(self, ids: Tensor, seen: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        x = self.words(ids) + (self.places if places is None else self.places[places])
        seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() if seen is None else seen
        for block in self.blocks:
            x = checkpoint(block, x, seen, use_reentrant=False) if self.thrifty else block(x, seen)
        return self.norm(x)

    def forward(self, ids: Tensor, seen: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        return self.head(self.hidden(ids, seen, places))


def likelihood(model: nn.Module, batch: Any, **options: Any) -> Tensor:
    ids, targets = batch
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), **options)


def each(model: nn.Module, batch: Any) -> Tensor:
    """Of every word by itself."""
    return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none")


def shifted(model: nn.Module, ids: Tensor) -> Tensor:
    """As tutorials write it: padding is a word, which the loss ignores."""
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=PAD)


def class_weighted(model: nn.Module, batch: Any) -> Tensor:
    return likelihood(model, batch, weight=model.rarity)


class Rare(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rarity", torch.rand(WORDS) + 0.1)


def masked_mean(model: nn.Module, batch: Any) -> Tensor:
    return (each(model, batch) * batch[2]).sum() / batch[2].sum()


def focal(model: nn.Module, batch: Any) -> Tensor:
    lost = each(model, batch)
    return ((1 - torch.exp(-lost)) ** 2 * lost * batch[2]).sum() / batch[2].sum().clamp(min=1)


def with_z(model: nn.Module, batch: Any) -> Tensor:
    """PaLM's: the scores' normaliser stays near 1."""
    ids, targets = batch
    scores, valid = model(ids), targets != -100
    z = (scores.logsumexp(-1).square() * valid).sum() / valid.sum()
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten()) + 0.01 * z


def mean_of_texts(model: nn.Module, batch: Any) -> Tensor:
    return ((each(model, batch) * batch[2]).sum(1) / batch[2].sum(1)).mean()


def unlikely(model: nn.Module, batch: Any) -> Tensor:
    """Unlikelihood of the words that were there before (Welleck et al., 2020)."""
    ids, targets = batch
    valid = (targets != -100).to(torch.get_default_dtype())
    scores = model(ids).log_softmax(-1)
    told = F.nll_loss(scores.flatten(0, 1), targets.flatten())
    repeated = -torch.log1p(-scores.gather(2, ids[..., None])[..., 0].exp().clamp(max=0.99))
    return told + (repeated * valid).sum() / valid.sum()


def selected(model: nn.Module, batch: Any) -> Tensor:
    return each(model, batch)[batch[2].bool()].mean()


def packed(step: int) -> Any:
    """Several short texts in a row: each word's text, its place there, and the next word of the same."""
    ids = torch.randint(3, WORDS, (SIZE, LENGTH))
    starts = torch.rand(SIZE, LENGTH) < 0.1 + 0.08 * torch.arange(SIZE)[:, None] * (1 + step % 2)
    owner = starts.long().cumsum(1)
    begin = torch.where(starts, torch.arange(LENGTH), 0).cummax(1).values
    targets = torch.where(owner[:, 1:] == owner[:, :-1], ids[:, 1:], -100)
    return ids, owner, torch.arange(LENGTH) - begin, F.pad(targets, (0, 1), value=-100)


def unpacked(model: nn.Module, batch: Any) -> Tensor:
    ids, owner, places, targets = batch
    seen = (owner[:, :, None] == owner[:, None]) & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return F.cross_entropy(model(ids, seen[:, None], places).flatten(0, 1), targets.flatten())


def prefixed(step: int) -> Any:
    ids, targets = pairs(step)
    given = (lengths(step) - 1).clamp(max=3)
    return ids, targets.masked_fill(torch.arange(LENGTH) < given[:, None], -100), given


def after_prefix(model: nn.Module, batch: Any) -> Tensor:
    """A prefix is seen from both sides, and not learned."""
    ids, targets, given = batch
    before = torch.arange(LENGTH) < given[:, None]
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() | before[:, None]
    return F.cross_entropy(model(ids, seen[:, None]).flatten(0, 1), targets.flatten())


class Taught(nn.Module):
    """A student and its teacher, which does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = Decoder().requires_grad_(False)
        self.student = Decoder()


def taught(model: Any, batch: Any) -> Tensor:
    ids, targets = batch
    with torch.no_grad():
        wanted = (model.teacher(ids) / 2).softmax(-1)
    scores, valid = model.student(ids), (targets != -100).to(torch.get_default_dtype())
    apart = F.kl_div((scores / 2).log_softmax(-1), wanted, reduction="none").sum(-1)
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten()) + 4 * (apart * valid).sum() / valid.sum()


class Ahead(Decoder):
    """Three heads, which guess one, two and three words ahead (Gloeckle et al., 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ModuleList(nn.Linear(WIDTH, WORDS) for _ in range(2))


def ahead(model: Any, batch: Any) -> Tensor:
    ids, targets = batch
    x = model.hidden(ids)
    found = F.cross_entropy(model.head(x).flatten(0, 1), targets.flatten())
    for k, head in enumerate(model.more, 1):
        found = found + 0.3 * F.cross_entropy(head(x)[:, :-k].flatten(0, 1), targets[:, k:].flatten())
    return found


class Detector(nn.Module):
    """ELECTRA (Clark et al., 2020): a small generator replaces words, and all are judged."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.judge = Decoder(), Decoder(1, tied=False)


def replaced(model: Any, batch: Any) -> Tensor:
    ids, targets, valid = batch
    scores = model.generator(ids)
    guessed = torch.where(targets != -100, scores.argmax(-1), ids)
    wrong = (guessed != ids).to(torch.get_default_dtype())
    judged = F.binary_cross_entropy_with_logits(model.judge(guessed)[..., 0], wrong, reduction="none")
    told = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
    return told + 5 * (judged * valid).sum() / valid.sum()


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=PAD)
        self.body = nn.Transformer(WIDTH, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        later = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        nothing = source == PAD
        x = self.body(
            self.words(source), self.words(target), tgt_mask=later, tgt_is_causal=True,
            src_key_padding_mask=nothing, memory_key_padding_mask=nothing,
        )  # fmt: skip
        return self.head(x)


def translated(model: nn.Module, batch: Any) -> Tensor:
    source, target = batch
    scores = model(source, target[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD, label_smoothing=0.1)


class Tagger(nn.Module):
    """Words [texts, length] to tags' scores, under a conditional random field (Lample et al., 2016)."""

    def __init__(self, tags: int = 4) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(WORDS, WIDTH, padding_idx=PAD), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head, self.moves = nn.Linear(WIDTH, tags), nn.Parameter(torch.randn(tags, tags) * 0.1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.words(ids))[0])


def by_field(model: Any, batch: Any) -> Tensor:
    """Less the log likelihood of the tags, for each word that is no padding."""
    ids, tags, valid = batch
    scores = model(ids)
    own = (scores.gather(2, tags[..., None])[..., 0] * valid).sum(1)
    own = own + (model.moves[tags[:, :-1], tags[:, 1:]] * valid[:, 1:]).sum(1)
    every = scores[:, 0]
    for step in range(1, LENGTH):
        further = (every[:, :, None] + model.moves + scores[:, step, None]).logsumexp(1)
        every = torch.where(valid[:, step, None] > 0, further, every)
    return (every.logsumexp(1) - own).sum() / valid.sum()


def tagged(step: int) -> Any:
    ids, tags, valid = masked(step)
    return ids, tags % 4, valid


def spans(step: int) -> Any:
    """Where answers begin and end; beyond the last word if there is none, as transformers writes it."""
    return texts(step), *torch.randint(0, LENGTH + 3, (2, SIZE)).unbind(0)


def spanned(model: nn.Module, batch: Any) -> Tensor:
    ids, *wanted = batch
    found = [
        F.cross_entropy(scores, place.clamp(0, LENGTH), ignore_index=LENGTH)
        for scores, place in zip(model(ids).unbind(-1), wanted, strict=True)
    ]
    return (found[0] + found[1]) / 2


class Recurrent(nn.Module):
    """Words with time first, [length, texts]."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.words(ids))[0])


def transposed(step: int) -> Any:
    ids, targets = pairs(step)
    return ids.t().contiguous(), targets.t().contiguous()


def _transformer(name: str, **options: Any) -> nn.Module:
    from check import quiet
    from transformers import AutoConfig, BertForPreTraining, GPT2LMHeadModel, T5ForConditionalGeneration

    small: dict[str, Any] = {
        "gpt2": {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": LENGTH, "vocab_size": WORDS,
                 "bos_token_id": 1, "eos_token_id": 2},
        "bert": {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
                 "vocab_size": WORDS, "max_position_embeddings": LENGTH},
        "t5": {"d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": WORDS,
               "decoder_start_token_id": PAD, "pad_token_id": PAD},
    }  # fmt: skip
    kinds: dict[str, Any] = {"gpt2": GPT2LMHeadModel, "bert": BertForPreTraining, "t5": T5ForConditionalGeneration}
    config = AutoConfig.for_model(name, **small[name], use_cache=False, **options)
    model: nn.Module = kinds[name](config).train()
    quiet(model)
    return model


def _library(name: str, step: int) -> Any:
    ids, targets = pairs(step)
    valid = present(step).long()
    batch = {"input_ids": ids, "attention_mask": valid, "labels": ids.masked_fill(valid == 0, -100)}
    if name == "bert":
        batch["labels"] = targets
        batch["next_sentence_label"] = torch.randint(0, 2, (SIZE,))
    return batch


def _counted(step: int) -> Any:
    """As transformers' Trainer gives it: the words to be guessed, counted over the batch."""
    batch = _library("gpt2", step)
    return {**batch, "num_items_in_batch": (batch["labels"][:, 1:] != -100).sum()}


def perplexity(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"log_perplexity": likelihood(model, batch)}


def _on_texts(name: str, loss: Any, batch: Callable[[int], Any] = pairs, model: Any = Decoder, **more: Any) -> Recipe:
    return Recipe(f"recipe_{name}", model, loss, batch, **more)


RECIPES = (
    _on_texts("padded_words", shifted, texts),
    _on_texts("ignored_words", likelihood),
    _on_texts("label_smoothing", functools.partial(likelihood, label_smoothing=0.1)),
    _on_texts("class_weights", class_weighted, model=Rare),
    _on_texts("masked_mean", masked_mean, masked),
    _on_texts("masked_focal", focal, masked),
    _on_texts("z_loss", with_z),
    _on_texts("mean_of_texts", mean_of_texts, masked),
    _on_texts("summed_words", lambda m, b: likelihood(m, b, reduction="sum") / SIZE),
    _on_texts("unlikelihood", unlikely),
    _on_texts(
        "selected_words", selected, masked,
        refused=("shape", "how many words are selected depends on their values; `masked_mean` is the same loss"),
    ),
    _on_texts("packed_texts", unpacked, packed),
    _on_texts("prefix", after_prefix, prefixed),
    _on_texts("word_distillation", taught, model=Taught),
    _on_texts("multi_token", ahead, model=Ahead),
    _on_texts("electra", replaced, lambda step: (*pairs(step), masked(step)[2]), Detector),
    _on_texts("translation", translated, lambda step: (texts(step), texts(step + 2)), Translator),
    _on_texts("random_field", by_field, tagged, Tagger),
    _on_texts("named_entities", likelihood, lambda step: (texts(step), pairs(step)[1].clamp(max=3)), lambda: Tagger()),
    _on_texts("answer_spans", spanned, spans, lambda: Decoder(2, tied=False)),
    _on_texts("time_first", likelihood, transposed, Recurrent),
    _on_texts("checkpointing", likelihood, model=lambda: Decoder(thrifty=True)),
    _on_texts("perplexity", likelihood, metrics=perplexity),
    _on_texts("bf16", likelihood, autocast="bf16", double=False, tolerance=2e-2),
    *(
        _on_texts(name, own_loss, batch, functools.partial(_transformer, kind), double=False, needs=("transformers",))
        for name, kind, batch in (
            ("gpt2_padded", "gpt2", functools.partial(_library, "gpt2")),
            ("gpt2_counted_words", "gpt2", _counted),
            ("bert_two_tasks", "bert", functools.partial(_library, "bert")),
            ("t5_padded", "t5", functools.partial(_library, "t5")),
        )
    ),
)  # fmt: skip
