"""Every attribute of Hydra, Lightning, torch, torchmetrics and DeepSpeed that the engine sets, with the reason.

After a library renames an attribute, setting the old name has no effect and raises no error. So all assignments go
through `replace`, which raises if the attribute is missing or has changed. `python -m lightswitch.patches` prints the
table as Markdown.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from lightswitch.errors import RefusedRequest

# The patched packages, and the versions that the tests ran with. pyproject.toml has the same bounds, with the reasons.
SUPPORTED = {
    "hydra-core": ">=1.3.2,<1.5",
    "lightning": ">=2.6.0,!=2.6.2,!=2.6.3,<2.7",
    "torch": ">=2.8,<2.16",
    "torchmetrics": ">=1.4,<1.10",
    "deepspeed": ">=0.19.7,<0.20",
}
_MISSING = object()
_NONE = inspect.Parameter.empty


# The table below is in one file, although long: whoever raises a version reads all of it.


@dataclass(frozen=True)
class Patch:
    """A library attribute that the engine sets.

    Attributes:
        owner: dotted path of the class or module.
        expected: the attribute in the tested versions: the parameters of a function, as "(self, name)", or the types
            of a value, as "int | None".
        why: the replacement, and why there is no other way.
        for_process: whether it is set on the owner itself, for the whole process, instead of on one object of a class.
    """

    owner: str
    name: str
    expected: str
    why: str
    for_process: bool = False

    @property
    def package(self) -> str:
        return {"hydra": "hydra-core"}.get(module := self.owner.partition(".")[0], module)


_HOOKS = "skips empty hooks, which cost a small model's step more time than its arithmetic"

PATCHES = (
    Patch(
        "hydra._internal.hydra",
        "Hydra",
        "type",
        "composes a run's config once, and prints the table of a sweep that ends early: main takes no other class",
        for_process=True,
    ),
    Patch(
        "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
        "launch",
        "(self, job_overrides, initial_job_idx)",
        "jobs of a sweep run at once, and the table has those that were not begun: Hydra's launcher waits for each",
        for_process=True,
    ),
    Patch(
        "lightning.pytorch.Trainer",
        "save_checkpoint",
        "(self, filepath, weights_only, storage_options)",
        "puts off a save that a hook asks for to the moment before the next step, so that it can be resumed from",
    ),
    Patch(
        "lightning.pytorch.Trainer",
        "fit_loop",
        "_FitLoop",
        "loops that recompute less in each batch, and end a run that is resumed with no step left to train",
    ),
    Patch(
        "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector",
        "register_signal_handlers",
        "(self)",
        "does nothing: Lightning's handlers save and broadcast whenever a signal arrives, and can't be disabled",
    ),
    Patch(
        "lightning.pytorch.Trainer",
        "_logger_connector",
        "_LoggerConnector",
        "combines what ranks and micro-batches log, each for its share of the samples, before loggers get it",
    ),
    Patch(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
        "post_backward",
        "(self, *unused)",
        "gives zeros to the parameters of a unit that this rank has not used, before its gradients are reduced",
    ),
    Patch(
        "lightning.pytorch.callbacks.BaseFinetuning",
        "filter_on_optimizer",
        "(optimizer, params)",
        "compares parameters by identity: Lightning's compares values, which omits a layer initialized like another, "
        "and fails if some parameters are sharded and others are not",
        for_process=True,
    ),
    *(
        Patch("lightning.pytorch.trainer.call", name, expected, _HOOKS, for_process=True)
        for name, expected in {
            "_call_callback_hooks": "(trainer, hook_name, *args, monitoring_callbacks, **kwargs)",
            "_call_lightning_module_hook": "(trainer, hook_name, *args, pl_module, **kwargs)",
            "_call_strategy_hook": "(trainer, hook_name, *args, **kwargs)",
        }.items()
    ),
    Patch(
        "lightning.pytorch.LightningModule",
        "training_step",
        "(self, *args, **kwargs)",
        "is compiled itself: a compiled __call__ would take effect only where a strategy calls the module",
    ),
    Patch(
        "lightning.pytorch.LightningModule",
        "_device_mesh",
        "DeviceMesh | None",
        "the mesh with up to three dimensions: ModelParallelStrategy sets one with two",
    ),
    Patch(
        "torch.utils.data._utils.worker",
        "_worker_info",
        "WorkerInfo | None",
        "hidden while a worker reads a stream: a dataset that splits itself over workers then yields all samples",
        for_process=True,
    ),
    Patch(
        "torch.nn.Module",
        "forward",
        "(self, *input)",
        "recomputes activations inside the hooks that gather the unit; torch's wrapper renames parameters",
    ),
    Patch(
        "torch.distributed.tensor.DTensor",
        "data",
        "getset_descriptor",
        "parameter.data = … writes to the shard: torch accepts the assignment, but leaves the shard unchanged",
        for_process=True,
    ),
    Patch(
        "torch.distributed.tensor._dispatch.OpDispatcher",
        "_custom_op_handlers",
        "dict",
        "item() of a DTensor reads its value: torch reads the rank's part of it, such as the norm of a shard",
    ),
    Patch(
        "torch._dynamo.config",
        "optimize_ddp",
        "bool",
        "compiled units are not split where DDP's buckets end: each has a separate backward pass, after which "
        "gradients are sent",
        for_process=True,
    ),
    Patch(
        "torchmetrics.Metric",
        "process_group",
        "ProcessGroup | None",
        "devices that share a layer have read the same samples, and count once",
    ),
    Patch(
        "lightning.pytorch.trainer.connectors.logger_connector.result._ResultCollection",
        "batch_size",
        "int | None",
        "weights what an evaluation logs by its samples: Lightning takes the first dimension of the first tensor",
    ),
    Patch(
        "torchmetrics.Metric",
        "_sync_dist",
        "(self, dist_sync_fn, process_group)",
        "gathers lists of entries whole: torchmetrics gathers entry by entry, and waits for ever if ranks have more "
        "than others",
        for_process=True,
    ),
    Patch("torchmetrics.Metric", "_update_count", "int", "marks a restored metric as updated"),
    Patch(
        "torchmetrics.detection.mean_ap.MeanAveragePrecision",
        "_gather_tuple_list",
        "(list_to_gather, process_group)",
        "does nothing: its lists are gathered whole, while this method leaves out entries of ranks that have more",
    ),
    Patch(
        "deepspeed.DeepSpeedEngine",
        "_broadcast_model",
        "(self)",
        "does nothing: weights are already broadcast, and the method fails for scalar parameters",
        for_process=True,
    ),
    Patch(
        "deepspeed.runtime.base_optimizer.ZeROOptimizer",
        "custom_loss_scaler",
        "bool",
        "ends a scale that is of one step, whose gradients are divided by its number of items",
    ),
)  # fmt: skip


def replace(target: Any, name: str, value: object) -> None:
    """Set a library attribute that PATCHES lists, on an object, a class or a module.

    Raises:
        RefusedRequest: the attribute is missing, or differs from the tested versions.
        LookupError: PATCHES does not list it.
    """
    patch = _patch_of(target, name)
    found = _found(patch, target)
    if not _is_ours(found) and not _fits(found, patch.expected):
        raise RefusedRequest([_complaint(patch, f"is {_described(found)}")])
    if isinstance(target, type | ModuleType):
        setattr(target, name, value)
    else:
        object.__setattr__(target, name, value)  # past a __setattr__ that refuses, as DataLoader's does


def restore(target: Any, name: str) -> None:
    """Remove an attribute from an object, so that its class's attribute applies again."""
    vars(target).pop(name, None)


