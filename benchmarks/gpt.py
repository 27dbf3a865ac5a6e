"""The GPT of the benchmarks: its size, its operations, and tokens to train it on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

TOKENS = 2**22
CHOICES = Path(__file__).parents[1] / "conf" / "model"


def shape_of(model: str) -> dict[str, Any]:
    """Return the size of a model in conf/model, including the values that it inherits from gpt.yaml."""
    whole = OmegaConf.merge(OmegaConf.load(CHOICES / "gpt.yaml"), OmegaConf.load(CHOICES / f"{model}.yaml"))
    left_out = ("_target_", "defaults", "optimizer", "scheduler")
    return {str(key): whole[key] for key in whole if key not in left_out}


def flops_per_token(shape: Mapping[str, int]) -> float:
    """Return the operations per token of a forward and a backward pass, counted as in nanoGPT's estimate_mfu.

    They are 6 for each parameter in a matrix product, including the tied embedding, and 12 × layers × width × context
    for attention (Chowdhery et al. 2022, appendix B).
    """
    layers, width = shape["layers"], shape["width"]
    parameters = 12 * layers * width**2 + shape["vocab_size"] * width
    return 6 * parameters + 12 * layers * width * shape["context"]


def tokens_for(model: str, folder: Path) -> tuple[str, ...]:
    """Write train.bin and val.bin with random tokens, and return the overrides for a run that reads them."""
    generator = np.random.default_rng(0)
    for name in ("train", "val"):
        tokens = generator.integers(0, shape_of(model)["vocab_size"], TOKENS)
        tokens.astype(np.uint16).tofile(folder / f"{name}.bin")
    return f"model={model}", "data=tokens", f"data.folder={folder}"
