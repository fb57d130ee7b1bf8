"""scikit-learn's handwritten digits, in place of the images that the originals of these scripts download."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset


def digit_images(train: bool) -> TensorDataset:
    """Images [1, 8, 8] in [0, 1] and their labels: 330 to train on, 110 that are held out."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    chosen = slice(0, 330) if train else slice(330, 440)
    return TensorDataset(images[chosen], labels[chosen])
