"""BERT learns to tell two kinds of sentences apart: batches as long as their longest one, warmup and linear decay."""

import random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    get_linear_schedule_with_warmup,
)

EPOCHS, BATCH, RATE = 2, 8, 3e-3
GOOD, BAD = ["fine", "clever", "warm"], ["dull", "weak", "cold"]
OTHER = ["the", "a", "film", "plot", "was", "and", "its", "cast", "very"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *GOOD, *BAD, *OTHER]


def make_tokenizer():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


def sentences(count, seed):
    """Each of 3 to 19 words, with its label; few are long."""
    draw = random.Random(seed)
    for _ in range(count):
        label = draw.randrange(2)
        words = draw.choices(OTHER, k=draw.choice([2, 3, 4, 5, 6, 7, 12, 18])) + draw.choices(
            GOOD if label else BAD, k=1
        )
        yield " ".join(draw.sample(words, len(words))), label


def loaders():
    tokenizer = make_tokenizer()
    collate = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)
    train, val = (
        [{**tokenizer(text), "labels": label} for text, label in sentences(count, seed)]
        for count, seed in ((160, 0), (80, 1))
    )
    return (
        DataLoader(train, BATCH, shuffle=True, collate_fn=collate, drop_last=True),
        DataLoader(val, BATCH, collate_fn=collate),
    )


def make_model():
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def make_optimizer(named_parameters):
    named, no_decay = list(named_parameters), ("bias", "LayerNorm.weight")
    groups = [
        {"params": [p for n, p in named if not n.endswith(no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if n.endswith(no_decay)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RATE)


def make_scheduler(optimizer):
    return get_linear_schedule_with_warmup(optimizer, num_warmup_steps=3, num_training_steps=EPOCHS * 160 // BATCH)


def main():
    torch.manual_seed(0)
    net = make_model()
    net.train()
    torch.manual_seed(0)
    train, val = loaders()
    optimizer = make_optimizer(net.named_parameters())
    scheduler = make_scheduler(optimizer)
    losses, right = [], 0
    for _ in range(EPOCHS):
        for batch in train:
            loss = net(**batch).loss
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    net.eval()
    for batch in val:
        with torch.no_grad():
            right += (net(**batch).logits.argmax(-1) == batch["labels"]).sum().item()
    return losses, {"accuracy": right / len(val.dataset)}


if __name__ == "__main__":
    print(main())
