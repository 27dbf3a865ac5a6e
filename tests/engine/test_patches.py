"""What the engine sets of other people's is in one table, and is still what it was."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from pkgutil import resolve_name
from types import FunctionType, ModuleType

import pytest
from lightning.pytorch import LightningModule, Trainer

from lightswitch import patches
from lightswitch.errors import RefusedRequest
from lightswitch.patches import PATCHES, SUPPORTED, Patch
from tests.engine.conftest import CHECKOUT

ENGINE = CHECKOUT / "src" / "lightswitch"
SOURCES = {path.relative_to(ENGINE).as_posix(): ast.parse(path.read_text()) for path in sorted(ENGINE.rglob("*.py"))}

# Attributes of classes that the engine patches, set past `patches.replace`: by what is left of the "=", and why.
ALLOWED = {
    "parameter.data": "torch documents it: the values of a tensor, in place",
    "parameter.grad": "torch documents it: a gradient is made, or let go",
    "cfg.trainer.strategy": "a config is data",
    "cfg.ckpt_path": "a config is data",
    "trainer.ckpt_path": "Lightning documents it: the checkpoint that a fit goes on from",
    "trainer.loggers": "Lightning has a setter",
    "self.trainer.loggers": "Lightning has a setter",
    "strategy.precision_plugin": "Lightning has a setter",
    "trainer.strategy.precision_plugin": "Lightning has a setter",
    "trainer.training": "Lightning has a setter",
    "trainer.validating": "Lightning has a setter",
}
SETTING = (  # modules whose functions and classes set attributes of others' objects
    "lightning.pytorch.utilities.parsing",
    "lightning.pytorch.trainer.connectors.callback_connector",
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector",
)


def test_attributes_of_others_are_set_by_replace_alone() -> None:
    """Those that a class has which is in the table, whosever the object is."""
    pytest.importorskip("deepspeed")
    owners = [resolve_name(patch.owner) for patch in PATCHES]
    names = {name for owner in owners if inspect.isclass(owner) for name in dir(owner) if not name.startswith("__")}
    names |= {patch.name for patch in PATCHES}
    found = {}
    for file, tree in SOURCES.items():
        known = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in names]
        written = [ast.unparse(node) for node in known if isinstance(node.ctx, ast.Store | ast.Del)]
        found |= {one: file for one in written if not re.fullmatch(r"(self|cls)\.\w+", one)}
        assert "type: ignore[method-assign" not in (ENGINE / file).read_text(), file
    assert {written: file for written, file in found.items() if written not in ALLOWED} == {}
    assert ALLOWED.keys() - found.keys() == set()


def _replaced() -> set[str]:
    """Names that `replace` is called with; a loop over several writes them beside it."""
    found = set()
    for tree in SOURCES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "patches.replace":
                name = node.args[1]
                found |= {name.value} if isinstance(name, ast.Constant) else {f"<{ast.unparse(name)}>"}
    return found


def test_the_table_lists_what_is_replaced_and_nothing_else() -> None:
    assert _replaced() - {"<name>"} == {patch.name for patch in PATCHES}


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.owner}.{patch.name}")
def test_what_is_replaced_is_what_it_was(patch: Patch) -> None:
    if patch.package == "deepspeed":
        pytest.importorskip("lightswitch.deepspeed.state")
    owner = resolve_name(patch.owner)
    found = inspect.getattr_static(owner, patch.name, None)
    if patch.expected.startswith("("):
        assert patches._parameters(found) == patch.expected
    elif isinstance(owner, ModuleType):
        assert hasattr(owner, patch.name)
    elif found is None:  # its objects get it in a method of the class or of one of its subclasses, or in a function
        beside = [owner, *owner.__subclasses__(), *map(sys.modules.__getitem__, SETTING)]
        assert any(re.search(rf"\n\s+[\w.]+\.{patch.name}(:.*)?( = |\n)", inspect.getsource(place)) for place in beside)


# Methods that the engine's classes override, where the method or its class is private: if a library renamed one, ours
# would never be called.
_PL = "lightning.pytorch"
OVERRIDES = {
    "hydra._internal.hydra.Hydra": ("compose_config", "get_mode", "multirun"),
    f"{_PL}.callbacks.ModelCheckpoint": ("_update_best_and_save",),
    f"{_PL}.loops._FitLoop": (
        "setup_data",
        "skip",
    ),
    f"{_PL}.loops._TrainingEpochLoop": (
        "_should_accumulate",
        "advance",
        "global_step",
        "on_advance_end",
        "on_run_start",
        "update_lr_schedulers",
    ),
    f"{_PL}.loops.optimization.manual._ManualOptimization": ("run",),
    f"{_PL}.strategies.DeepSpeedStrategy": ("_format_config", "_load_config"),
    f"{_PL}.strategies.ModelParallelStrategy": ("_get_process_group_backend",),
    f"{_PL}.strategies.launchers._SubprocessScriptLauncher": ("_call_children_scripts", "launch"),
    f"{_PL}.trainer.connectors.logger_connector.logger_connector._LoggerConnector": (
        "epoch_end_reached",
        "metrics",
        "on_epoch_end",
        "reset_results",
        "should_update_logs",
        "update_eval_step_metrics",
        "update_train_step_metrics",
    ),
    f"{_PL}.trainer.connectors.logger_connector.result._ResultCollection": ("metrics", "update_metrics"),
    f"{_PL}.trainer.connectors.logger_connector.result._ResultMetric": ("to", "update"),
    "torch.amp.GradScaler": ("_unscale_grads_",),
}


def _private_overrides() -> set[str]:
    """Methods of the engine's classes that one of their foreign bases has as well, where name or base is private."""
    pytest.importorskip("deepspeed")
    found = set()
    for file in SOURCES:
        module = importlib.import_module(f"lightswitch.{file.removesuffix('.py').replace('/', '.')}")
        for cls in (cls for cls in vars(module).values() if inspect.isclass(cls) and cls.__module__ == module.__name__):
            methods = (name for name, value in vars(cls).items() if isinstance(value, FunctionType | property))
            for name in (name for name in methods if not name.startswith("__")):
                owner = next((base for base in cls.__mro__[1:] if name in vars(base)), object)
                is_private = any(part.startswith("_") for part in (name, *_path(owner).split(".")))
                if is_private and owner.__module__.partition(".")[0] in PATCHED:
                    found.add(f"{_path(owner)}.{name}")
    return found


