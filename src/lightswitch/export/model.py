"""Models with their weights, for inference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch import LightningModule
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightswitch.checkpoints import names, trainable, weight_files
from lightswitch.checkpoints.names import own_name
from lightswitch.checkpoints.weight_files import Weights
from lightswitch.errors import UnfitCheckpoint, UntrustedConfig
from lightswitch.export import source
from lightswitch.export.source import untrusted


def load(path: str | Path, model: LightningModule | None = None, trust: bool = False) -> LightningModule:
    """Return the model of a run directory (of its best checkpoint, else its last), a checkpoint or an export.

    It is on the CPU, in the dtype of the saved weights, in evaluation mode and frozen (`freeze()`).

    Args:
        path: a run directory, a checkpoint, or what `python -m lightswitch.export` has written.
        model: takes the weights, and no config is read.
        trust: build the model whatever its config calls. Without it, that is code of your own, and torch's optimizers,
            schedules and layers.

    Raises:
        UnfitCheckpoint: it can't be read, is damaged, or has no config that builds a model for it.
        UntrustedConfig: the config names other code.
    """
    builder = "the one given" if model else "its config builds"
    if (found := weight_files.read(Path(path))) is not None:
        file, state = found
        model = (
            _configured(model)
            if model
            else build_model(source.read_config(weight_files.config_of(file), trust=trust), trust)
        )
    else:
        checkpoint = source.checkpoint_at(Path(path))
        weights = Weights(checkpoint)
        left_out = weights.state.get(trainable.KEY, ())
        model = (
            _configured(model)
            if model
            else build_model(source.model_config(checkpoint, trust), trust, filled=bool(left_out))
        )
        model.on_load_checkpoint({**weights.state, "state_dict": {}})  # as when a run is resumed
        own = names.parameters(model)
        brought = {name: own[name].detach() for name in left_out if name in own}
        state = {**brought, **weights.read(weights.like), **weights.extra_state}
    try:
        model.load_state_dict(_under_names_of(model, state), assign=True)
    except RuntimeError as error:
        problem = "; ".join(str(error).splitlines()[1:2]).strip() or str(error)
        raise UnfitCheckpoint(f"{path} was saved from a different model than {builder}: {problem}") from error
    _convert(model, {value.dtype for value in state.values() if isinstance(value, Tensor)})
    model.freeze()
    return model


def build_model(config: source.ModelConfig, trust: bool, filled: bool = False) -> LightningModule:
    """Return a model built from its config as a run builds it, but with parameters that hold no values yet.

    With ``filled`` they hold those that the model brings itself.

    Not on the meta device: what a constructor computes and does not save, as a table of angles, has to have values.

    Raises:
        UnfitCheckpoint: its class is not found, does not take its arguments, or builds something else.
        UntrustedConfig: it names code that is not the user's own.
    """
    try:
        if not trust and (called := untrusted(config.node, config.file.resolve().parent)):
            raise UntrustedConfig(
                f"{config.file} builds its model with {called}, which is not code of yours; "
                "lightswitch.load(path, model=MyModel(...)) runs none of it, and trust=True runs it"
            )
        with nullcontext() if filled else _Unfilled():
            model = instantiate(config.node, _convert_="all")
            if isinstance(model, LightningModule):
                return _configured(model)
    except (
        ImportError,
        InstantiationException,
        OmegaConfBaseException,
        RuntimeError,
    ) as error:  # RuntimeError: of a model that asks for its Trainer
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise UnfitCheckpoint(f"{config.target} can't be built from its config: {reason}") from error
    raise UnfitCheckpoint(f"{config.target} builds a {type(model).__name__}, not a LightningModule")


def _configured(model: LightningModule) -> LightningModule:
    model.configure_model()
    return model


class _Unfilled(TorchFunctionMode):
    """Mode in which parameters are allocated and not filled: nothing is drawn for them, no page of memory touched."""

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
    """Return a state for `load_state_dict` of a model that may be compiled inside, and may tie parameters."""
    live = model.state_dict(keep_vars=True)
    names = _names(live)
    fitting: dict[str, Any] = {}
    parameters: dict[str, nn.Parameter] = {}  # one object for all names of a tied parameter
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
    """Return all own names of each tensor of a state dict with its variables, by the tensor's identity."""
    names: dict[int, list[str]] = {}
    for name, value in live.items():
        if isinstance(value, Tensor):
            names.setdefault(id(value), []).append(own_name(name))
    return names


def _convert(model: LightningModule, dtypes: set[torch.dtype]) -> None:
    """Cast computed buffers to the one dtype of weights that are not in 32 bits, as in a run of that precision."""
    floating = {dtype for dtype in dtypes if dtype.is_floating_point}
    if len(floating) == 1 and floating != {torch.float32}:
        model.to(*floating)
