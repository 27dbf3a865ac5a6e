"""A model with its weights, for inference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch import LightningModule
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightswitch.checkpoints import exported, source
from lightswitch.checkpoints.names import own_name
from lightswitch.checkpoints.reader import UnfitCheckpoint
from lightswitch.checkpoints.weights import Weights


def load(path: str | Path) -> LightningModule:
    """The model of a run directory (its best checkpoint, else its last), of a checkpoint or of an export.

    On the CPU, in the dtype of the saved weights, in evaluation mode and without gradients, as `freeze()` makes it.

    Raises:
        UnfitCheckpoint: it can't be read, is damaged, or has no config that builds a model for it.
    """
    if (found := exported.read(Path(path))) is not None:
        file, state = found
        model = built(source.read_config(exported.config_of(file)))
    else:
        checkpoint = source.checkpoint_at(Path(path))
        weights = Weights(checkpoint)
        model = built(source.model_config(checkpoint))
        model.on_load_checkpoint({**weights.state, "state_dict": {}})  # as when a run is resumed
        state = {**weights.read(weights.like), **weights.extra_state}
    try:
        model.load_state_dict(_under_names_of(model, state), assign=True)
    except RuntimeError as error:
        problem = str(error).splitlines()[1].strip()
        raise UnfitCheckpoint(f"{path} is of another model than its config builds: {problem}") from error
    _convert(model, {value.dtype for value in state.values() if isinstance(value, Tensor)})
    model.freeze()
    return model


def built(node: DictConfig) -> LightningModule:
    """From its config, as a run builds it, but with parameters that hold no values yet.

    Not on the meta device: what is computed in a constructor and not saved, as a table of angles, has to have values.

    Raises:
        UnfitCheckpoint: its class is not found, or does not take its arguments.
    """
    try:
        with _Unfilled():
            model: LightningModule = instantiate(node, _convert_="all")
            model.configure_model()
    except (
        InstantiationException,
        OmegaConfBaseException,
        RuntimeError,
    ) as error:  # as of one that asks for its Trainer
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise UnfitCheckpoint(f"{node['_target_']} can't be built from its config: {reason}") from error
    return model


def names_of_tied(model: nn.Module) -> dict[str, str]:
    """Of tensors that have several names: the first by each of the others."""
    return {other: first for first, *others in _names(model.state_dict(keep_vars=True)).values() for other in others}


class _Unfilled(TorchFunctionMode):
    """Parameters are allocated and left as they are: nothing is drawn for them, no page of memory touched."""

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
    """``state`` for `load_state_dict` of a model that may be compiled inside, and may tie parameters."""
    live = model.state_dict(keep_vars=True)
    names = _names(live)
    fitting: dict[str, Any] = {}
    parameters: dict[str, nn.Parameter] = {}  # one for all names of a tied one
    for name, value in live.items():
        own = names[id(value)] if isinstance(value, Tensor) else [own_name(name)]
        saved = next((candidate for candidate in own if candidate in state), None)
        if saved is None:
            continue
        fitting[name] = state[saved]
        if isinstance(value, nn.Parameter):
            parameter = nn.Parameter(state[saved], requires_grad=value.requires_grad)
            fitting[name] = parameters.setdefault(saved, parameter)
    known = {own_name(name) for name in live}
    return fitting | {name: value for name, value in state.items() if name not in known}


def _names(live: Mapping[str, Any]) -> dict[int, list[str]]:
    """All own names of each tensor of a state dict with its variables, by its identity."""
    names: dict[int, list[str]] = {}
    for name, value in live.items():
        if isinstance(value, Tensor):
            names.setdefault(id(value), []).append(own_name(name))
    return names


def _convert(model: LightningModule, dtypes: set[torch.dtype]) -> None:
    """Buffers that are computed, not saved, go with weights that are not in 32 bits, as in a run of that precision."""
    floating = {dtype for dtype in dtypes if dtype.is_floating_point}
    if len(floating) == 1 and floating != {torch.float32}:
        model.to(*floating)
