"""A config that lies beside weights builds a model from the user's own code, and calls nothing else unasked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

import lightswitch
from lightswitch.config.hydra_versions import register_resolver
from lightswitch.errors import Refused, UnfitCheckpoint
from lightswitch.export.__main__ import main
from tests.engine.checkpoints import hostile
from tests.engine.plain import PlainModel

FOREIGN = """
os.system builtins.eval subprocess.run functools.partial pickle.loads importlib.import_module hydra.utils.instantiate
torch.load torch.hub.load torch.nn.functional.torch.load torch.nn.Module.load_state_dict numpy.load __main__.Model
torch.optim.optimizer.functools.partial lightswitch.load lightning.pytorch.LightningModule nowhere.Model
tests.engine.plain.os.system tests.engine.plain.PlainModel.load_from_checkpoint tests.engine.doctor.test_doctor.asked_of
tests.engine.plain.PlainModel.__init__.__globals__ tests.engine.checkpoints.hostile.pickle.loads
"""
OWN: dict[str, Any] = {"_target_": "tests.engine.plain.PlainModel"}
NESTED: list[Callable[[str], dict[str, Any]]] = [
    lambda target: {"_target_": target},
    lambda target: {**OWN, "lr": {"_target_": target}},
    lambda target: {**OWN, "lr": {"a": [1, {"b": {"_target_": target, "_partial_": True}}]}},
]


def export_of(folder: Path, node: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(PlainModel().state_dict(), folder / "x.safetensors")
    OmegaConf.save(OmegaConf.create(node), folder / "x.safetensors.yaml")
    return folder / "x.safetensors"


@pytest.mark.parametrize("target", FOREIGN.split())
def test_what_is_not_the_users_own_is_refused_by_its_name(target: str, tmp_path: Path) -> None:
    for nested in NESTED:
        path = export_of(tmp_path, nested(target))
        with pytest.raises(Refused) as refused:
            lightswitch.load(path)
        assert str(refused.value) == (
            f"{path}.yaml builds its model with {target}, which is no class of your own code; "
            "lightswitch.load(path, model=MyModel(...)) does not run it, and trust=True does"
        )


def test_of_a_run_from_elsewhere_too(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    hostile.ours(tmp_path / "checkpoints" / "last.ckpt")
    (tmp_path / "config.yaml").write_text(f"model:\n  _target_: os.mkdir\n  path: {ran}\n")
    with pytest.raises(Refused, match=r"config\.yaml builds its model with os\.mkdir"):
        lightswitch.load(tmp_path)
    assert not ran.exists()
    with pytest.raises(UnfitCheckpoint, match=r"os\.mkdir builds a NoneType, not a LightningModule"):
        lightswitch.load(tmp_path, trust=True)
    assert ran.exists()


@pytest.mark.parametrize("value", ["${called:}", "\\${called:}", "${oc.env:${called:}}", "${oc.env:A}${called:}"])
def test_no_interpolation_but_of_a_variable_is_resolved(value: str, tmp_path: Path) -> None:
    called = []
    register_resolver("called", lambda: called.append(1))
    path = export_of(tmp_path, {**OWN, "width": {"a": value}})
    with pytest.raises(Refused, match=r"builds its model with .*\$\{"):
        lightswitch.load(path)
    OmegaConf.clear_resolver("called")
    assert not called


def test_what_else_is_loaded(tmp_path: Path) -> None:
    """Torch's optimizers, schedules and layers; all else with trust, or into a model of one's own."""
    parts = {"optimizer": "torch.optim.AdamW", "schedule": "torch.optim.lr_scheduler.StepLR", "act": "torch.nn.GELU"}
    node = {name: {"_target_": target, "_partial_": True} for name, target in parts.items()}
    assert lightswitch.load(export_of(tmp_path, {**OWN, "lr": node})).hparams.lr["act"].func is torch.nn.GELU
    path = export_of(tmp_path, {**OWN, "lr": {"_target_": "builtins.float", "_args_": [0.1]}})
    trusted, own = lightswitch.load(path, trust=True), lightswitch.load(path, model=PlainModel())
    assert torch.equal(trusted.net[0].weight, own.net[0].weight)
    assert not trusted.training
    stock = hostile.ours(tmp_path / "x.ckpt")  # without a config
    assert isinstance(lightswitch.load(stock, model=PlainModel()), PlainModel)
    told = "was saved from a different model than the one given: size mismatch for net"
    with pytest.raises(UnfitCheckpoint, match=told):
        lightswitch.load(stock, model=PlainModel(width=3))


CODE = "from tests.engine.plain import PlainModel\n\nclass Model(PlainModel):\n    pass\n"


PLACES = {  # where the code lies and where the weights do, and whether they are loaded
    "a project, and its export": ("project/src", "project", True),
    "a project, and its run": ("project/src", "project/runs/x", True),
    "a flat project, and its run": ("project", "project/runs/x", True),
    "beside the weights": ("download", "download", False),
    "around the weights": ("project", "project/{name}/weights", False),
    "installed": ("venv/lib/site-packages", "project", False),
}


@pytest.mark.parametrize("place", PLACES)
def test_code_is_the_users_own_by_where_it_lies(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, weights, loaded = PLACES[place]
    name = f"code_{list(PLACES).index(place)}"
    (tmp_path / code / name).mkdir(parents=True)
    (tmp_path / code / name / "__init__.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path / code)
    path = export_of(tmp_path / weights.format(name=name), {"_target_": f"{name}.Model"})
    if loaded:
        assert type(lightswitch.load(path)).__module__ == name
        return
    with pytest.raises(Refused, match=f"builds its model with {name}.Model"):
        lightswitch.load(path)
    assert name not in sys.modules  # it was not even imported


def test_an_export_builds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = tmp_path / "ran"
    hostile.ours(tmp_path / "checkpoints" / "last.ckpt", names_of_tied={})
    (tmp_path / "config.yaml").write_text(f"model:\n  _target_: os.mkdir\n  path: {ran}\n")
    for name in ("out.pt", "out.safetensors"):
        main([str(tmp_path), "-o", str(tmp_path / name)])
        told = capsys.readouterr()
        assert (told.out.splitlines()[-1], told.err) == (
            f'load       model = lightswitch.load("{tmp_path / name}")',
            "",
        )
    assert not ran.exists()


def test_a_config_with_aliases_is_refused_before_it_is_expanded(tmp_path: Path) -> None:
    path = export_of(tmp_path, OWN)
    lists = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 12)]
    text = "\n".join(["_target_: tests.engine.plain.PlainModel", "l0: &l0 [1]", *lists])
    (tmp_path / "x.safetensors.yaml").write_text(text)
    with pytest.raises(UnfitCheckpoint, match="it has YAML aliases, which runs never write"):
        lightswitch.load(path)
