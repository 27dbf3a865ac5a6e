"""Signatures read from source, with nothing imported."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from lightswitch.preflight.signatures import Signature, signature

TABLE = yaml.safe_load(Path(__file__).with_name("signatures.yaml").read_text())


@pytest.fixture(scope="module", autouse=True)
def _package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("sources")
    for name, text in TABLE["files"].items():
        (path := folder / "package" / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="latin-1")
    with pytest.MonkeyPatch.context() as patching:
        patching.syspath_prepend(folder)
        yield


@pytest.mark.parametrize("target", TABLE["read"])
def test_a_signature_tells_what_its_source_shows(target: str) -> None:
    found = signature(f"package.{target}")
    assert found is not None
    assert shown(found) == TABLE["read"][target]


def shown(found: Signature) -> list[str]:
    """Return a signature as the table has it: a line a parameter."""
    lines = []
    for name, of in found.parameters.items():
        kinds = [*sorted(kind.__name__ for kind in of.kinds or ()), *sorted(map(repr, of.literals or ()))]
        default = "" if of.default is None else " = ?" if of.value is None else f" = {of.value!r}"
        is_ = ", required" * (name in found.required) + ", passed on" * (name in found.passed_on)
        lines.append((f"{name}: {' | '.join(kinds)}" if kinds else name) + default + is_)
    return lines + ["**"] * found.open_ended


@pytest.mark.parametrize("target", [*TABLE["unknown"], "math.sqrt", "os.path.join", "torch.nn.Linear", "numpy.array"])
def test_what_the_source_does_not_show_tells_nothing(target: str) -> None:
    """Which it does not of what is bound to something unknown or by code, has no Python source, or came by a star."""
    assert signature(f"package.{target}" if target in TABLE["unknown"] else target) is None


@pytest.mark.parametrize("target", TABLE["errors"])
def test_what_is_not_there_is_an_error(target: str) -> None:
    with pytest.raises(LookupError, match=TABLE["errors"][target]):
        signature(target)


REAL = {
    "lightning.pytorch.Trainer": {"max_steps", "limit_val_batches", "use_distributed_sampler"},
    "lightning.pytorch.callbacks.ModelCheckpoint": {"monitor", "save_last", "enable_version_counter"},
    "lightning.pytorch.loggers.TensorBoardLogger": {"save_dir", "default_hp_metric"},
    "lightning.pytorch.strategies.DDPStrategy": {"start_method", "process_group_backend"},
    "torch.optim.AdamW": {"params", "lr", "betas", "weight_decay"},
    "torch.optim.lr_scheduler.CosineAnnealingLR": {"optimizer", "T_max"},
}


def test_real_classes_tell_the_parameters_that_python_sees_and_nothing_is_imported() -> None:
    script = (
        "import json, sys\nfrom lightswitch.preflight.signatures import signature\n"
        f"found = {{target: sorted(signature(target).parameters) for target in {list(REAL)}}}\n"
        "assert signature('__main__.Net') is None\n"
        "assert not {'torch', 'lightning', 'numpy', 'torchmetrics'} & sys.modules.keys()\n"
        "print(json.dumps(found))"
    )
    for target, found in json.loads(subprocess.check_output([sys.executable, "-c", script])).items():
        module, _, name = target.rpartition(".")
        seen = inspect.signature(getattr(import_module(module), name)).parameters.values()
        assert REAL[target] <= {*found} == {p.name for p in seen if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


def test_the_precisions_of_a_trainer_are_known() -> None:
    found = signature("lightning.pytorch.Trainer")
    assert found is not None
    assert {"16-mixed", "bf16-true", 32} <= (found.parameters["precision"].literals or set())
