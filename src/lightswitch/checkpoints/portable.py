"""Checkpoints of one form under every Lightning strategy."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from lightswitch.batches.position import saved_position
from lightswitch.checkpoints import averaged, best, directory, find, hub_files, names, optimizers, trainable
from lightswitch.checkpoints.finetuning import unfreeze_again
from lightswitch.checkpoints.fitting import fitted
from lightswitch.checkpoints.piece import Piece, Stored
from lightswitch.checkpoints.ranks import Ranks, Steps
from lightswitch.checkpoints.reader import Reader
from lightswitch.checkpoints.safe import safe
from lightswitch.checkpoints.saver import Saver
from lightswitch.checkpoints.shares import fingerprint, share
from lightswitch.errors import LostRank

log = logging.getLogger(__name__)

# Parts of the process group's time-out, so that they are over before it, and before the watch over the ranks ends a run
# that begins no batch: the wait for a rank in one step of a save, and that for all steps of a write
_STEP, _WRITE = 1 / 3, 2 / 3
_PATIENCE_SECONDS = 60  # for a checkpoint that is being written when a run fails; another rank may hang


class PortableCheckpoints(Strategy):
    """Base of strategies whose checkpoints are portable; among a class's bases, it comes before Lightning's strategy.

    Parameters and optimizer states are stored by the parameters' names. A strategy that spreads tensors in a way of its
    own overrides `lightning_module_state_dict`, `optimizer_state` and what reads them; those here do for plain tensors
    and DTensors. None of them may be collective: a rank that fails in a save would leave the others waiting.
    """

    # by the watchdog: then a failing save need not tell them through torch's store, which is noisy where rank 0 is gone
    ranks_hear_of_failures = False

    _checkpoint_ranks: Ranks | None = None
    _told: frozenset[str] = frozenset()  # places in a checkpoint of what it leaves out
    _reader: Reader

    @functools.cached_property
    def _saver(self) -> Saver:  # made in the process that saves: a strategy is sent to those that Python spawns
        return Saver()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # tensors are read into where the strategy has put them

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return names.state_of(self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's class, its state by parameter names, and its groups with names in place of
        parameters."""
        assert self.lightning_module is not None
        return optimizers.state_of(optimizer, self.lightning_module)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Copy the state into memory and return; a thread writes it while training goes on.

        Raises:
            LostRank: a rank did not reach the save of in time, has failed, or is still writing the checkpoint before.
        """
        tensors, state, left_out = self.written(checkpoint)
        self._tell_once(left_out)
        path, own = self._await_ranks(Path(filepath), tensors)
        staged, ranks = self.stage(own), self._ranks
        self._saver.write(lambda: directory.write(path, staged, state, ranks))

    def written(self, checkpoint: dict[str, Any]) -> tuple[dict[str, Stored], dict[str, Any], dict[str, str]]:
        """Return what is written of Lightning's checkpoint: its tensors by name, all else, and what is left out (see
        `safe.safe`)."""
        assert self.lightning_module is not None
        averaged.named_once(checkpoint, self.lightning_module)
        checkpoint["names_of_tied"] = names.tied(self.lightning_module)  # for an export, which builds no model
        tensors, plain = split(checkpoint)
        return tensors, *safe(plain)

    def _tell_once(self, left_out: dict[str, str]) -> None:
        """Name what a checkpoint does not hold, the first time that it is left out."""
        for place, kind in left_out.items():
            if place not in self._told and self.is_global_zero:
                log.warning("checkpoints leave out %s: a %s can't be read back safely", place, kind)
        self._told = self._told | left_out.keys()

    def _await_ranks(self, path: Path, tensors: dict[str, Stored]) -> tuple[Path, dict[str, Stored]]:
        """Return rank 0's path and what this rank writes, once every rank is here and has written what it saved
        before."""
        ranks = self._ranks
        try:
            self._wait_for_write()
        except LostRank as error:
            if ranks is not None:
                ranks.staging.fail(str(error))
            raise
        self._log_failure()
        if ranks is None:
            return path, tensors
        path_of_rank_0, own = _agree(ranks.staging, path, tensors)
        if self._saver.has_lost_a_rank:
            self._checkpoint_ranks = None  # the old group can't be used any more
        return path_of_rank_0, own

    def _wait_for_write(self) -> None:
        """Wait until the checkpoint before is written; without a limit in a run of one process.

        Raises:
            LostRank: it took too long.
        """
        patience_seconds = None if self._checkpoint_ranks is None else self._timeout_seconds * _WRITE
        if not self._saver.wait(patience_seconds):
            raise LostRank(f"the previous checkpoint was not written within {patience_seconds:g} s")

    def stage(self, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
        """Return copies of what this rank writes, which training does not change."""
        return self._saver.stage(tensors)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint of this run; a path from a checkpoint that was written elsewhere may lead anywhere."""
        if not self.is_global_zero:
            return
        path = Path(filepath)
        if any(best.is_within(path.parent / "_", folder) for folder in self._folders()):
            self.once_saved(lambda: directory.remove(path))
        else:
            log.warning("%s is not removed: it is not a checkpoint of this run", path)

    def _folders(self) -> list[Path]:
        """Return the folders in which this run keeps checkpoints."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        named = [callback.dirpath for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
        return [Path(folder) for folder in (trainer.default_root_dir, *named) if folder is not None]

    def once_saved(self, action: Callable[[], None]) -> None:
        """Run an action when what was saved last is written, and only if that succeeded."""
        self._saver.then(action)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._log_failure()

    def _log_failure(self) -> None:
        failure = self._saver.failure()
        if failure is not None and self.is_global_zero:
            log.error("%s; training goes on, and the checkpoints before it are kept", failure)

    def on_train_end(self) -> None:
        super().on_train_end()
        self.finish_saving()

    def finish_saving(self) -> None:
        """Wait until the run's last checkpoint is written.

        Raises:
            UnwrittenCheckpoint, LostRank: it could not be written.
        """
        self._wait_for_write()
        if (failure := self._saver.failure()) is not None:
            raise failure

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        told = f"{type(exception).__name__}: {exception}".partition("\n")[0]
        ranks, self._checkpoint_ranks = self._checkpoint_ranks, None
        others = None if self.ranks_hear_of_failures else ranks
        if others is not None:
            others.staging.fail(told)
        if self._saver.wait(_PATIENCE_SECONDS) and others is not None:
            others.writing.fail(told)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return a checkpoint's state without tensors, which are read later, each to where the strategy has put it.

        A run that trains takes the newest undamaged one of its own, up to the one that is named.
        """
        self._wait_for_write()
        assert self.lightning_module is not None
        trainer, path = self.lightning_module.trainer, Path(checkpoint_path)
        is_fit = trainer.state.fn == TrainerFn.FITTING
        if is_fit:
            candidates = self.broadcast(find.up_to(path, Path(trainer.default_root_dir)))
            self._reader = find.first_whole(candidates, self._group)
        else:
            self._reader = Reader(self.broadcast(path), self._group)
        state = {**self._reader.state, "state_dict": {}}  # the tensors are read below, each where it belongs
        state |= averaged.restored(state, self._reader, is_fit)
        if "callbacks" in state:
            state["callbacks"] = best.trusted_states(state["callbacks"], trainer.callbacks)  # type: ignore[attr-defined]  # set past Lightning's declaration
        return state

    def start_from(self, path: Path, renamed: Mapping[str, str]) -> None:
        """Load the weights of a checkpoint, and nothing else of it; of safetensors those that fit.

        Args:
            renamed: how names of safetensors begin, and how the model's do instead.
        """
        module = self.lightning_module
        assert module is not None
        self._reader = Reader(path, self._group)
        if of_hub := hub_files.is_hub(path):
            state = self.lightning_module_state_dict()
            live = [name for name, value in state.items() if names.is_stored(value)]
            self._reader.take(lambda found: fitted(path, found, module, live, renamed))
        self.load_model_state_dict(self._reader.state, strict=module.strict_loading and not of_hub)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        state = names.without(self.lightning_module_state_dict(), checkpoint.get(trainable.KEY, ()))
        live = {name: value for name, value in state.items() if names.is_stored(value)}
        self._reader.check_model(live, module.hparams, strict)
        saved = self._reader.names("model.")
        self._reader.fill({f"model.{name}": value for name, value in live.items() if name in saved})
        names.set_extra_state(module, checkpoint.get("extra_state", {}))

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
            optimizers.load(optimizer, groups, state, saved["param_groups"])

    def _read_optimizer_state(
        self, prefix: str, values: dict[str, Any], parameters: Mapping[str, nn.Parameter]
    ) -> dict[str, dict[str, Any]]:
        state: dict[str, dict[str, Any]] = {name: dict(plain) for name, plain in values.items() if plain}
        targets: dict[str, Stored] = {}
        for full_name in self._reader.names(prefix):
            name, _, key = full_name.rpartition(".")
            room = self.room_for(parameters[name], self._reader.like[prefix + full_name])
            targets[prefix + full_name] = room
            state.setdefault(name, {})[key] = room.values if isinstance(room, Piece) else room
        self._reader.fill(targets)
        return state

    def room_for(self, parameter: nn.Parameter, saved: Tensor) -> Stored:
        """Return a tensor to read a parameter's optimizer state into, spread as the parameter where shapes agree.

        Args:
            saved: the state's shape and dtype in the checkpoint, on the meta device.
        """
        if saved.shape == parameter.shape and parameter.dim():
            return torch.zeros_like(parameter.detach(), dtype=saved.dtype)
        return torch.zeros_like(saved, device="cpu")

    def described_optimizers(self) -> list[tuple[str, optimizers.Groups]]:
        """Return the class and the parameter groups, by name, of each optimizer."""
        assert self.lightning_module is not None
        return [
            (type(optimizer).__name__, optimizers.groups_of(optimizer, self.lightning_module))
            for optimizer in self.optimizers
        ]

    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.lightning_module is not None
        if self.lightning_module.trainer.checkpoint_callbacks:
            self._connect()  # collective, so at a moment that all ranks reach

    @property
    def _ranks(self) -> Ranks | None:
        """The ranks that write checkpoints together; None for one process."""
        self._connect()
        return self._checkpoint_ranks

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return ranks.group if (ranks := self._ranks) is not None else None

    def _connect(self) -> None:
        if self._checkpoint_ranks is None and dist.is_available() and dist.is_initialized():
            self._checkpoint_ranks = Ranks(self._timeout_seconds * _STEP)

    @property
    def _timeout_seconds(self) -> float:
        timeout: timedelta | None = getattr(self, "_timeout", None)  # of strategies with a process group
        return (timeout or default_pg_timeout).total_seconds()


