"""The examples of conf: every model goes with its data, and every experiment is one that runs."""

from __future__ import annotations

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

CONF = Path(__file__).parents[3] / "conf"
LANGUAGE_DATA = ("python_source", "text", "text_shards", "tokens")
IMAGES = ("digits", "fashion_mnist")


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


LANGUAGE_MODELS = [model for model in choices("model") if model.startswith("gpt")]
PAIRS = [(LANGUAGE_MODELS[0], data) for data in LANGUAGE_DATA] + [("vit", data) for data in IMAGES]
PAIRS += [(model, LANGUAGE_DATA[number % len(LANGUAGE_DATA)]) for number, model in enumerate(LANGUAGE_MODELS[1:])]


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
    assert sum(parameter.numel() for parameter in made.parameters()) > 1e5


COMPLETE = [name for name in choices("experiment") if "???" not in (CONF / "experiment" / f"{name}.yaml").read_text()]


@pytest.mark.parametrize("experiment", COMPLETE)
def test_every_experiment_is_accepted(experiment: str) -> None:
    cfg = composed(f"experiment={experiment}")
    with torch.device("meta"):
        assert isinstance(instantiate(cfg.model, _convert_="all"), pl.LightningModule)


@pytest.mark.parametrize("optimizer", choices("optimizer"))
@pytest.mark.parametrize("scheduler", choices("scheduler"))
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


def test_a_window_longer_than_the_context_is_told_with_what_to_type() -> None:
    model = instantiate(composed("model=gpt").model, _convert_="all")
    model.configure_model()
    with pytest.raises(ValueError, match=r"found a window of 128 tokens.*; set data\.context=64 or model\.context=128"):
        model(torch.zeros(2, 128, dtype=torch.long))


def test_a_choice_that_needs_another_group_is_refused() -> None:
    with pytest.raises(InterpolationKeyError, match=r"data\.image_size"):
        composed("model=vit", "data=python_source")
