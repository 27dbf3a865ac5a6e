"""Small models, and a stock Trainer that leaves nothing behind."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from project.models.gpt import GPT
from project.models.vit import VisionTransformer

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


@pytest.fixture
def gpt() -> Callable[..., GPT]:
    def build(seed: int = 0, **options: Any) -> GPT:
        torch.manual_seed(seed)
        sizes = {"vocab_size": 11, "context": 8, "layers": 2, "heads": 2, "width": 16, "init_std": 0.2}
        model = GPT(**{"optimizer": ADAMW, **sizes, **options})
        model.configure_model()
        return model

    return build


@pytest.fixture
def vit() -> Callable[..., VisionTransformer]:
    def build(seed: int = 0, **options: Any) -> VisionTransformer:
        torch.manual_seed(seed)
        sizes = {"image_size": 8, "patches_per_side": 2, "classes": 3, "layers": 2, "heads": 2, "width": 16}
        return VisionTransformer(**{"optimizer": ADAMW, **sizes, **options})

    return build


@pytest.fixture
def trainer(tmp_path: Any) -> Callable[..., Trainer]:
    return partial(
        Trainer,
        accelerator="cpu",
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
