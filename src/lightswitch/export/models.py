"""Loading of models for inference: their checkpoint, their config, and a check of the code that the config names.

Weights may come from anywhere, and Hydra's `instantiate` calls whatever the config beside them names, at any depth.
Without the user's consent, a config may only name a LightningModule in the user's code and, for its arguments, classes
in the user's code and torch's optimizers, schedules and layers.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sysconfig
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import get_object
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.overrides import TorchFunctionMode

from lightswitch import regular_files
from lightswitch.checkpoints import names, weight_files
from lightswitch.checkpoints.finetuning import LEFT_OUT
from lightswitch.checkpoints.last import best_or_last
from lightswitch.checkpoints.names import own_name
from lightswitch.checkpoints.reading import Reader, is_hub
from lightswitch.config.confidential import masked_keys
from lightswitch.config.hydra_versions import instantiate
from lightswitch.errors import Refused, UnfitCheckpoint, listed

CONFIG = "config.yaml"
_FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:[^${}]*\}")  # environment variables in a run's config
_ENGINE = __name__.partition(".")[0]
_PARTS_OF_SETUP = (
    "; its config builds no parts that the model makes in setup: call setup of a model, and hand it over: "
    "lightswitch.load(path, model=…)"
)
_PARTS = (Optimizer, LRScheduler, nn.Module)
_OF_TORCH = ("torch.optim.", "torch.nn.")


def load(path: str | Path, model: LightningModule | None = None, trust: bool = False) -> LightningModule:
    """Return the model of a run directory (of its best checkpoint, else its last), a checkpoint or an export.

    It is on the CPU, in the dtype of the saved weights, in evaluation mode and frozen (`freeze()`).

    Args:
        path: a run directory, a checkpoint, or a file or folder that `python -m lightswitch.export` has written.
        model: a model to load the weights into; no config is read then.
        trust: allow the config to call any code. Without it, it may call only your own code, and torch's optimizers,
            schedules and layers.

    Raises:
        UnfitCheckpoint: it can't be read, is damaged, or has no config that builds a model for it.
        Refused: the config names other code.
    """
    builder = "the one given" if model else "its config builds"
    checkpoint = checkpoint_at(Path(path))
    reader = Reader(checkpoint, group=None)
    left_out, beside = reader.state.get(LEFT_OUT, ()), weight_files.config_of(checkpoint)
    is_export = is_hub(reader.path) or checkpoint.suffix == ".pt" or beside.is_file()
    if model is None:
        config = read_config(beside, trust=trust) if is_export else model_config(checkpoint, trust)
        model = _built(config, trust, () if left_out else reader.weights_like)
    else:
        model = _configured(model)
    if not is_export:
        model.on_load_checkpoint({**reader.state, "state_dict": reader.weights()})  # as on a resume
    own = names.parameters(model)
    brought = {name: own[name].detach() for name in left_out if name in own}
    state = {**brought, **reader.read_weights(), **reader.state.get("extra_state", {})}
    fitting = _under_names_of(model, state)
    try:
        if state and not fitting.keys() & model.state_dict().keys():
            raise RuntimeError(f"none of its tensors has a name of the model's; it has {listed(sorted(state))}")
        model.load_state_dict(fitting, strict=model.strict_loading, assign=True)
    except RuntimeError as error:
        problem = "; ".join(str(error).splitlines()[1:2]).strip() or str(error)
        advice = _PARTS_OF_SETUP if is_overridden("setup", model) else ""
        raise UnfitCheckpoint(f"{path} was saved from a different model than {builder}: {problem}{advice}") from error
    _convert(model, {value.dtype for value in state.values() if isinstance(value, Tensor)})
    model.freeze()
    return model


def _built(config: ModelConfig, trust: bool, saved: Collection[str]) -> LightningModule:
    """Return a model built from its config, whose parameters that are not saved have their initial values.

    Args:
        saved: names of tensors that are loaded into the model; none if it brings some itself.
    """
    model = build_model(config, trust, filled=not saved)
    lacks = saved and not model.strict_loading and names.parameters(model).keys() - set(saved)
    return build_model(config, trust, filled=True) if lacks else model


def build_model(config: ModelConfig, trust: bool, filled: bool = False) -> LightningModule:
    """Return a model built from its config as in a run, but with uninitialized parameters.

    With ``filled``, the constructor initializes the parameters, for those that the checkpoint leaves out.

    The model is not on the meta device: values that a constructor computes and that are not saved, such as a table of
    angles, are needed.

    Raises:
        UnfitCheckpoint: its class is not found, does not take its arguments, or builds something else.
        Refused: the config names code that is not the user's own.
    """
    try:
        if not trust and (called := untrusted(config.node, config.file.resolve().parent)):
            raise Refused(
                f"{config.file} builds its model with {called}, which is no class of your own code; "
                "lightswitch.load(path, model=MyModel(...)) does not run it, and trust=True does"
            )
        with nullcontext() if filled else _Unfilled():
            model = instantiate(config.node)
            if isinstance(model, LightningModule):
                return _configured(model)
    except (
        ImportError,
        InstantiationException,
        OmegaConfBaseException,
        RuntimeError,
    ) as error:  # RuntimeError: from a model that uses its Trainer
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise UnfitCheckpoint(f"{config.target} can't be built from its config: {reason}") from error
    raise UnfitCheckpoint(f"{config.target} builds a {type(model).__name__}, not a LightningModule")


def _configured(model: LightningModule) -> LightningModule:
    model.configure_model()
    return model


class _Unfilled(TorchFunctionMode):
    """Mode in which in-place functions do not fill parameters: no random numbers, and no memory page is touched."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        filled = args[0] if args else kwargs.get("tensor")
        if isinstance(filled, nn.Parameter) and _writes(getattr(func, "__name__", "")):
            return filled
        return func(*args, **kwargs)


