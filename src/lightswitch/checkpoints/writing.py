"""Saving of checkpoints: all ranks write one together, in a thread, while training goes on."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerStatus
from torch.distributed.constants import default_pg_timeout

from lightswitch.batches.logs import OF_RANKS
from lightswitch.batches.plan import saved_position
from lightswitch.checkpoints import directory, names, safe
from lightswitch.checkpoints.names import TRANSIENT
from lightswitch.checkpoints.ranks import Ranks, Steps
from lightswitch.checkpoints.saver import Saver, fingerprint, share
from lightswitch.checkpoints.shards import Stored
from lightswitch.errors import LostRank, Refused, UnwrittenCheckpoint, listed

log = logging.getLogger(__name__)

# Fractions of the process group's timeout: the wait for a rank in one step of a save, and the wait for all steps of a
# write. They expire before it does, and before the watchdog ends a run that starts no batch.
_STEP, _WRITE = 1 / 3, 2 / 3
_TRAINED = "current_model_state"  # Lightning's key for the trained weights, if the model holds their averages
_MODEL = ("model", "trained", TRANSIENT)  # prefixes of the names of the model's tensors in a checkpoint
_PATHS = ("best_model_path", "last_model_path", "kth_best_model_path")  # in the state of a ModelCheckpoint
_PATIENCE_SECONDS = 60  # for a checkpoint that is being written when a run fails; another rank may hang


class WrittenTogether(Strategy):
    """Base of strategies whose ranks write a checkpoint together: each rank writes its shards, in a separate thread.

    `lightning_module_state_dict` and `optimizer_state` return a rank's shards. They must not be collective: a rank that
    fails in a save would leave the others waiting.
    """

    # Set by the watchdog, which reports failures to all ranks: a failing save then does not use torch's store, which
    # prints errors if rank 0 is dead
    has_lost_a_rank: Event | None = None

    waiting: list[Callable[[], None]] | None = None  # saves that are put off to the end of a step, in order

    _checkpoint_ranks: Ranks | None = None
    _told: frozenset[str] = frozenset()  # paths of values that checkpoints omit, already logged

    @functools.cached_property
    def _saver(self) -> Saver:
        return Saver()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Copy the state into memory and return; a thread writes it while training goes on.

        Raises:
            LostRank: a rank did not reach the save in time, has failed, or is still writing the previous checkpoint.
        """
        tensors, state, left_out = self.written(checkpoint)
        self._tell_once(left_out)
        path, own = self._await_ranks(Path(filepath), tensors, state)
        if self.is_global_zero:
            with contextlib.suppress(OSError):  # the write makes it again, and raises the error
                path.parent.mkdir(parents=True, exist_ok=True)  # Lightning links to it before it is written
        staged, ranks = self.stage(own), self._ranks

        def write() -> None:
            try:
                return directory.write(path, staged, state, ranks)
            except UnwrittenCheckpoint as error:  # on every rank; retried once, as the error may be transient
                if self.is_global_zero:
                    log.warning("%s; retrying once", error)
            directory.write(path, staged, state, ranks)

        self._saver.write(write)

    def written(self, checkpoint: dict[str, Any]) -> tuple[dict[str, Stored], dict[str, Any], dict[str, str]]:
        """Split Lightning's checkpoint into the tensors by name, the rest to write, and the omitted values (see
        `safe.safe`). Collective.

        Raises:
            Refused: a hook has stored an entry under a name that the engine uses: the checkpoint would be unreadable.
        """
        assert self.lightning_module is not None
        taken = next((f"it has {key}" for key in ("extra_state", "names_of_tied") if key in checkpoint), None)
        checkpoint["names_of_tied"] = names.tied(self.lightning_module)  # for exports, which build no model
        tensors, plain = split(checkpoint)
        state, left_out = safe.safe(plain)
        try:
            saved_position(safe.checked_state(state, "it"))  # as when it is read
        except ValueError as error:
            taken = str(error)
        if taken:
            raise Refused(
                f"this checkpoint could not be read again: {taken}, and the engine stores an entry of that name; use "
                "another one in on_save_checkpoint of the module, callback or datamodule"
            )
        return tensors, state, left_out

    def of_rank_0(self, tensors: Iterable[str]) -> set[str]:
        """Return the names of the tensors that are saved from rank 0: all of the model's except parameters, as a batch
        norm's statistics, for example, differ by rank."""
        assert self.lightning_module is not None
        parameters = names.parameters(self.lightning_module).keys()
        parts = {name: name.partition(".") for name in tensors}
        return {name for name, (kind, _, own) in parts.items() if kind in _MODEL and own not in parameters}

    def _tell_once(self, left_out: dict[str, str]) -> None:
        """Log the values that a checkpoint omits, each of them once."""
        new: dict[str, list[str]] = {}
        for place, kind in left_out.items():
            if place not in self._told:
                new.setdefault(kind, []).append(place)
        for kind, places in new.items() if self.is_global_zero else ():
            log.warning("checkpoints leave out %s: a %s can't be read back safely", listed(places), kind)
        self._told = self._told | left_out.keys()

    def _await_ranks(
        self, path: Path, tensors: dict[str, Stored], state: dict[str, Any]
    ) -> tuple[Path, dict[str, Stored]]:
        """Wait until every rank has reached this save and written the previous one; return rank 0's path and the
        tensors that this rank writes. Rank 0's state also gets the `OF_RANKS` entries of all ranks."""
        ranks = self._ranks
        try:
            self.wait_for_write()
        except LostRank as error:
            if ranks is not None:
                ranks.staging.fail(str(error))
            raise
        self._log_failure()
        if ranks is None:
            return path, tensors
        path_of_rank_0, own = _agree(ranks.staging, path, tensors, state, self.of_rank_0(tensors))
        if self._saver.has_lost_a_rank:
            self._checkpoint_ranks = None  # the old group can't be used any more
        return path_of_rank_0, own

    def wait_for_write(self) -> None:
        """Wait until the previous checkpoint is written, without a time limit in a run of one process.

        Raises:
            LostRank: it took too long.
        """
        patience_seconds = None if self._checkpoint_ranks is None else self._timeout_seconds * _WRITE
        if not self._saver.wait(patience_seconds):
            raise LostRank(f"the previous checkpoint was not written within {patience_seconds:g} s")

    def has_written(self) -> bool:
        """Wait for the last checkpoint, and return whether it was written; the result is the same on all ranks."""
        self.wait_for_write()
        return self._saver.is_good

    def stage(self, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
        """Return copies of the tensors that this rank writes, which training does not change."""
        return self._saver.stage(tensors)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint of this run. Other paths are not removed: one from a foreign checkpoint may lead
        anywhere."""
        if not self.is_global_zero:
            return
        path = Path(filepath)
        if any(is_within(path.parent / "_", folder) for folder in self._folders()):
            self.once_saved(lambda: directory.remove(path))
        else:
            log.warning("%s is not removed: it is not a checkpoint of this run", path)

    def _folders(self) -> list[Path]:
        """Return the folders in which this run stores checkpoints."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        named = [callback.dirpath for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
        return [Path(folder) for folder in (trainer.default_root_dir, *named) if folder is not None]

    def once_saved(self, action: Callable[[], None]) -> None:
        """Run an action after the last saved checkpoint is written, only if that succeeded."""
        self.after_save(functools.partial(self._saver.then, action))

    def after_save(self, action: Callable[[], None]) -> None:
        """Run an action at once or, if the last checkpoint that was asked for is put off, when it has been taken."""
        if self.waiting:
            self.waiting.append(action)
        else:
            action()

    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.lightning_module is not None
        if self.lightning_module.trainer.checkpoint_callbacks:
            self._connect()  # collective: all ranks reach this hook

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._log_failure()

    def _log_failure(self) -> None:
        failure = self._saver.failure()
        if failure is not None and self.is_global_zero:
            log.error("%s; training continues, and earlier checkpoints are kept", failure)

    def on_train_end(self) -> None:
        super().on_train_end()
        self.finish_saving()
        assert self.lightning_module is not None
        run_dir = Path(self.lightning_module.trainer.default_root_dir)
        if self.is_global_zero:
            for folder in self._folders():
                if is_within(folder / "_", run_dir):  # other runs may write to any other folder
                    directory.finish_changes(folder)  # for checkpoints that could not be removed earlier

    def teardown(self) -> None:
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.status == TrainerStatus.RUNNING:  # not after an error
            self.finish_saving()  # what a hook has saved in an evaluation
        super().teardown()

    def finish_saving(self) -> None:
        """Wait until the run's last checkpoint is written; a process that ends before would lose it.

        Raises:
            UnwrittenCheckpoint, LostRank: it could not be written.
        """
        self.wait_for_write()
        if (failure := self._saver.failure()) is not None:
            raise failure

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        message = f"{type(exception).__name__}: {exception}".partition("\n")[0]
        ranks, self._checkpoint_ranks = self._checkpoint_ranks, None
        others = ranks if self.has_lost_a_rank is None else None
        if others is not None:
            others.staging.fail(message)
        if self._saver.wait(_PATIENCE_SECONDS) and others is not None:
            others.writing.fail(message)

    @property
    def _ranks(self) -> Ranks | None:
        """The ranks that write checkpoints together; None for a single process."""
        self._connect()
        return self._checkpoint_ranks

    @property
    def checkpoint_group(self) -> dist.ProcessGroup | None:
        return ranks.group if (ranks := self._ranks) is not None else None

    def _connect(self) -> None:
        if self._checkpoint_ranks is None and dist.is_available() and dist.is_initialized():
            self._checkpoint_ranks = Ranks(self._timeout_seconds * _STEP, self.has_lost_a_rank or Event())

    @property
    def _timeout_seconds(self) -> float:
        timeout: timedelta | None = getattr(self, "_timeout", None)  # of strategies with a process group
        return (timeout or default_pg_timeout).total_seconds()


def _agree(
    ranks: Steps, path: Path, tensors: dict[str, Stored], state: dict[str, Any], of_rank_0: set[str]
) -> tuple[Path, dict[str, Stored]]:
    """Return rank 0's path and the tensors that this rank writes: its share if all ranks replicate the same tensors,
    else all."""
    replicated = fingerprint(tensors, ranks.rank, ranks.world_size)
    ranks.take(f"reach the save of {path.name}", lambda: [replicated, state.get(OF_RANKS, [])])
    all_told = ranks.results(range(ranks.world_size if ranks.rank == 0 else 0))
    if of_ranks := [one for _, of_rank in all_told for one in of_rank]:
        state[OF_RANKS] = of_ranks
    are_alike = len({held for held, _ in all_told}) == 1
    ranks.take("plan the save", lambda: [str(path), are_alike] if ranks.rank == 0 else None)
    ((path_of_rank_0, are_alike),) = ranks.results([0])
    own = share(tensors, ranks.rank, ranks.world_size, of_first=of_rank_0) if are_alike else tensors
    return Path(path_of_rank_0), own


def split(checkpoint: dict[str, Any]) -> tuple[dict[str, Stored], dict[str, Any]]:
    """Split a checkpoint into the tensors of model and optimizers, by name, and the rest."""
    weights = checkpoint.pop("state_dict")
    tensors = {f"model.{name}": value for name, value in weights.items() if names.is_stored(value)}
    checkpoint["extra_state"] = {name: value for name, value in weights.items() if not names.is_stored(value)}
    trained = checkpoint.pop(_TRAINED, {})  # a callback may have omitted some weights
    tensors |= {f"trained.{name}": value for name, value in trained.items() if f"model.{name}" in tensors}
    tensors |= {f"{TRANSIENT}.{name}": value for name, value in checkpoint.pop(TRANSIENT, {}).items()}
    for index, optimizer in enumerate(checkpoint.get("optimizer_states", ())):
        found = names.tensors_in(optimizer["state"])
        tensors |= {f"optimizer.{index}.{name}": value for name, value in found.items()}
        optimizer["state"] = {
            name: {key: value for key, value in values.items() if not names.is_stored(value)}
            for name, values in optimizer["state"].items()
        }
    return tensors, checkpoint


def trusted_states(
    states: Mapping[str, Any], callbacks: Iterable[Callback], is_of_run: bool, is_best: Callable[[Path], bool]
) -> dict[str, Any]:
    """Return the states of callbacks, without paths outside of the folder in which a callback saves checkpoints.

    Lightning removes and reads the files at these paths. A state with other paths, for example from another run, is
    replaced by one without any checkpoint; so is one whose best checkpoint is no longer there.

    Args:
        states: the states in a checkpoint, by the callbacks' state keys.
        callbacks: the callbacks of this run.
        is_of_run: whether the checkpoint lies in this run's directory, which may have been moved since.
        is_best: returns whether a path still has the checkpoint that was the best one.
    """
    trusted = dict(states)
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.state_key in states:
            state = states[callback.state_key]
            state = _moved(callback, state) if is_of_run else state
            is_trusted = _is_of(callback, state) and (not (best := state["best_model_path"]) or is_best(Path(best)))
            trusted[callback.state_key] = state if is_trusted else _empty_state(callback)
    return trusted


def _moved(callback: ModelCheckpoint, state: Any) -> Any:
    """Return a callback's state with paths in the folder in which it saves now, in place of its former folder."""
    if not isinstance(state, dict) or not isinstance(before := state.get("dirpath"), str) or callback.dirpath is None:
        return state
    now = callback.dirpath

    def moved(path: Any) -> Any:
        is_there = isinstance(path, str) and Path(before) in Path(path).parents
        return str(Path(now, Path(path).relative_to(before))) if is_there else path

    named = {name: moved(state[name]) for name in _PATHS if name in state}
    best = state.get("best_k_models", {})
    if isinstance(best, dict):
        named["best_k_models"] = {moved(path): score for path, score in best.items()}
    return {**state, **named, "dirpath": now}


def is_within(path: Any, folder: Path) -> bool:
    """Return whether a path is below a folder after links and `..` are resolved."""
    try:
        return isinstance(path, str | Path) and folder.resolve() in Path(path).resolve().parents
    except (OSError, ValueError, RuntimeError):  # a loop of links, or an invalid path
        return False


def _is_of(callback: ModelCheckpoint, state: Any) -> bool:
    if not isinstance(state, dict) or callback.dirpath is None or "best_model_path" not in state:
        return False
    best = state.get("best_k_models", {})
    kth = state.get("kth_best_model_path", "")
    if not isinstance(best, dict) or (kth not in best and (kth or 0 < callback.save_top_k <= len(best))):
        return False
    named = [*(state.get(name, "") for name in _PATHS), *best]
    return all(path == "" or is_within(path, Path(callback.dirpath)) for path in named)


def _empty_state(callback: ModelCheckpoint) -> dict[str, Any]:
    """Return the state that Lightning's callback has before the first checkpoint."""
    return {"dirpath": callback.dirpath, "best_model_score": None, "best_model_path": ""}