PATCHED = {"deepspeed", "hydra", "lightning", "torch", "torchmetrics"}


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def test_private_methods_that_are_overridden_are_listed_and_there() -> None:
    for owner, names in OVERRIDES.items():
        assert not [name for name in names if not hasattr(resolve_name(owner), name)], owner
    listed = {f"{_path(resolve_name(owner))}.{name}" for owner, names in OVERRIDES.items() for name in names}
    assert _private_overrides() == listed


class _Renamed(Trainer):
    """A Trainer of a version that has no `fit_loop`."""

    @property
    def fit_loop(self) -> None:  # type: ignore[override]
        raise AttributeError("fit_loop")


def test_a_name_that_is_gone_is_refused() -> None:
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", enable_progress_bar=False)
    trainer.__class__ = _Renamed
    with pytest.raises(RefusedRequest) as refused:
        patches.replace(trainer, "fit_loop", None)
    (line,) = refused.value.problems
    assert re.fullmatch(
        r"lightning\.pytorch\.Trainer\.fit_loop of lightning \d\S+ is .*, but lightswitch replaces it and "
        r"expects _FitLoop; type pip install 'lightning>=\S+'",
        line,
    )


def test_another_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LightningModule, "training_step", lambda self, name, value: None)
    model = LightningModule()
    with pytest.raises(RefusedRequest, match=r"is \(self, name, value\), but lightswitch replaces it and expects \(s"):
        patches.replace(model, "training_step", print)
    assert "training_step" not in vars(model)


def test_a_class_that_is_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torchmetrics.Metric")
    with pytest.raises(RefusedRequest, match=r"torchmetrics\.Metric\.process_group of torchmetrics \S+ is missing"):
        patches.replace(object(), "process_group", None)


def test_what_is_in_no_table_is_an_error_of_ours() -> None:
    with pytest.raises(LookupError, match="add it there"):
        patches.replace(LightningModule(), "automatic_optimization", False)


def test_an_object_gets_its_class_s_back() -> None:
    model = LightningModule()
    patches.replace(model, "training_step", print)
    assert model.training_step is print
    patches.restore(model, "training_step")
    assert model.training_step == LightningModule.training_step.__get__(model)


def test_the_bounds_are_those_of_pyproject_and_below_a_version_that_was_not_tried() -> None:
    text = (CHECKOUT / "pyproject.toml").read_text()
    assert {patch.package for patch in PATCHES} == SUPPORTED.keys()
    for package, bounds in SUPPORTED.items():
        (found,) = re.findall(rf'"{package}(>=[^";]*)"', text)
        assert found.replace(" ", "") == bounds
        assert "<" in bounds