def _writes(function: str) -> bool:
    return function.endswith("_") and not function.endswith("__") and function != "requires_grad_"


def _under_names_of(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state for `load_state_dict` of a model that may have compiled submodules and tied parameters."""
    live, first_names = model.state_dict(keep_vars=True), names.tied(model)
    fitting: dict[str, Any] = {}
    parameters: dict[str, nn.Parameter] = {}  # one object for all names of a tied parameter
    for name, value in live.items():
        own = own_name(name)
        first = first_names.get(own, own)
        if (saved := first if first in state else own) not in state:
            continue
        fitting[name] = state[saved]
        if isinstance(value, nn.Parameter):
            parameter = nn.Parameter(state[saved], requires_grad=value.requires_grad)
            fitting[name] = parameters.setdefault(first, parameter)
    known = {own_name(name) for name in live}
    return fitting | {name: value for name, value in state.items() if name not in known}


def _convert(model: LightningModule, dtypes: set[torch.dtype]) -> None:
    """Cast computed buffers to the dtype of the weights, if it is a single one other than float32, as a run in that
    precision does."""
    floating = {dtype for dtype in dtypes if dtype.is_floating_point}
    if len(floating) == 1 and floating != {torch.float32}:
        model.to(*floating)


def checkpoint_at(path: Path) -> Path:
    """Return the checkpoint for a path: the path itself or, for a run directory, its best checkpoint, else its last.

    Raises:
        UnfitCheckpoint: there is none.
    """
    if not path.exists():
        raise UnfitCheckpoint(f"{path}: there is no such file or directory")
    if not (path / CONFIG).is_file():
        return path
    if (checkpoint := best_or_last(path)) is not None:
        return checkpoint
    raise UnfitCheckpoint(f"{path} has neither checkpoints/best.ckpt nor checkpoints/last.ckpt; name a checkpoint")


@dataclass(frozen=True)
class ModelConfig:
    """Config of a model: its file, and its node in plain types."""

    file: Path
    node: dict[str, Any]

    @property
    def target(self) -> str:
        """Dotted path of the model's class."""
        return str(self.node["_target_"])


def model_config(checkpoint: Path, trust: bool = False) -> ModelConfig:
    """Return the model's node in the config of the run whose directory contains a checkpoint.

    Args:
        trust: resolve interpolations, which may call any registered resolver.

    Raises:
        UnfitCheckpoint: the checkpoint is not in a run directory, or the config can't be read or has no model.
    """
    folders = checkpoint.resolve().parents[:2]
    for folder in folders:
        if (folder / CONFIG).is_file():
            return read_config(folder / CONFIG, key="model", trust=trust)
    raise UnfitCheckpoint(
        f"{checkpoint} has no {CONFIG} next to it, which defines its model; keep it in its run directory"
    )


def read_config(path: Path, key: str | None = None, trust: bool = False) -> ModelConfig:
    """Return a model's node: the whole file, or the value of a key in it.

    Args:
        trust: resolve interpolations, which may call any registered resolver.

    Raises:
        UnfitCheckpoint: the file can't be read, or has no such node.
    """
    try:
        node: Any = regular_files.read_yaml(path, resolve=trust)
    except (OSError, ValueError) as error:
        raise UnfitCheckpoint(f"{path} can't be read as a config: {error}") from error
    if key is not None:
        node = node.get(key) if isinstance(node, dict) else None
    if not isinstance(node, dict) or "_target_" not in node:
        raise UnfitCheckpoint(f"{path} names no model: it has no {f'{key}.' if key else ''}_target_")
    if hidden := masked_keys(node):
        raise UnfitCheckpoint(
            f"{path}: a secret was typed, and is not written: {listed(hidden)}; type it into that file, export it and "
            "write ${oc.env:NAME}, or call lightswitch.load(path, model=MyModel(...))"
        )
    return ModelConfig(path, node)


def untrusted(node: Any, folder: Path) -> str | None:
    """Return the first target in a config that must not be called without the user's consent; None if there is none.

    Args:
        node: the config in plain types, with unresolved interpolations: one may call a resolver, or hide a target.
        folder: the folder of the config.

    Raises:
        ImportError: a target can't be imported.
    """
    outermost = str(node.get("_target_"))
    if not _is_trusted(outermost, folder.resolve(), (LightningModule,)):
        return outermost
    return next((called for called in _called(node) if not _is_trusted(called, folder.resolve(), _PARTS)), None)


def _called(node: Any) -> Iterator[str]:
    if isinstance(node, str) and "${" in _FROM_ENVIRONMENT.sub("", node):
        yield node
    if isinstance(node, dict):
        if "_target_" in node:
            yield str(node["_target_"])
        for item in node.items():
            yield from _called(item)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _called(value)


def _is_trusted(target: str, folder: Path, kinds: tuple[type, ...]) -> bool:
    """Return whether a dotted path names a class that may be called: the user's own, or a part of torch.

    Besides the path, this checks the module that defines the class, as modules import classes of others. Functions may
    do anything with their arguments: those of torch read files.

    Args:
        kinds: base classes of what is allowed; any class of the user's is, if they are `_PARTS`.
    """
    first = target.partition(".")[0]
    if not (_is_own(first, folder) or target.startswith(_OF_TORCH)):
        return False
    try:
        found = get_object(target)
    except Exception as error:  # raised by a module's import
        raise ImportError(str(error).partition("\n")[0]) from error
    if not inspect.isclass(found):
        return False
    if _is_own(found.__module__.partition(".")[0], folder):
        return kinds == _PARTS or issubclass(found, kinds)
    return f"{found.__module__}.".startswith(_OF_TORCH) and issubclass(found, kinds)


def _is_own(package: str, folder: Path) -> bool:
    """Return whether a package is the user's: on Python's path, not installed, not the engine, and neither beside the
    config nor in a folder that contains it."""
    locations = list(_locations(package)) if package != _ENGINE else []
    return bool(locations) and not any(
        place in (folder, *folder.parents) or place.parent == folder or _is_installed(place) for place in locations
    )


def _locations(package: str) -> Iterator[Path]:
    """Yield the folders of a package, or a module's file, as the import system finds them without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # for `__main__`, or an invalid name
        return
    if spec is None:
        return
    for place in spec.submodule_search_locations or ([spec.origin] if spec.has_location and spec.origin else []):
        yield Path(place).resolve()


def _is_installed(place: Path) -> bool:
    if {"site-packages", "dist-packages"} & set(place.parts):
        return True
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return any(place.is_relative_to(Path(folder).resolve()) for folder in folders)
