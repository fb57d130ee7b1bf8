"""The zoo: every model by its name.

Each file beside this one holds a part of the table, `MODELS`; `core_models` holds the small set that every engine is
tested on. Importing the table imports torch and no library of models.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from families.core_models import CORE
from families.entry import ZooModel, define_torchvision_ops

__all__ = ["CORE", "FILES", "FILE_OF", "ZOO", "ZooModel", "define_torchvision_ops"]

FOLDER = Path(__file__).parent
FILES = (
    "own_models",
    "recipe_models",
    "recurrent_models",
    "torchvision_models",
    "timm_models",
    "diffusion_models",
    "causal_models",
    "masked_models",
    "sequence_models",
    "vision_models",
    "audio_models",
    "multimodal_models",
    "expert_models",
    "state_models",
    "layout_models",
)
ZOO: dict[str, ZooModel] = {}
FILE_OF: dict[str, Path] = {}  # by the model's name


def _add(file: str) -> None:
    for entry in importlib.import_module(f"families.{file}").MODELS:
        if entry.name in ZOO:
            raise ValueError(f"{file} and {FILE_OF[entry.name].stem} both have a model {entry.name}")
        if not entry.kind:
            raise ValueError(f"{entry.name} in {file} has no kind")
        ZOO[entry.name] = entry
        FILE_OF[entry.name] = FOLDER / f"{file}.py"


for _file in FILES:
    _add(_file)