def _agree(ranks: Steps, path: Path, tensors: dict[str, Stored]) -> tuple[Path, dict[str, Stored]]:
    """Return rank 0's path, and of the tensors those that this rank writes: all it has, where ranks hold others."""
    told = fingerprint(tensors, ranks.rank, ranks.world_size)
    ranks.take(f"reach the save of {path.name}", lambda: told)
    all_told = ranks.results(range(ranks.world_size if ranks.rank == 0 else 0))
    ranks.take("share out the save", lambda: [str(path), len(set(all_told)) == 1] if ranks.rank == 0 else None)
    ((path_of_rank_0, are_alike),) = ranks.results([0])
    return Path(path_of_rank_0), share(tensors, ranks.rank, ranks.world_size) if are_alike else tensors


def split(checkpoint: dict[str, Any]) -> tuple[dict[str, Stored], dict[str, Any]]:
    """Return the tensors of model and optimizers by name, and all else of a checkpoint in plain types."""
    weights = checkpoint.pop("state_dict")
    tensors = {f"model.{name}": value for name, value in weights.items() if names.is_stored(value)}
    checkpoint["extra_state"] = {name: value for name, value in weights.items() if not names.is_stored(value)}
    states = checkpoint.pop("optimizer_states", [])
    for index, optimizer in enumerate(states):
        found = names.tensors_in(optimizer["state"])
        tensors |= {f"optimizer.{index}.{name}": value for name, value in found.items()}
        optimizer["state"] = {
            name: {key: value for key, value in values.items() if not names.is_stored(value)}
            for name, values in optimizer["state"].items()
        }
    if states:
        checkpoint["optimizer_states"] = states
    return tensors, checkpoint
