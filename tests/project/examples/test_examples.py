"""The examples of conf: every model goes with its data, trains alike on two devices, and every experiment composes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError

from lightswitch.cluster import placement
from lightswitch.launch.hydra_entry import register_resolvers
from lightswitch.preflight import targets
from tests.project.promises import CONF, SMALLER, WITNESS, choices
from tests.runs import Train

LANGUAGE_DATA = ("python_source", "text", "text_shards", "tokens")
IMAGES = ("digits", "fashion_mnist")


LANGUAGE_MODELS = [model for model in choices("model") if model.startswith("gpt")]
PAIRS = [(LANGUAGE_MODELS[0], data) for data in LANGUAGE_DATA] + [("vit", data) for data in IMAGES]
PAIRS += [(model, LANGUAGE_DATA[number % len(LANGUAGE_DATA)]) for number, model in enumerate(LANGUAGE_MODELS[1:])]
SIZES = {  # as published; or bytes, and images
    **{"gpt2": 124_439_808, "gpt2_medium": 354_823_168, "gpt2_large": 774_030_080, "gpt2_xl": 1_557_611_200},
    "gpt_7b": 6_738_415_616,
    # 2 norms, attention and 3 matrices of 64 × 192 a layer; the last norm
    "gpt": 256 * 64 + 2 * (2 * 64 + 4 * 64 * 64 + 3 * 64 * 192) + 64,
    # patches of 4 × 4 pixels; positions; 2 norms, attention and an MLP with biases a layer; the last norm; the head
    "vit": 16 * 64 + 64 + 16 * 64 + 3 * (2 * 128 + 4 * 64 * 65 + 64 * 256 + 256 + 256 * 64 + 64) + 128 + 64 * 10 + 10,
}
TRAINED = {  # of each kind, with data that need no files
    "gpt": ("data=python_source", "model.width=32", "scheduler=constant"),
    "vit": ("data=digits", "scheduler=constant"),
    "hf_causal_lm": (  # DoRA takes the norms of whole weights
        *(
            "data=python_source",
            *(word for word in SMALLER["hf_causal_lm"] if "lora" not in word),
            "scheduler=constant",
        ),
        "model.lora={r: 4, alpha: 8, target_modules: [c_attn, c_proj], use_dora: true}",
    ),
}


@pytest.fixture(autouse=True)
def _conf(tmp_path: Path) -> Iterator[None]:
    register_resolvers(placement.detect())
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield
    HydraConfig.instance().cfg = None


def composed(*overrides: str) -> DictConfig:
    """The config as train.py would get it, of which preflight has nothing to say."""
    cfg = compose("config", [*overrides, "run_id=x", "hydra.runtime.output_dir=x"], return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    OmegaConf.set_struct(cfg, False)
    del cfg["hydra"]
    plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert list(targets.problems(plain, plain.keys())) == []
    return cfg


def files_for(data: str, folder: Path) -> list[str]:
    """The override that names the files which data needs, once they are written."""
    if data in ("text", "text_shards"):
        for number in range(3):
            (folder / f"{number}.txt").write_text("It was a bright cold day in April. " * 3000)
        return [f"data.{'files' if data == 'text' else 'sources'}={folder}/*.txt"]
    if data == "tokens":
        for split in ("train", "val"):
            (np.arange(30_000, dtype=np.uint16) % 256).tofile(folder / f"{split}.bin")
        return [f"data.folder={folder}"]
    if data == "fashion_mnist":
        for name, magic in (("images-idx3", b"\0\0\x08\x03"), ("labels-idx1", b"\0\0\x08\x01")):
            for split in ("train", "t10k"):
                (folder / f"{split}-{name}-ubyte").write_bytes(magic)
        return [f"data.folder={folder}"]
    return []


@pytest.mark.parametrize(("model", "data"), PAIRS)
def test_every_model_goes_with_the_data_of_its_kind(model: str, data: str, tmp_path: Path) -> None:
    cfg = composed(f"model={model}", f"data={data}", *files_for(data, tmp_path))
    assert isinstance(instantiate(cfg.data, _convert_="all"), pl.LightningDataModule)
    with torch.device("meta"):  # 27 GB of weights in gpt_7b
        made = instantiate(cfg.model, _convert_="all")
        made.configure_model()
        assert made.configure_optimizers()
    assert isinstance(made, pl.LightningModule)
    if model in SIZES and data != "fashion_mnist":  # whose patches are larger
        assert sum(parameter.numel() for parameter in made.parameters()) == SIZES[model]


@pytest.mark.parametrize("model", TRAINED)
def test_an_example_trains_the_same_steps_on_one_device_and_on_two(model: str, train: Train) -> None:
    if model.startswith("hf_") and not os.environ.get("LIGHTSWITCH_REQUIRE_ALL"):
        pytest.importorskip("peft")
    words = (*WITNESS, f"model={model}", *TRAINED[model], "trainer.accelerator=cpu", "global_batch_size=8")
    words += ("trainer.max_steps=3", "trainer.log_every_n_steps=1")
    words += ("trainer.limit_val_batches=1", "trainer.limit_test_batches=1")  # of each device: other samples
    alone, pair = train(*words, "strategy=single"), train(*words, "strategy=fsdp", ranks=2)
    assert pair.column("train/loss") == pytest.approx(alone.column("train/loss"), abs=1e-5)


COMPLETE = [name for name in choices("experiment") if "???" not in (CONF / "experiment" / f"{name}.yaml").read_text()]


@pytest.mark.parametrize("experiment", COMPLETE)
def test_every_experiment_is_accepted(experiment: str) -> None:
    cfg = composed(f"experiment={experiment}")
    with torch.device("meta"):
        assert isinstance(instantiate(cfg.model, _convert_="all"), pl.LightningModule)


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [*((name, "cosine") for name in choices("optimizer")), *(("sgd", name) for name in choices("scheduler"))],
)
def test_every_optimizer_and_scheduler_fits_a_model(optimizer: str, scheduler: str) -> None:
    model = instantiate(
        composed("model=gpt", f"optimizer={optimizer}", f"scheduler={scheduler}").model, _convert_="all"
    )
    model.configure_model()
    assert model.configure_optimizers().keys() == {"optimizer", "lr_scheduler"}


def test_images_given_to_a_language_model_are_told_by_what_it_takes() -> None:
    model = instantiate(composed("model=gpt").model, _convert_="all")
    model.configure_model()
    with pytest.raises(
        ValueError, match=r"expected token ids \(batch, time\), as from data=python_source, text or text_shards"
    ):
        model(torch.zeros(2, 1, 8, 8))


def test_a_choice_that_needs_another_group_is_refused() -> None:
    with pytest.raises(InterpolationKeyError, match=r"data\.image_size"):
        composed("model=vit", "data=python_source")