def _patch_of(target: Any, name: str) -> Patch:
    named = [patch for patch in PATCHES if patch.name == name]
    for patch in named:
        if patch.owner.partition(".")[0] not in sys.modules:  # not imported, so target can't be one of its objects
            continue
        try:
            owner = resolve_name(patch.owner)
        except (AttributeError, ImportError) as error:
            raise RefusedRequest([_complaint(patch, f"is missing ({error})")]) from error
        if target is owner if patch.for_process else isinstance(target, owner):
            return patch
    raise LookupError(f"{name} of {target!r} is not in lightswitch.patches.PATCHES; add it there")


def _found(patch: Patch, target: Any) -> Any:
    """Return the function that the owner declares, which a user's subclass may override; else the object's value."""
    declared = inspect.getattr_static(resolve_name(patch.owner), patch.name, _MISSING)
    if inspect.isfunction(declared):
        return declared
    return getattr(target, patch.name, declared)


def _fits(found: Any, expected: str) -> bool:
    if expected.startswith("("):
        return inspect.isfunction(found) and _parameters(found) == expected
    if found is _MISSING:
        return False
    names = {"None" if cls is type(None) else cls.__name__ for cls in type(found).__mro__}
    return not names.isdisjoint(expected.split(" | "))


def _is_ours(found: Any) -> bool:
    return str(getattr(found, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


def _parameters(function: Any) -> str:
    """Return a function's parameters without annotations and defaults: "(self, name, *arguments)"."""
    parameters = inspect.signature(function).parameters.values()
    return f"({', '.join(str(parameter.replace(annotation=_NONE, default=_NONE)) for parameter in parameters)})"


def _described(found: Any) -> str:
    if found is _MISSING:
        return "missing"
    return _parameters(found) if inspect.isfunction(found) else f"a {type(found).__name__}"


def _complaint(patch: Patch, found: str) -> str:
    version = versions([patch.package]).get(patch.package, "of an unknown version")
    supported = f"{patch.package}{SUPPORTED[patch.package]}"
    return (
        f"{patch.owner}.{patch.name} of {patch.package} {version} {found}, but lightswitch replaces it and expects "
        f"{patch.expected}; type pip install '{supported}'"
    )


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of each package that is installed, by its name; others are left out."""
    from importlib.metadata import PackageNotFoundError, version  # slow, and not needed to report a mistake

    found = {}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def table() -> str:
    """Return PATCHES as a Markdown table."""
    lines = ["| package | attribute | on | expected | why |", "| --- | --- | --- | --- | --- |"]
    for patch in PATCHES:
        on = "process" if patch.for_process else "object"
        expected = patch.expected.replace("|", "or")
        lines.append(f"| {patch.package} | `{patch.owner}.{patch.name}` | {on} | `{expected}` | {patch.why} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(table(), end="")
