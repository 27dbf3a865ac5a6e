"""The GPT that is measured: its size, its operations, and tokens for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

TOKENS = 2**22
CHOICES = Path(__file__).parents[1] / "conf" / "model"


def shape_of(model: str) -> dict[str, Any]:
    """Return what a choice of conf/model says of its size, and what it has from gpt.yaml."""
    whole = OmegaConf.merge(OmegaConf.load(CHOICES / "gpt.yaml"), OmegaConf.load(CHOICES / f"{model}.yaml"))
    left_out = ("_target_", "defaults", "optimizer", "scheduler")
    return {str(key): whole[key] for key in whole if key not in left_out}


def flops_per_token(shape: Mapping[str, int]) -> float:
    """Return the operations of a forward and a backward pass, a token, as nanoGPT's estimate_mfu counts them.

    6 for each parameter that is multiplied with, the tied embedding among them, and 12 × layers × width × context for
    attention (Chowdhery et al. 2022, appendix B).
    """
    layers, width = shape["layers"], shape["width"]
    parameters = 12 * layers * width**2 + shape["vocab_size"] * width
    return 6 * parameters + 12 * layers * width * shape["context"]


def tokens_for(model: str, folder: Path) -> tuple[str, ...]:
    """Write train.bin and val.bin of made-up tokens, and return the switches by which a run reads them."""
    generator = np.random.default_rng(0)
    for name in ("train", "val"):
        tokens = generator.integers(0, shape_of(model)["vocab_size"], TOKENS)
        tokens.astype(np.uint16).tofile(folder / f"{name}.bin")
    return f"model={model}", "data=tokens", f"data.folder={folder}"
