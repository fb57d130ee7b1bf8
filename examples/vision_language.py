"""A vision-language model: a tower for pictures, one for questions, and a head that reads both and answers.

The question is which of four patterns is in one of a picture's four corners. The towers read nothing of each other, so
they can run side by side: of three workers, two have one tower each, and the third the head. Plain PyTorch: this file
imports nothing of fxpipe and downloads nothing. From the repository's root:

    fxpipe compile examples/vision_language.py -n 3 -o build/ --verify
    fxpipe inspect build/
    fxpipe run build/ --steps 300
"""

import torch
from torch import nn
from torch.nn import functional as F

PATTERNS = 4
SIZE = 6  # pixels of a corner's side
WORDS = 8  # that there are; a question has six, of which one names the corner
LENGTH = 6
WIDTH = 96
BLOCKS = 3  # of each tower

BATCH = 32  # questions in a minibatch
EPOCH = 400  # minibatches in an epoch
LEARNING_RATE = 1e-3


def blocks(count: int) -> nn.Sequential:
    layers = (nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True) for _ in range(count))
    return nn.Sequential(*layers)


class Vision(nn.Module):
    """Pictures [batch, 1, 12, 12] in, vectors of patches [batch, 16, width] out."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, SIZE // 2, SIZE // 2)
        self.places = nn.Parameter(0.1 * torch.randn(16, WIDTH))
        self.blocks = blocks(BLOCKS)

    def forward(self, pictures):
        return self.blocks(self.patches(pictures).flatten(2).mT + self.places)


class Language(nn.Module):
    """Questions [batch, words] in, vectors of words [batch, words, width] out."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = blocks(BLOCKS)

    def forward(self, questions):
        return self.blocks(self.words(questions))


class VisionLanguage(nn.Module):
    """Pictures and questions in, a score for each answer [batch, patterns] out."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = Vision()
        self.language = Language()
        self.joint = nn.TransformerDecoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.answer = nn.Linear(WIDTH, PATTERNS)

    def forward(self, pictures, questions):
        seen = self.vision(pictures)
        return self.answer(self.joint(self.language(questions), seen).mean(1))


class Questions:
    """Minibatches of (pictures, questions, answers)."""

    def __init__(self, batches: int, seed: int) -> None:
        self.batches = batches
        self.patterns = torch.randn(PATTERNS, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self.batches

    def __iter__(self):
        for _ in range(self.batches):
            shown = torch.randint(PATTERNS, (BATCH, 2, 2), generator=self.generator)
            pictures = self.patterns[shown].permute(0, 1, 3, 2, 4).reshape(BATCH, 1, 2 * SIZE, 2 * SIZE)
            questions = torch.randint(4, WORDS, (BATCH, LENGTH), generator=self.generator)  # words that say nothing
            corner = torch.randint(4, (BATCH,), generator=self.generator)
            questions[:, LENGTH // 2] = corner
            noise = 0.3 * torch.randn(pictures.shape, generator=self.generator)
            yield pictures + noise, questions, shown.flatten(1).gather(1, corner[:, None])[:, 0]


def model():
    return VisionLanguage()


def loss(model, batch):
    pictures, questions, answers = batch
    return F.cross_entropy(model(pictures, questions), answers)


def train_data():
    return Questions(EPOCH, seed=torch.initial_seed())


def optimizer(named_parameters):
    return torch.optim.AdamW(named_parameters, lr=LEARNING_RATE)


def eval_data():
    return list(Questions(5, seed=0))


def metrics(model, batch):
    pictures, questions, answers = batch
    scores = model(pictures, questions)
    return {"loss": F.cross_entropy(scores, answers), "right": (scores.argmax(1) == answers).float().mean()}
