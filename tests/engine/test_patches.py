"""What the engine sets of other people's is in one table, and is still what it was."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pkgutil import resolve_name
from types import FunctionType, ModuleType

import pytest
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy

from lightswitch import patches
from lightswitch.errors import ChangedDependency
from lightswitch.patches import OVERRIDES, PATCHES, SUPPORTED, Patch
from tests.engine.conftest import CHECKOUT

ENGINE = CHECKOUT / "src" / "lightswitch"
SOURCES = {path.relative_to(ENGINE).as_posix(): ast.parse(path.read_text()) for path in sorted(ENGINE.rglob("*.py"))}

# Attributes set past `patches.replace`, by what is written left of the "=", and why.
ALLOWED = {
    "parameter.data": "torch documents it: the values of a tensor, in place",
    "parameter.grad": "torch documents it: a gradient is let go",
    "tensor.data": "torch documents it: the values of a tensor, which are in a file",
    "tensor.ds_id": "of a tensor that the engine makes: the name by which DeepSpeed finds its file",
    "holder.cell_contents": "Python documents it: what a function closes over",
    "cfg.optimizer.lr": "a config is data",
    "other.optimizer.lr": "a config is data",
    "cfg.trainer.strategy": "a config is data",
    "cfg.ckpt_path": "a config is data",
    "cfg.seed": "a config is data",
    "of_job.run_id": "a config is data",
    "cfg.resume": "a config is data",
    "cfg.micro_batch_size": "a config is data",
    "sys.excepthook": "Python documents it: as it was before torch set it",
    "threading.excepthook": "Python documents it: who is told of a thread's error",
    "process.disk_error": "of Process, the engine's",
    "logger.propagate": "Python's logging documents it",
    "limit.daemon": "threading.Timer takes it in no other way",
    "timer.daemon": "threading.Timer takes it in no other way",
    "stopped.code": "SystemExit documents it, and it is Stopped, the engine's",
    "self.precision_plugin.autocasts": "of ZeroPrecision, the engine's",
    "self.precision_plugin.steps_by_hand": "of ZeroPrecision, the engine's",
    "os.environ": "Python documents it: a process that becomes a run has the environment of one",
    "self.report.folder": "of CrashReport, the engine's",
    "strategy.ranks_hear_of_failures": "of PortableCheckpoints, the engine's",
    "run.process.crash_folder": "of Process, the engine's",
    "self.run.process.crash_folder": "of Process, the engine's",
    "self.process.failure_file": "of Process, the engine's",
    "run.process.refusal": "of Process, the engine's",
    "config.frequency": "Lightning documents it: how often a schedule steps",
    "trainer.ckpt_path": "Lightning documents it: the checkpoint that a fit goes on from",
    "model.trainer": "Lightning documents it: how a module is given its Trainer",
    "trainer.should_stop": "Lightning documents it: how a callback ends training",
    "results.before": "of Results, the engine's",
    "results.of_batch": "of Results, the engine's",
    "unused.world_size": "of Unused, the engine's",
    "self._step_logs.weight": "of StepLogs, the engine's",
    "self.config_loader.cfg": "of _Composed, the engine's",
    "strategy.on_data": "of HookedStrategy, the engine's",
    "strategy.loss_weight": "of HookedStrategy, the engine's",
    "self.epoch_loop.val_loop.restarting": "as Lightning's own loop sets it, of a run that resumes within an epoch",
    "self.val_loop.restarting": "as Lightning's own loop sets it, at the first batch after a resume",
    "generator.bit_generator.state": "NumPy documents it: how a generator is seeded again",
    "undivided.num_replicas": "of a copy of the user's sampler",
    "undivided.rank": "of a copy of the user's sampler",
    "undivided.num_samples": "of a copy of the user's sampler",
    "undivided.total_size": "of a copy of the user's sampler",
    "whole.sampler": "of a copy of the user's batch sampler",
    "rank.position": "of RankState, the engine's",
    "rank.ended": "of RankState, the engine's",
}
# Whose public properties with a setter are set as they are: by the last name left of the attribute
WITH_SETTERS: dict[str, type] = {"trainer": Trainer, "strategy": Strategy}
_STATES = "torchmetrics documents it: a metric's states"
CALLS_ALLOWED = {
    "setattr(target, name, value)": "patches.replace itself",
    "object.__setattr__(target, name, value)": "patches.replace itself",
    "vars(target).pop(name, None)": "patches.restore itself",
    "setattr(part, name, replaced[parameter])": "torch documents it: how a module is given another parameter",
    "setattr(part, name, broadcast_tensor(buffer, device))": "torch documents it: how a module is given another buffer",
    "vars(part).update(tree_map_only(Tensor, lambda tensor: _fake(tensor, fake, replaced), kept))": (
        "a module's tensors, wherever it keeps them, by others of the same shapes"
    ),
    "delattr(module, name)": "a parameter that was registered here, and keeps a group's place while an engine is made",
    "made.__dict__.update(parameter.__dict__)": "marks of the user's, onto a parameter made here",
    "vars(getattr(part, name)).update(attributes)": "marks of the user's, onto what stands in for their parameter",
    "self.__dict__.update(state)": "its own, when it is unpickled",
    "vars(metric).update(state)": "of a metric, or a value that was logged: as it was before a forward pass",
    "vars(item).update(before)": "of a value that was logged: as it was",
    "vars(item).update(_attributes(whole, item.value, self._share))": "of a logged value: as all ranks have it",
    "setattr(metric, name, _without(getattr(metric, name), before) if is_cat else before)": _STATES,
    "setattr(metric, name, [])": _STATES,
    "setattr(metric, name, reduction(whole) if whole and callable(reduction) else whole)": _STATES,
    "vars(self).update(dataset=dataset, cursor=cursor)": "of Reader, the engine's, past its own __setattr__",
    "vars(self).update(dataset=dataset, seed=seed, _kept=KeptGenerators((dataset, collate_fn)))": (
        "of SeededSamples, the engine's, past its own __setattr__"
    ),
    "super().__setattr__(name, vars(self).get('_shown', {}).get(name, value))": "of RankLoader, the engine's",
    "setattr(self.dataset, name, value)": "a hook or a worker_init_fn sets it, on the user's dataset",
    "setattr(self.base, name, value)": "a hook sets it, on the user's sampler",
    "super().__setattr__(name, value)": "of TrainingSlices, the engine's",
    "setattr(sys, name, os.fdopen(number, 'w' if number else 'r'))": "Python documents it: its own streams",
    "modules.setdefault('mlflow', None)": "Python documents it: None hides a module while another is imported",
}
SETTING = (  # modules whose functions and classes set attributes of others' objects
    "lightning.pytorch.utilities.parsing",
    "lightning.pytorch.trainer.connectors.callback_connector",
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector",
)
SETTERS = re.compile(
    r"(set|del)attr\(|.*\.__(set|del)attr__\(|(vars\(.*\)|.*\.__dict__|(sys\.)?modules)\.(update|pop|setdefault)\("
)


def _targets(tree: ast.AST) -> Iterator[ast.expr]:
    """What is assigned to, or deleted, in any way that the language has."""
    for node in ast.walk(tree):
        context = getattr(node, "ctx", None)
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(context, ast.Store | ast.Del):
            yield node


def _own_names(tree: ast.Module) -> set[str]:
    """Names in a file whose values are declared, or made, as objects of the engine's own classes."""
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightswitch"):
            classes |= {alias.asname or alias.name for alias in node.names if alias.name[0].isupper()}
    own = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None and _root(node.annotation) in classes:
            own.add(node.arg)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _root(node.value.func) in classes:
            own |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return own


