"""`lightswitch.load` gives a model back, ready for inference."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import lightswitch
from lightswitch.errors import UnfitCheckpoint
from lightswitch.export.__main__ import main
from tests.engine.export.conftest import RunOf
from tests.engine.export.models import question


@pytest.mark.parametrize("model", ["tied", "configured"])
def test_a_loaded_model_answers_as_the_live_one(model: str, run_of: RunOf) -> None:
    """A language model under each strategy: test_export.py."""
    run_dir = run_of(model, "fsdp")
    loaded = lightswitch.load(run_dir / "checkpoints" / "last.ckpt")
    logits = loaded(question(loaded))
    assert torch.equal(logits, torch.load(run_dir / "logits.pt"))
    assert not loaded.training
    assert not logits.requires_grad


def test_of_a_run_directory_the_best_checkpoint_is_loaded(run_of: RunOf) -> None:
    run_dir = run_of("language", "single")
    best, of_run = lightswitch.load(run_dir / "checkpoints" / "best.ckpt"), lightswitch.load(str(run_dir))
    assert all(torch.equal(value, of_run.state_dict()[name]) for name, value in best.state_dict().items())


@pytest.mark.parametrize("name", ["tied.safetensors", "tied.pt", "a run"])
def test_tied_weights_stay_tied_inside_a_compiled_module(name: str, run_of: RunOf, tmp_path: Path) -> None:
    path = run_of("tied", "single")
    if name != "a run":
        main([str(path), "-o", str(tmp_path / name)])
        path = tmp_path / name
    net = lightswitch.load(path).net._orig_mod
    assert net[2].there.weight is net[2].back.weight
    assert not net[2].there.weight.requires_grad


def test_tables_that_are_not_saved_go_along_to_another_dtype(run_of: RunOf, tmp_path: Path) -> None:
    main([str(run_of("tied", "single")), "-o", str(tmp_path / "tied.pt"), "--dtype", "bfloat16"])
    model = lightswitch.load(tmp_path / "tied.pt")
    assert model.net._orig_mod[2].angles.dtype == model.dtype == torch.bfloat16
    assert model(question(model).bfloat16()).isfinite().all()


def test_loading_draws_no_initial_weights(run_of: RunOf) -> None:
    run_dir = run_of("language", "single")
    before = torch.get_rng_state()
    lightswitch.load(run_dir)
    assert torch.equal(torch.get_rng_state(), before)


def test_another_model_in_the_config_is_told(run_of: RunOf, tmp_path: Path) -> None:
    shutil.copytree(run_of("language", "single"), tmp_path, dirs_exist_ok=True)
    config = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(config.replace("  width: 32\n", "  width: 64\n"))
    with pytest.raises(
        UnfitCheckpoint, match="was saved from a different model than its config builds: size mismatch for tokens"
    ):
        lightswitch.load(tmp_path)
    (tmp_path / "config.yaml").write_text(config.replace("language.LanguageModel", "language.LanguageModle"))
    with pytest.raises(UnfitCheckpoint, match=r"language\.LanguageModle can't be built from its config: .*Modle"):
        lightswitch.load(tmp_path)


def test_a_truncated_export_is_told(run_of: RunOf, tmp_path: Path) -> None:
    for name in ("language.safetensors", "language.pt"):
        main([str(run_of("language", "single")), "-o", str(tmp_path / name)])
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-1000])
        with pytest.raises(UnfitCheckpoint, match=f"{name} can't be read"):
            lightswitch.load(tmp_path / name)
