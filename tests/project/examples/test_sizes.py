"""The parameters of each size in conf/model, counted on the meta device, with the arithmetic beside them."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

CONF = Path(__file__).parents[3] / "conf"


def gpt2(layers: int, width: int) -> int:
    """Embeddings; two norms, attention and an MLP of 4 × width a layer; the last norm. The head is tied."""
    norm = 2 * width
    attention = width * 3 * width + 3 * width + width * width + width
    mlp = width * 4 * width + 4 * width + 4 * width * width + width
    return 50257 * width + 1024 * width + layers * (2 * norm + attention + mlp) + norm


SIZES = {
    # bytes; 2 norms, attention and 3 matrices of 64 × 192 a layer; the last norm
    "gpt": 256 * 64 + 2 * (2 * 64 + 4 * 64 * 64 + 3 * 64 * 192) + 64,
    "gpt2": gpt2(12, 768),
    "gpt2_medium": gpt2(24, 1024),
    "gpt2_large": gpt2(36, 1280),
    "gpt2_xl": gpt2(48, 1600),
    # embedding and head; 2 norms, attention and 3 matrices of 4096 × 11008 a layer; the last norm
    "gpt_7b": 2 * 32000 * 4096 + 32 * (2 * 4096 + 4 * 4096 * 4096 + 3 * 4096 * 11008) + 4096,
    # patches of 4 × 4 pixels; positions; 2 norms, attention and an MLP with biases a layer; the last norm; the head
    "vit": 16 * 64 + 64 + 16 * 64 + 3 * (2 * 128 + 4 * 64 * 65 + 64 * 256 + 256 + 256 * 64 + 64) + 128 + 64 * 10 + 10,
}
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "gpt_7b": 6_738_415_616,
}


@pytest.mark.parametrize("name", SIZES)
def test_a_size_has_its_parameters(name):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(
            overrides=["+trainer=default", "+data=digits", f"+model={name}", "+optimizer=adamw", "+scheduler=constant"]
        )
    with torch.device("meta"):
        model = instantiate(cfg.model)
        model.configure_model()
    assert sum(p.numel() for p in model.parameters()) == SIZES[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_arithmetic_gives_the_published_size(name):
    assert SIZES[name] == PUBLISHED[name]
