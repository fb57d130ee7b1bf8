"""The zoo: every model and every training recipe by its name.

Each file beside this one holds a part of a table: `MODELS`, or `RECIPES`. `core_models` holds the small set that every
engine is tested on. Importing the tables imports torch and no library of models.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from families.core_models import CORE
from families.entry import ZooModel, define_torchvision_ops
from families.recipe import Recipe

__all__ = ["CORE", "FILES", "FILE_OF", "RECIPES", "ZOO", "Recipe", "ZooModel", "define_torchvision_ops"]

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
    "grid_models",
    "expert_models",
    "state_models",
    "layout_models",
    "recipe_texts",
    "recipe_labels",
    "recipe_boxes",
    "recipe_pairs",
    "recipe_rewards",
    "recipe_made",
    "recipe_loops",
    "recipe_optimizers",
)
ZOO: dict[str, ZooModel] = {}
RECIPES: dict[str, Recipe] = {}
FILE_OF: dict[str, Path] = {}  # by the name of a model or a recipe


def _add(file: str) -> None:
    module = importlib.import_module(f"families.{file}")
    for entry in (*getattr(module, "MODELS", ()), *getattr(module, "RECIPES", ())):
        if entry.name in FILE_OF:
            raise ValueError(f"{file} and {FILE_OF[entry.name].stem} both have {entry.name}")
        if not entry.kind:
            raise ValueError(f"{entry.name} in {file} has no kind")
        if isinstance(entry, Recipe):
            RECIPES[entry.name] = entry
        else:
            ZOO[entry.name] = entry
        FILE_OF[entry.name] = FOLDER / f"{file}.py"


for _file in FILES:
    _add(_file)
