"""Checkpoints in one format under every Lightning strategy: all ranks save and load them together.

Training waits until the tensors are copied into host memory; a thread writes them while it goes on.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Set
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from lightswitch.batches.plan import saved_position
from lightswitch.checkpoints import directory, names, optimizers
from lightswitch.checkpoints.finetuning import LEFT_OUT, unfreeze_again
from lightswitch.checkpoints.format import PlainTypes
from lightswitch.checkpoints.last import checkpoints_up_to, first_whole
from lightswitch.checkpoints.optimizers import Groups
from lightswitch.checkpoints.reading import Reader, is_hub
from lightswitch.checkpoints.shards import Stored
from lightswitch.checkpoints.writing import Ranks, Writer, replicas_of, share, together
from lightswitch.errors import LostRank, Refused, UnfitCheckpoint, listed, shown
from lightswitch.hooked_strategy import callbacks_of

log = logging.getLogger(__name__)

# Fractions of the process group's timeout: the wait for a rank in one step of a save, and the wait for all steps of a
# write. They expire before it does, and before the watchdog ends a run that starts no batch.
_STEP, _WRITE = 1 / 3, 2 / 3
_PATIENCE_SECONDS = 60  # for a checkpoint that is being written when a run fails; another rank may hang
_TRAINED = "current_model_state"  # Lightning's key for the trained weights, if the model holds their averages
_OF_A_RESUME = ("optimizer_states", "lr_schedulers", "loops")  # keys in a checkpoint's state
_OWN = ("extra_state", "names_of_tied")  # keys in a checkpoint's state that no hook may take


class PortableCheckpoints(Strategy):
    """Base of strategies whose checkpoints are portable; among a class's bases, it precedes Lightning's strategy.

    Parameters and optimizer states are stored by parameter name. The methods here support plain tensors and DTensors. A
    strategy that shards tensors in another way overrides `lightning_module_state_dict`, `optimizer_state` and the
    methods that read them. These must not be collective: a rank that fails in a save would leave the others waiting.
    """

    waiting: list[Callable[[], None]] | None = None  # saves that are put off to the end of a step, in order

    _reader: Reader
    _checkpoint_ranks: Ranks | None = None
    _told: frozenset[str] = frozenset()  # paths of values that checkpoints omit, already logged

    @functools.cached_property
    def _writer(self) -> Writer:
        return Writer()

    # What a strategy holds

    @property
    def lightning_module(self) -> LightningModule:
        """The module; None until the Trainer attaches it, before it calls any other method of a strategy."""
        return self._lightning_module  # type: ignore[return-value]  # Lightning types it as optional, for the time before it is attached

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return names.state_of(self.lightning_module)

    def local_parameters(self) -> dict[str, Stored]:
        """Return this rank's shard of each parameter, by name, in the optimizer's precision.

        Values written into it take effect after `parameters_changed`.
        """
        return dict(names.parameters(self.lightning_module))

    def parameters_changed(self) -> None:
        """Make forward passes use the values that were written into `local_parameters`. Collective."""

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's class, its state by parameter name, and its groups with names in place of
        parameters."""
        return optimizers.state_of(optimizer, self.lightning_module)

    def described_optimizers(self) -> list[tuple[str, Groups]]:
        """Return the class name and the parameter groups of each optimizer, with names in place of parameters."""
        return [
            (optimizers.described(optimizer), optimizers.groups_of(optimizer, self.lightning_module))
            for optimizer in self.optimizers
        ]

    # Saving

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Copy the state into memory and return; a thread writes it while training goes on.

        Raises:
            LostRank: a rank did not reach the save in time, has failed, or is still writing the previous checkpoint.
        """
        tensors, state = self._split(checkpoint)
        path, own = self._await_ranks(Path(filepath), tensors)
        self._writer.write(partial(directory.write, path, self._writer.stage(own), state, self._ranks))

    def _split(self, checkpoint: dict[str, Any]) -> tuple[dict[str, Stored], dict[str, Any]]:
        """Split Lightning's checkpoint into the tensors of model and optimizers by name, and the rest. Collective.

        Raises:
            Refused: a hook has stored an entry under a name that the engine uses: the checkpoint would be unreadable.
        """
        taken = next((f"it has {key}" for key in _OWN if key in checkpoint), None)
        weights, trained = checkpoint.pop("state_dict"), checkpoint.pop(_TRAINED, {})
        tensors = {f"model.{name}": value for name, value in weights.items() if names.is_stored(value)}
        # a callback may have omitted some weights
        tensors |= {f"trained.{name}": value for name, value in trained.items() if f"model.{name}" in tensors}
        for index, optimizer in enumerate(checkpoint.get("optimizer_states", ())):
            found = names.tensors_in(optimizer["state"])
            tensors |= {f"optimizer.{index}.{name}": value for name, value in found.items()}
            optimizer["state"] = {
                name: {key: value for key, value in values.items() if not names.is_stored(value)}
                for name, values in optimizer["state"].items()
            }
        checkpoint["extra_state"] = {name: value for name, value in weights.items() if not names.is_stored(value)}
        checkpoint["names_of_tied"] = names.tied(self.lightning_module)  # for exports, which build no model
        plain = PlainTypes()
        state = plain.of(checkpoint)
        try:
            saved_position(state)  # as when it is read
        except ValueError as error:
            taken = str(error)
        if taken:
            raise Refused(
                f"this checkpoint could not be read again: {taken}, and the engine stores an entry of that name; use "
                "another one in on_save_checkpoint of the module, callback or datamodule"
            )
        new = {place: kind for place, kind in plain.left_out.items() if place not in self._told}
        for kind in sorted(set(new.values())) if self.is_global_zero else ():
            places = listed([place for place in new if new[place] == kind])
            log.warning("checkpoints leave out %s: a %s can't be read back safely", places, kind)
        self._told = self._told | new.keys()
        return tensors, state

    def _await_ranks(self, path: Path, tensors: dict[str, Stored]) -> tuple[Path, dict[str, Stored]]:
        """Wait until every rank has reached this save and written the previous one; return rank 0's path, and the
        tensors that this rank writes: its share if all ranks replicate the same tensors, else all."""
        self.wait_for_write()
        self._log_failure()
        if self._ranks is None:
            return path, tensors
        rank, world_size = dist.get_rank(), dist.get_world_size()
        replicas = {name: replicas_of(tensor, rank, world_size) for name, tensor in tensors.items()}
        held = sorted((name, [*tensors[name].shape], count) for name, (count, _) in replicas.items() if count > 1)
        digest = hashlib.sha256(repr(held).encode()).hexdigest()
        path, are_alike = together(
            self._ranks.staging,
            f"reach the save of {path.name}",
            lambda: digest,
            conclude=lambda digests: (path, len({*digests}) == 1),
        )
        parameters = names.parameters(self.lightning_module)
        return path, share(tensors, replicas, parameters) if are_alike else tensors

    def barrier(self, name: str | None = None) -> None:
        if name != "Trainer.save_checkpoint":  # Lightning's, after a save, in which the ranks have met
            super().barrier(name)  # type: ignore[safe-super]  # the strategy's class has one

    def wait_for_write(self) -> None:
        """Wait until the previous checkpoint is written, without a time limit in a run of one process.

        Raises:
            LostRank: it took too long.
        """
        patience_seconds = None if self._checkpoint_ranks is None else self._timeout_seconds * _WRITE
        if not self._writer.wait(patience_seconds):
            raise LostRank(f"the previous checkpoint was not written within {patience_seconds:g} s")

    def has_written(self) -> bool:
        """Wait for the last checkpoint, and return whether it was written; the result is the same on all ranks.

        Raises:
            LostRank: it was not, because a rank has ended.
        """
        self.wait_for_write()
        if self._writer.has_lost_rank:
            self._log_failure()
        return self._writer.is_good

    def once_saved(self, action: Callable[[], None]) -> None:
        """Run an action after the last saved checkpoint is written, only if that succeeded."""
        self.after_save(partial(self._writer.then, action))

    def after_save(self, action: Callable[[], None]) -> None:
        """Run an action at once or, if the last checkpoint that was asked for is put off, when it has been taken."""
        if self.waiting:
            self.waiting.append(action)
        else:
            action()

    def finish_saving(self) -> None:
        """Wait until the run's last checkpoint is written; a process that ends before would lose it.

        Raises:
            OSError, LostRank: it, or a link to it, could not be written.
        """
        self.wait_for_write()
        if (failure := self._writer.failure()) is not None:
            raise failure

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            self.once_saved(partial(directory.remove, Path(filepath)))

    def on_train_start(self) -> None:
        """Connect the ranks, and check the optimizers before training instead of at the first save.

        Raises:
            Refused: an optimizer holds a tensor that is not a parameter of the module.
        """
        super().on_train_start()
        if self.lightning_module.trainer.checkpoint_callbacks:
            self._connect()  # collective: all ranks reach this hook
            self.described_optimizers()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._log_failure()

    def _log_failure(self) -> None:
        failure = self._writer.failure()
        if isinstance(failure, LostRank):
            raise failure
        if failure is not None and self.is_global_zero:
            log.error("%s; training continues, and earlier checkpoints are kept", failure)

    def on_train_end(self) -> None:
        super().on_train_end()
        self.finish_saving()

    def teardown(self) -> None:
        if self.lightning_module.trainer.state.status == TrainerStatus.RUNNING:  # not after an error
            self.finish_saving()  # what a hook has saved in an evaluation
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._writer.wait(_PATIENCE_SECONDS)

    @property
    def _ranks(self) -> Ranks | None:
        """The ranks that write checkpoints together; None for a single process."""
        self._connect()
        return self._checkpoint_ranks

    @property
    def checkpoint_group(self) -> dist.ProcessGroup | None:
        return ranks.staging if (ranks := self._ranks) is not None else None

    def _connect(self) -> None:
        if self._checkpoint_ranks is None and dist.is_available() and dist.is_initialized():
            self._checkpoint_ranks = Ranks(self._timeout_seconds * _STEP)

    @property
    def _timeout_seconds(self) -> float:
        timeout: timedelta | None = getattr(self, "_timeout", None)  # of strategies with a process group
        return (timeout or default_pg_timeout).total_seconds()

    # Loading

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # tensors are read into the strategy's own tensors

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return a checkpoint's state, whose tensors are read later into the strategy's own tensors.

        In training, this reads the first undamaged checkpoint of `checkpoints_up_to`, starting with the given one.
        """
        self.wait_for_write()
        trainer, path = self.lightning_module.trainer, Path(checkpoint_path)
        run_dir, parameters = Path(trainer.default_root_dir), names.parameters(self.lightning_module)
        if trainer.state.fn == TrainerFn.FITTING:
            candidates = self.broadcast(checkpoints_up_to(path, run_dir))
            self._reader = first_whole(candidates, self.checkpoint_group, parameters)
            trainer.ckpt_path = self._reader.path
            missing = [key for key in _OF_A_RESUME if key not in self._reader.state]
            if missing and saved_position(self._reader.state) is not None:  # else it was saved as weights only
                raise UnfitCheckpoint(
                    f"{shown(self._reader.path)} can't be resumed: on_save_checkpoint has removed {listed(missing)}; "
                    f"to load only its weights, type init_from={shown(self._reader.path)} and another run_id"
                )
        else:
            advice = "use the model arguments that it was saved with"
            self._reader = Reader(self.broadcast(path), self.checkpoint_group, advice, parameters)
        state = {**self._reader.state, "state_dict": self._reader.weights()}  # for hooks; see `load_model_state_dict`
        is_of_run = _is_within(self._reader.path, run_dir)
        for callback in callbacks_of(trainer):
            if isinstance(callback, ModelCheckpoint) and (found := state.get("callbacks", {}).get(callback.state_key)):
                state["callbacks"] = {**state["callbacks"], callback.state_key: _best_of(callback, found, is_of_run)}
        return state

    def start_from(self, path: Path, renamed: Mapping[str, str] | None) -> None:
        """Load only the weights of a checkpoint; from safetensors, or with new names, only those that fit.

        If no name is in the model and the model has a method ``from_hf(weights)``, that translates safetensors.

        Args:
            renamed: prefixes of names in the checkpoint, with the model's prefix for each; None if the model's names
                are to be the same.

        Raises:
            Refused: none of the weights fits.
        """
        module = self.lightning_module
        advice = (
            "use the model arguments that it was saved with, or take what fits with init_names={}; where shapes "
            "differ, give the checkpoint's weights other names: 'init_names={head.: unused.}'"
        )
        self._reader = reader = Reader(path, self.checkpoint_group, advice, names.parameters(module))
        is_of_hub = is_hub(reader.path)
        is_whole = renamed is None and not is_of_hub
        state = self.lightning_module_state_dict().items()
        wanted = {name for name, value in state if names.is_stored(value)}
        if not is_whole:
            reader.rename(partial(_renamed, renamed=renamed or {}))
            translate = getattr(module, "from_hf", None)
            if is_of_hub and translate is not None and not wanted & reader.names("model."):
                reader.take(lambda found: dict(translate(found)))
        found = reader.names("model.")
        if not wanted & found:
            raise Refused(
                f"init_from={path}: none of its {len(found)} tensors has the name of a tensor in the model; it has "
                f"{listed(sorted(found))}, the model has {listed(sorted(wanted))}; "
                f"type {_mapping(found, wanted)}"
            )
        if not is_whole and self.is_global_zero:
            _report_fit(path, wanted, found)
        self.load_model_state_dict(reader.state, strict=module.strict_loading and is_whole)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        state = names.without(self.lightning_module_state_dict(), checkpoint.get(LEFT_OUT, ()))
        parameters = self._reader.check_model(module, state, strict)
        self.read("model", {name: state[name] for name in parameters})
        self.hand_over(state.keys() - parameters)

    def hand_over(self, others: Set[str]) -> None:
        """Load the entries of the model's state that are no parameters from the loaded checkpoint. Collective.

        Args:
            others: the names of these entries.
        """
        module = self.lightning_module
        like = self._reader.weights_like
        tensors = {name: torch.empty_like(like[name], device="cpu") for name in sorted(others & like.keys())}
        self.read("model", tensors)
        there = {name: tensor.to(module.device) for name, tensor in tensors.items()}
        names.hand_over(module, {**self._reader.state.get("extra_state", {}), **there}, module.device)

    def read(self, kind: str, tensors: Mapping[str, Stored]) -> None:
        """Fill the tensors, by name, that the loaded checkpoint has of a kind; leave the others. Collective.

        Args:
            kind: "model", or "trained" for the weights whose averages are the model.
        """
        saved = self._reader.names(f"{kind}.")
        self._reader.fill({f"{kind}.{name}": tensor for name, tensor in tensors.items() if name in saved})

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
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
            if like.shape == parameters[name].shape and like.dim():
                room: Stored = torch.zeros_like(parameters[name].detach(), dtype=like.dtype)
            else:
                room = torch.zeros_like(like, device="cpu")
            targets[prefix + full_name] = room
            state.setdefault(name, {})[key] = room
        self._reader.fill(targets)
        return state