def _root(node: ast.expr) -> str:
    return re.split(r"[^\w]", ast.unparse(node))[0]


def _has_setter(target: ast.Attribute) -> bool:
    """Whether it is a public property that its class lets be set."""
    owner = WITH_SETTERS.get(ast.unparse(target.value).rpartition(".")[2], object)
    declared = inspect.getattr_static(owner, target.attr, None)
    return isinstance(declared, property) and declared.fset is not None and not target.attr.startswith("_")


def _foreign_targets(tree: ast.Module) -> Iterator[str]:
    own = {"self", "cls", *_own_names(tree)}
    for target in _targets(tree):
        if isinstance(target, ast.Attribute):
            if not (isinstance(target.value, ast.Name) and target.value.id in own) and not _has_setter(target):
                yield ast.unparse(target)
        elif isinstance(target, ast.Subscript) and re.search(r"__dict__|vars\(|modules", ast.unparse(target.value)):
            yield ast.unparse(target)


def test_attributes_of_others_are_set_by_replace_alone() -> None:
    for file, tree in SOURCES.items():
        found = set(_foreign_targets(tree)) - ALLOWED.keys() - {"modules['mlflow']"}
        assert not found, f"{file}: use lightswitch.patches.replace"
        calls = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert {call for call in calls if SETTERS.match(call)} <= CALLS_ALLOWED.keys(), file
        assert "type: ignore[method-assign" not in (ENGINE / file).read_text(), file


def test_the_guard_sees_every_way_of_setting() -> None:
    written = (
        "trainer.max_steps = 1\nself.strategy.x, y = 1, 2\ndel model.log\nfor loop.count in range(3): pass\n"
        "vars(model)['log'] = 1\nsys.modules['x'] = None\nstrategy.n += 1\nwith open(p) as trainer.file: pass\n"
    )
    assert set(_foreign_targets(ast.parse(written))) == {
        *("trainer.max_steps", "self.strategy.x", "model.log", "loop.count", "vars(model)['log']"),
        *("sys.modules['x']", "strategy.n", "trainer.file"),
    }


