"""Checkpoints in one format under every Lightning strategy, and initial weights for a new run."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.optim import Optimizer

from lightswitch.batches.plan import saved_position
from lightswitch.checkpoints import names, optimizers, writing
from lightswitch.checkpoints.finetuning import LEFT_OUT, unfreeze_again
from lightswitch.checkpoints.last import checkpoints_up_to, first_whole, is_up_to
from lightswitch.checkpoints.names import TRANSIENT
from lightswitch.checkpoints.reader import Reader, is_hub
from lightswitch.checkpoints.shards import Piece, Stored, laid_out, local
from lightswitch.checkpoints.writing import WrittenTogether
from lightswitch.errors import Refused, UnfitCheckpoint, listed, shown
from lightswitch.mixins import callbacks_of

log = logging.getLogger(__name__)
_OF_A_RESUME = ("optimizer_states", "lr_schedulers", "loops")  # keys in a checkpoint's state
_KNOWN = ("lightning", "lightswitch")  # packages whose hooks set no initial weights


class PortableCheckpoints(WrittenTogether):
    """Base of strategies whose checkpoints are portable; among a class's bases, it precedes Lightning's strategy.

    Parameters and optimizer states are stored by parameter name. The methods here support plain tensors and DTensors. A
    strategy that shards tensors in another way overrides `lightning_module_state_dict`, `optimizer_state` and the
    methods that read them.
    """

    _reader: Reader
    _kept: Mapping[str, int] = MappingProxyType({})  # digests of a resumed run's weights, by name

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # tensors are read into the strategy's own tensors

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def on_train_start(self) -> None:
        """Check the optimizers before training instead of at the first save.

        Raises:
            Refused: an optimizer holds a tensor that is not a parameter of the module.
        """
        super().on_train_start()
        assert self.lightning_module is not None
        self._set_back_weights()
        if self.lightning_module.trainer.checkpoint_callbacks:
            self.described_optimizers()

    def keep_weights(self) -> None:
        """Take digests of this rank's weights until training starts: a resumed run has them after these hooks, too."""
        self._kept = {name: _checksum(local(held)) for name, held in self.local_parameters().items()}

    @torch.no_grad()
    def _set_back_weights(self) -> None:
        """Read the weights again if they are no longer those of the digests, and report it. Collective after these."""
        kept, self._kept = self._kept, {}
        here = self.local_parameters() if kept else {}
        changed = [name for name, digest in kept.items() if _checksum(local(here[name])) != digest]
        if kept and self.reduce(torch.tensor(float(len(changed)), device=self.root_device), reduce_op="sum"):
            for kind in ("model", "trained"):
                self.read(kind, here)
            self.parameters_changed()
            if self.is_global_zero:
                log.warning(
                    "weights    on_train_start has set %s, but the run is resumed: they are the checkpoint's again. "
                    "Set initial weights in the constructor, or only if self.global_step == 0",
                    listed(changed, "parameters") if changed else "weights of other ranks",
                )

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return names.state_of(self.lightning_module)

    def local_parameters(self) -> dict[str, Stored]:
        """Return this rank's shard of each parameter, by name, in the optimizer's precision.

        Values written into it take effect after `parameters_changed`.
        """
        assert self.lightning_module is not None
        return dict(names.parameters(self.lightning_module))

    def parameters_changed(self) -> None:
        """Make forward passes use the values that were written into `local_parameters`. Collective."""

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's class, its state by parameter name, and its groups with names in place of
        parameters."""
        assert self.lightning_module is not None
        return optimizers.state_of(optimizer, self.lightning_module)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return a checkpoint's state, whose tensors are read later into the strategy's own tensors.

        In training, this reads the first undamaged checkpoint of `checkpoints_up_to`, starting with the given one.
        """
        self.wait_for_write()
        module = self.lightning_module
        assert module is not None
        trainer, path = module.trainer, Path(checkpoint_path)
        if trainer.state.fn == TrainerFn.FITTING:
            candidates = self.broadcast(checkpoints_up_to(path, Path(trainer.default_root_dir)))
            self._reader = first_whole(candidates, self.checkpoint_group)
            trainer.ckpt_path = self._reader.path
            missing = [key for key in _OF_A_RESUME if key not in self._reader.state]
            if missing and saved_position(self._reader.state) is not None:  # else it was saved as weights only
                raise UnfitCheckpoint(
                    f"{shown(self._reader.path)} can't be resumed: on_save_checkpoint has removed {listed(missing)}; "
                    f"to load only its weights, type init_from={shown(self._reader.path)} and another run_id"
                )
        else:
            advice = "use the model arguments that it was saved with"
            self._reader = Reader(self.broadcast(path), self.checkpoint_group, advice, names.parameters(module))
        state = {**self._reader.state, "state_dict": self._reader.weights()}  # for hooks; see `load_model_state_dict`
        if any(isinstance(one, WeightAveraging) for one in callbacks_of(trainer)) and self._reader.names("trained."):
            trained = {name: read() for name, read in self.saved("trained").items()}
            first = {name: state.get("names_of_tied", {}).get(name, name) for name in state["state_dict"]}
            averages = state["state_dict"]
            state["current_model_state"] = {n: trained[of] if of in trained else averages[n] for n, of in first.items()}
        if "callbacks" in state:
            is_best = partial(is_up_to, position=saved_position(state))
            is_of_run = writing.is_within(self._reader.path, Path(trainer.default_root_dir))
            state["callbacks"] = writing.trusted_states(state["callbacks"], callbacks_of(trainer), is_of_run, is_best)
        return laid_out(state, names.parameters(module))

    def start_from(self, path: Path, renamed: Mapping[str, str] | None) -> None:
        """Load only the weights of a checkpoint; from safetensors, or with new names, only those that fit.

        Args:
            renamed: prefixes of names in the checkpoint, with the model's prefix for each; None if the model's names
                are to be the same.
        """
        module = self.lightning_module
        assert module is not None
        advice = (
            "use the model arguments that it was saved with, or take what fits with init_names={}; where shapes "
            "differ, give the checkpoint's weights other names: 'init_names={head.: unused.}'"
        )
        self._reader = Reader(path, self.checkpoint_group, advice, names.parameters(module))
        of_hub = is_hub(path)
        is_whole = renamed is None and not of_hub
        if not is_whole:
            state, prefixes = self.lightning_module_state_dict(), renamed or {}
            live = [name for name, value in state.items() if names.is_stored(value)]
            if of_hub:
                self._reader.take(lambda found: fitted(path, found, module, live, prefixes))
            else:
                self._reader.rename(partial(_renamed, renamed=prefixes))
                _check_fit(path, self._reader.names("model."), live)
        self.load_model_state_dict(self._reader.state, strict=module.strict_loading and is_whole)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        state = names.without(self.lightning_module_state_dict(), checkpoint.get(LEFT_OUT, ()))
        self.check_model(state, checkpoint, strict)
        loose = names.loose(module, state, self._reader.weights_like)
        live = {name: value for name, value in state.items() if names.is_stored(value) and name not in loose}
        self.read("model", live)
        self.hand_over(checkpoint, loose)

    def check_model(self, state: Mapping[str, Any], checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Compare the model's state with the loaded checkpoint (see `Reader.check_model`).

        Entries that modules load by their own code may differ in shape, or in whether they are tensors.
        """
        module = self.lightning_module
        assert module is not None
        weights, extra = self._reader.weights_like, checkpoint.get("extra_state", {})
        loose = names.loose(module, state, weights)
        like = {name: weights.get(name, state[name]) for name in loose if name not in extra}
        compared = {**names.without(state, loose), **like}
        live = {name: value for name, value in compared.items() if names.is_stored(value)}
        self._reader.check_model(live, module.hparams, strict)

    def hand_over(self, checkpoint: Mapping[str, Any], loose: set[str]) -> None:
        """Load the entries of modules' states that modules load by their own code from the loaded checkpoint.

        Args:
            loose: the names of these entries.
        """
        module = self.lightning_module
        assert module is not None
        saved = loose & self._reader.names("model.")
        tensors = {name: self._reader.read(f"model.{name}").to(module.device, copy=True) for name in saved}
        names.hand_over(module, {**checkpoint.get("extra_state", {}), **tensors}, module.device)

    def read(self, kind: str, tensors: Mapping[str, Stored]) -> None:
        """Fill the tensors, by name, that the loaded checkpoint has of a kind; leave the others. Collective.

        Args:
            kind: "model", or "trained" for the weights whose averages are the model.
        """
        saved = self._reader.names(f"{kind}.")
        self._reader.fill({f"{kind}.{name}": tensor for name, tensor in tensors.items() if name in saved})

    def saved(self, kind: str) -> dict[str, Callable[[], Tensor]]:
        """Return, for each tensor of a kind in the loaded checkpoint, a function that reads it to the CPU, by name."""
        return {name: partial(self._reader.read, f"{kind}.{name}") for name in self._reader.names(f"{kind}.")}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.lightning_module is not None
        parameters = names.parameters(self.lightning_module)
        if (position := saved_position(checkpoint)) is not None:
            unfreeze_again(self.lightning_module.trainer, position)
        optimizers.check(self._reader.path, self.described_optimizers(), checkpoint["optimizer_states"])
        for index, optimizer in enumerate(self.optimizers):
            saved = checkpoint["optimizer_states"][index]
            state = self._read_optimizer_state(f"optimizer.{index}.", saved["state"], parameters)
            groups = optimizers.groups_of(optimizer, self.lightning_module)
            optimizers.load(optimizer, groups, state, saved)

    def _read_optimizer_state(
        self, prefix: str, values: dict[str, Any], parameters: Mapping[str, nn.Parameter]
    ) -> dict[str, dict[str, Any]]:
        state: dict[str, dict[str, Any]] = {name: dict(plain) for name, plain in values.items() if plain}
        targets: dict[str, Stored] = {}
        for full_name in self._reader.names(prefix):
            name, _, key = full_name.rpartition(".")
            like, of_parameter = self._reader.like[prefix + full_name], self._reader.like.get(f"model.{name}")
            if of_parameter is not None and like.dtype == of_parameter.dtype and key.rpartition("/")[2] != "step":
                like = like.to(parameters[name].dtype)  # this run's precision may be another one
            room = self.room_for(parameters[name], like)
            targets[prefix + full_name] = room
            state.setdefault(name, {})[key] = room.values if isinstance(room, Piece) else room
        self._reader.fill(targets)
        return state

    def room_for(self, parameter: nn.Parameter, saved: Tensor) -> Stored:
        """Return a tensor to read a parameter's optimizer state into, sharded like the parameter if the shapes agree.

        Args:
            saved: a meta tensor with the state's shape in the checkpoint and its dtype here.
        """
        if saved.shape == parameter.shape and parameter.dim():
            return torch.zeros_like(parameter.detach(), dtype=saved.dtype)
        return torch.zeros_like(saved, device="cpu")

    def described_optimizers(self) -> list[tuple[str, optimizers.Groups]]:
        """Return the class name and the parameter groups of each optimizer, with names in place of parameters."""
        assert self.lightning_module is not None
        return [
            (optimizers.described(optimizer), optimizers.groups_of(optimizer, self.lightning_module))
            for optimizer in self.optimizers
        ]


def fitted(
    path: Path, found: Mapping[str, Tensor], model: nn.Module, live: Iterable[str], renamed: Mapping[str, str]
) -> dict[str, Tensor]:
    """Return the weights whose names are in the model, by these names, and log which ones fit and which do not.

    If no name is in the model and the model has a method ``from_hf(weights)``, that method translates the names.

    Args:
        path: the path of the weights, for messages.
        live: names of the model's parameters and buffers.
        renamed: prefixes of names in the file, with the model's prefix for each.

    Raises:
        Refused: none of the weights fits.
    """
    wanted = set(live)
    weights = {_renamed(name, renamed): value for name, value in found.items()}
    translate = getattr(model, "from_hf", None)
    if translate is not None and not wanted & weights.keys():
        weights = dict(translate(weights))
    _check_fit(path, weights.keys(), wanted)
    return {name: value for name, value in weights.items() if name in wanted}


def _check_fit(path: Path, found: Set[str], live: Iterable[str]) -> None:
    """Log which weights fit, by their names in the model, and which do not.

    Raises:
        Refused: none of them fits.
    """
    wanted = set(live)
    if not wanted & found:
        raise Refused(
            f"init_from={path}: none of its {len(found)} tensors has the name of a tensor in the model; it has "
            f"{listed(sorted(found))}, the model has {listed(sorted(wanted))}; "
            "map the prefixes of names: 'init_names={old.: new.}'"
        )
    _report(path, wanted, found, wanted & found)


@rank_zero_only
def _report(path: Path, wanted: Set[str], found: Set[str], fits: Set[str]) -> None:
    log.info("init_from  %d of the model's %d tensors are in %s", len(fits), len(wanted), path)
    if kept := sorted(wanted - fits):
        log.warning("init_from  %s keep their initial values", listed(kept))
    if unused := sorted(found - fits):
        log.warning("init_from  %s of %s are not in the model", listed(unused), path)


def _renamed(name: str, renamed: Mapping[str, str]) -> str:
    for old, new in renamed.items():
        prefix = "" if old == "." else old  # config/overrides: Hydra parses no empty key
        if name.startswith(prefix):
            return new + name.removeprefix(prefix)
    return name


class InitialWeights(Callback):
    """Callback that starts a new run with the weights of a checkpoint, without its other state.

    Args:
        path: a checkpoint of any strategy, written by the engine or by Lightning, or weights in the format of the
            Hugging Face hub (safetensors). A run that resumes from its own checkpoint ignores it.
        renamed: prefixes of names in the file, with the model's prefix for each; None to take all weights, or of the
            hub's those that fit.
    """

    def __init__(self, path: str, renamed: Mapping[str, str] | None = None) -> None:
        self.path = Path(path)
        self.renamed = renamed

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path is not None:
            return
        if not isinstance(trainer.strategy, PortableCheckpoints):
            raise Refused(f"init_from: {type(trainer.strategy).__name__} can't read checkpoints of other strategies")
        trainer.strategy.start_from(self.path, self.renamed)


class TransientBuffers(Callback):
    """Callback that saves non-persistent buffers that training changes; the module's state dict leaves them out.

    It also lets the strategy keep the weights of a resumed run while the user's `on_train_start` hooks run.

    Queues of keys, running means and step counters are often registered with `persistent=False`. A table that is
    computed in the constructor and does not change is not saved.
    """

    _at_start: Mapping[str, int] = MappingProxyType({})  # checksums

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # before a checkpoint is read
        self._at_start = {name: _checksum(buffer) for name, buffer in _transient(pl_module).items()}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        owners: list[Any] = [pl_module, *callbacks_of(trainer)]
        of_user = any(str(one.on_train_start.__module__).partition(".")[0] not in _KNOWN for one in owners)
        if of_user and trainer.ckpt_path is not None and isinstance(trainer.strategy, PortableCheckpoints):
            trainer.strategy.keep_weights()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        buffers = _transient(pl_module)
        changed = {name: one for name, one in buffers.items() if self._at_start.get(name) != _checksum(one)}
        if changed:
            checkpoint[TRANSIENT] = changed

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if isinstance(trainer.strategy, PortableCheckpoints):
            names.set_transient(pl_module, trainer.strategy.saved(TRANSIENT))


def _transient(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are not persistent, by name."""
    return {name: part.get_buffer(own) for name, part, own in names.transient(module)}


def _checksum(buffer: Tensor) -> int:
    shape = repr((tuple(buffer.shape), buffer.dtype)).encode()
    values = buffer.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()  # whatever it is a view of
    return zlib.crc32(values.view(torch.uint8).numpy().tobytes(), zlib.crc32(shape))