def _renamed(name: str, renamed: Mapping[str, str]) -> str:
    for old, new in renamed.items():
        prefix = "" if old == "." else old  # config/overrides: Hydra parses no empty key
        if name.startswith(prefix):
            return new + name.removeprefix(prefix)
    return name


def _report_fit(path: Path, wanted: set[str], found: set[str]) -> None:
    log.info("init_from  %d of the model's %d tensors are in %s", len(wanted & found), len(wanted), path)
    if initial := sorted(wanted - found):
        log.warning("init_from  %s keep their initial values", listed(initial))
    if unused := sorted(found - wanted):
        log.warning("init_from  %s of %s are not in the model", listed(unused), path)


def _mapping(found: Set[str], wanted: Set[str]) -> str:
    """Return what to type for the prefix, and the one in its place, with which most names, and more than one, fit."""
    pairs: Counter[tuple[str, str]] = Counter()
    ends = {name[at:]: name[:at] for name in sorted(wanted) for at in _starts(name)}
    for name in sorted(found):
        if (at := next((at for at in _starts(name) if name[at:] in ends), None)) is not None:
            pairs[name[:at] or ".", ends[name[at:]]] += 1
    ((old, new), fitting), *_ = [*pairs.most_common(1), (("old.", "new."), 0)]
    return f"""'init_names={{{old}: {new or '""'}}}'""" if fitting > 1 else "'init_names={old.: new.}'"


def _starts(name: str) -> list[int]:
    """Return where a name's parts start."""
    return [0, *(at + 1 for at, letter in enumerate(name) if letter == ".")]


def _is_within(path: Path, folder: Path) -> bool:
    """Return whether a path is below a folder after links and `..` are resolved."""
    return folder.resolve() in path.resolve().parents


def _best_of(callback: ModelCheckpoint, state: Mapping[str, Any], is_of_run: bool) -> dict[str, Any]:
    """Return a callback's state with its folder of this run, which may have been moved since; another run's is empty.

    Lightning would read and remove the files of its former folder, and whatever other paths a checkpoint from elsewhere
    names: those are left out.
    """
    before, now = str(state.get("dirpath")), callback.dirpath
    if not is_of_run or now is None:
        return {"dirpath": now, "best_model_score": None, "best_model_path": ""}

    def moved(path: str) -> str:
        is_inside = Path(before) in Path(os.path.normpath(path)).parents
        return str(Path(now, os.path.relpath(path, before))) if is_inside else ""

    named = {name: moved(path) for name, path in state.items() if name.endswith("model_path")}
    best = {moved(path): score for path, score in state.get("best_k_models", {}).items() if moved(path)}
    return {**state, **named, "best_k_models": best, "dirpath": now}