def test_only_a_public_property_with_a_setter_is_set_as_it_is() -> None:
    written = "trainer.loggers = []\nself.trainer.strategy.precision_plugin = p\n"
    assert not set(_foreign_targets(ast.parse(written)))
    refused = "trainer.strategy = s\nstrategy.launcher = x\nmodel.loggers = []\ntrainer._loggers = []\n"  # of no setter
    assert len(set(_foreign_targets(ast.parse(refused)))) == 4


def test_nothing_is_allowed_that_is_not_there() -> None:
    written = {ast.unparse(node) for tree in SOURCES.values() for node in (*_targets(tree), *ast.walk(tree))
               if isinstance(node, ast.Attribute | ast.Call)}  # fmt: skip
    assert not (ALLOWED.keys() | CALLS_ALLOWED.keys()) - written


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
    in_a_loop = {"_WORLD_GROUP"}  # lightswitch.planning.fakes
    in_a_loop |= {"TORCH_AUTOCAST_INITIALIZED", "TORCH_AUTOCAST_DTYPE"}
    in_a_loop |= {"limit_test_batches", "limit_predict_batches"}  # lightswitch.batches.evaluation
    in_a_loop |= {"assert_lst_len_same_as_other_ranks", "get_lst_from_rank0"}
    assert _replaced() - {"<name>"} == {patch.name for patch in PATCHES} - in_a_loop


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.owner}.{patch.name}")
def test_what_is_replaced_is_what_it_was(patch: Patch) -> None:
    if patch.package == "deepspeed":
        pytest.importorskip("lightswitch.deepspeed.quiet_import")
    owner = resolve_name(patch.owner)
    found = inspect.getattr_static(owner, patch.name, None)
    if patch.expected.startswith("("):
        assert patches._parameters(found) == patch.expected
    elif isinstance(owner, ModuleType):
        assert hasattr(owner, patch.name)
    elif found is None:  # its objects get it in a method of the class or of one of its subclasses, or in a function
        beside = [owner, *owner.__subclasses__(), *map(sys.modules.__getitem__, SETTING)]
        assert any(re.search(rf"\n\s+[\w.]+\.{patch.name}(:.*)?( = |\n)", inspect.getsource(place)) for place in beside)


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
    """A Trainer of a version that has no `val_check_batch`."""

    @property
    def val_check_batch(self) -> None:  # type: ignore[override]
        raise AttributeError("val_check_batch")


def test_a_name_that_is_gone_is_refused() -> None:
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", enable_progress_bar=False)
    trainer.__class__ = _Renamed
    with pytest.raises(ChangedDependency) as refused:
        patches.replace(trainer, "val_check_batch", 1)
    (line,) = refused.value.problems
    assert re.fullmatch(
        r"lightning\.pytorch\.Trainer\.val_check_batch of lightning \d\S+ is .*, but lightswitch replaces it and "
        r"expects int \| float \| None; type pip install 'lightning>=\S+'",
        line,
    )


def test_another_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LightningModule, "log", lambda self, name, value: None)
    model = LightningModule()
    with pytest.raises(
        ChangedDependency, match=r"is \(self, name, value\), but lightswitch replaces it and expects \(s"
    ):
        patches.replace(model, "log", print)
    assert "log" not in vars(model)


def test_a_class_that_is_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torchmetrics.Metric")
    with pytest.raises(ChangedDependency, match=r"torchmetrics\.Metric\.process_group of torchmetrics \S+ is missing"):
        patches.replace(object(), "process_group", None)


def test_what_is_in_no_table_is_an_error_of_ours() -> None:
    with pytest.raises(LookupError, match="add it there"):
        patches.replace(LightningModule(), "automatic_optimization", False)


def test_an_object_gets_its_class_s_back() -> None:
    model = LightningModule()
    patches.replace(model, "log", print)
    assert model.log is print
    patches.restore(model, "log")
    assert model.log == LightningModule.log.__get__(model)


def test_the_table_in_the_docs_is_of_this_code() -> None:
    page = (CHECKOUT / "docs" / "architecture.md").read_text()
    printed = subprocess.check_output([sys.executable, "-m", "lightswitch.patches"], text=True)
    between = re.search(r"<!-- patches -->\n(.*?)<!-- /patches -->", page, re.DOTALL)
    assert between is not None
    assert between[1].strip() == printed.strip(), "type: python -m lightswitch.patches, and put it into the page"


def test_the_bounds_are_those_of_pyproject() -> None:
    text = (CHECKOUT / "pyproject.toml").read_text()
    for package, bounds in SUPPORTED.items():
        (found,) = re.findall(rf'"{package}(>=[^";]*)"', text)
        assert found.replace(" ", "") == bounds


def test_what_is_patched_is_below_a_version_that_was_not_tried() -> None:
    assert {patch.package for patch in PATCHES} == SUPPORTED.keys()
    assert all("<" in bounds and ">=" in bounds for bounds in SUPPORTED.values())
