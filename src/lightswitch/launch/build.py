"""Construction of the model, the data and the Trainer from their config nodes."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.strategies import StrategyRegistry
from omegaconf import DictConfig, open_dict

from lightswitch.batches.callback import GlobalBatch
from lightswitch.batches.plan import BatchPlan, scaled_learning_rate
from lightswitch.checkpoints.initial import InitialWeights
from lightswitch.checkpoints.last import LastCheckpoints
from lightswitch.config.overrides import key_and_value, typed_overrides
from lightswitch.context import RunContext
from lightswitch.errors import Refused, RefusedRequest
from lightswitch.fault_tolerance import classify
from lightswitch.fault_tolerance.failure import full_traceback
from lightswitch.fault_tolerance.launchers import install_launcher
from lightswitch.fault_tolerance.not_finite import FiniteLoss
from lightswitch.fault_tolerance.preemption import Preemption
from lightswitch.fault_tolerance.watchdog.callback import Watchdog
from lightswitch.fault_tolerance.watchdog.verdict import Timeouts
from lightswitch.hooked_strategy import HookedStrategy, hooked
from lightswitch.launch import handshake, out_of_memory
from lightswitch.launch.hooks import skip_empty_hooks
from lightswitch.launch.loop import shorten_loop
from lightswitch.monitoring.batch_count import StepsByHand
from lightswitch.monitoring.judged import BestCheckpoint
from lightswitch.monitoring.model_size import ModelSize
from lightswitch.monitoring.plateau import PlateauValidation
from lightswitch.monitoring.progress import Progress
from lightswitch.monitoring.step_timer import StepTimer
from lightswitch.preflight.targets import ENGINE_KEYS
from lightswitch.process.state import leave_group_at_exit
from lightswitch.runs.hyperparameters import CleanHyperparameters
from lightswitch.runs.predictions import PredictionWriter
from lightswitch.runs.process_logging import ProcessLogging
from lightswitch.runs.record import RunRecord
from lightswitch.strategies.auto import auto
from lightswitch.strategies.callbacks import KnownCallbacks, refused
from lightswitch.strategies.fused import FusedStep
from lightswitch.strategies.matmul import MatmulPrecision

log = logging.getLogger(__name__)

Built = tuple[LightningModule, LightningDataModule | None, Trainer]

# A constructor raises these about files that its arguments name and, by a `raise` statement, about the arguments.
# Any other error is a bug.
_ABOUT_FILES = (OSError, ModuleNotFoundError)
_ABOUT_ARGUMENTS = (ValueError, MisconfigurationException)

_LIBRARIES = ("lightning", "lightswitch", "torch")  # their messages about arguments need no traceback


def build(cfg: DictConfig, run: RunContext, plan: BatchPlan) -> Built:
    """Build the model, the data and the Trainer, with the engine's callbacks first.

    Raises:
        RefusedRequest: with the messages of all constructors about their arguments, and tracebacks of the user's own.
    """
    gc.freeze()  # what was imported stays, so the collector, off since launch/hydra_entry, need not search it again
    gc.enable()
    leave_group_at_exit()
    skip_empty_hooks()
    record = RunRecord(cfg, run)  # before the learning rate is scaled: it records the request
    cfg = _with_scaled_learning_rate(cfg, plan)
    refusals: list[Refused] = []
    model, data, callbacks, loggers, cluster = (
        instantiated(cfg, name, refusals) for name in ("model", "data", "callbacks", "logger", "cluster")
    )
    if run.is_first and _is_typed(run, "data.batch_size"):
        log.info(
            "advice     data.batch_size is not what a step takes where batches are cut here; type global_batch_size=%s",
            cfg.data.batch_size,
        )
    compilation = instantiated(cfg, "compile", refusals)
    raise_all(refusals)
    refusals += _of_other_kinds(model, data, cfg)
    refusals += _by_hand(model, plan)
    raise_all(refusals)
    # In this order hooks run: the log and the record of the run first, then the watchdog, then batches.
    # GlobalBatch notes how far the constructors above have drawn random numbers; nothing may draw any in between.
    batch = GlobalBatch(plan, cfg.seed, shares_streams=not shards_itself(cfg))
    watchdog = Watchdog(cfg, run, batch, Timeouts(**cfg.watch), partial(out_of_memory.advice, cfg, run, plan))
    engine: list[Callback] = [record, watchdog, batch, Preemption(run.signals), PredictionWriter(), ModelSize()]
    engine += [ProcessLogging(run.job_logging), CleanHyperparameters(cfg), KnownCallbacks()]
    engine += [MatmulPrecision(cfg.matmul_precision), FusedStep(), StepsByHand()]
    if cfg.on_nan != "ignore":
        engine.append(FiniteLoss(batch, cfg.on_nan))
    if compilation:
        engine.append(compilation)
    if not _is_typed(run, "trainer.val_check_interval", "trainer.check_val_every_n_epoch"):
        engine.append(PlateauValidation())
    if cfg.init_from:
        engine.append(InitialWeights(cfg.init_from, cfg.get("init_names")))
    strategy = _strategy(cfg.trainer)
    trainer = instantiated(
        cfg,
        "trainer",
        refusals,
        strategy=strategy,
        callbacks=[*engine, *_with_timer(_asked_for(_switched_on(callbacks), cfg.trainer), cfg, run)],
        logger=_switched_on(loggers),
        **plugins(cfg, cluster, refusals),
        **plan.trainer_arguments(cfg.trainer),
        **_clipping(model, cfg, run, refusals),
        accumulate_grad_batches=plan.accumulation,
        enable_autolog_hparams=False,  # the record of the run logs them, once it goes on
    )
    raise_all(refusals)
    if problems := list(refused(trainer)):
        raise RefusedRequest(problems)
    record.hold_loggers(trainer)
    shorten_loop(trainer)
    handshake.arrange(cfg, run, trainer, strategy, watchdog)
    install_launcher(strategy, run)
    return model, data, trainer


def _strategy(trainer: DictConfig) -> HookedStrategy:
    """Return the strategy that the Trainer's config names, by its code or as one of Lightning's.

    Raises:
        Refused: there is none of the name, or its constructor refuses its arguments.
    """
    named, refusals = trainer.get("strategy", "auto"), list[Refused]()
    if named == "auto":
        return hooked(auto(trainer.accelerator, trainer.devices, trainer.num_nodes))
    if not isinstance(named, DictConfig):
        if named not in StrategyRegistry:
            raise Refused(f"trainer.strategy={named}: there is no such strategy; use strategy=auto")
        return hooked(StrategyRegistry.get(named))
    strategy = instantiated(trainer, "strategy", refusals)
    raise_all(refusals)
    return hooked(strategy)


def shards_itself(cfg: DictConfig) -> bool:
    """Return whether the user has declared that datasets without indices split themselves by ranks."""
    return bool(cfg.get("data") and cfg.data.get("sharded_by") == "dataset")


def raise_all(refusals: list[Refused]) -> None:
    """Raise what was refused, all at once, if anything was.

    Raises:
        RefusedRequest: with the lines of each.
    """
    if refusals:
        problems = [problem for refusal in refusals for problem in refusal.problems]
        raise RefusedRequest(problems, "\n".join(refusal.details for refusal in refusals if refusal.details))


def instantiated(cfg: DictConfig, name: str, refusals: list[Refused], **arguments: Any) -> Any:
    """Instantiate a config node, with lists and dicts as Python's own: OmegaConf's make checkpoints unsafe to read."""
    try:
        return instantiate(_node(cfg, name), **arguments, _convert_="all") if cfg.get(name) is not None else None
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, Refused):
            refusals.append(cause)
            return None
        if not (isinstance(cause, _ABOUT_FILES) or (isinstance(cause, _ABOUT_ARGUMENTS) and classify.raised_in(cause))):
            raise
        key = getattr(error, "full_key", None) or name
        told = str(cause)
        details = full_traceback(cause) if _is_of_user(cause) else ""
        refusals.append(RefusedRequest([told if told.startswith(name) else f"{key}: {told}"], details))
        return None


def _node(cfg: DictConfig, name: str) -> Any:
    """Return a config node without the keys that are the engine's own."""
    own = [key for key in ENGINE_KEYS.get(name, ()) if key in cfg[name]]
    if not own:
        return cfg[name]
    node = cfg[name].copy()
    with open_dict(node):
        for key in own:
            del node[key]
    return node


def _is_of_user(error: BaseException) -> bool:
    """Return whether the constructor that Hydra called, which raised the error or called what did, is the user's."""
    called = error.__traceback__ and error.__traceback__.tb_next
    return called is not None and called.tb_frame.f_globals["__name__"].partition(".")[0] not in _LIBRARIES


def _of_other_kinds(model: Any, data: Any, cfg: DictConfig) -> Iterator[Refused]:
    """Yield that a node's code makes something that Lightning does not train, or does not take data from."""
    for name, made, kind in (("model", model, LightningModule), ("data", data, LightningDataModule)):
        if made is not None and not isinstance(made, kind):
            found, target = type(made).__name__, cfg[name].get("_target_")
            hint = "" if "pytorch_lightning" not in str(type(made).__mro__) else ", not pytorch_lightning's"
            yield Refused(
                f"{name}._target_={target}: found a {found}, expected lightning.pytorch's {kind.__name__}{hint}"
            )


def _by_hand(model: LightningModule | None, plan: BatchPlan) -> Iterator[Refused]:
    """Yield that a module which optimizes by hand would step after each micro batch, and not once in a step."""
    if plan.accumulation > 1 and not getattr(model, "automatic_optimization", True):
        told = f"{type(model).__name__} optimizes by hand, in each micro batch"
        size = plan.micro_batch * plan.replicas
        instead = f"leave it out, or type global_batch_size={size} for steps of that size"
        yield Refused(f"micro_batch_size={plan.micro_batch}: {told}; {instead}")


def _clipping(
    model: LightningModule | None, cfg: DictConfig, run: RunContext, refusals: list[Refused]
) -> dict[str, Any]:
    """Return the Trainer's clipping for a module that optimizes by hand: none, as Lightning can't do it there."""
    if getattr(model, "automatic_optimization", True) or not cfg.trainer.get("gradient_clip_val"):
        return {}
    if _is_typed(run, key := "trainer.gradient_clip_val"):
        told = f"{type(model).__name__} optimizes by hand, which Lightning does not clip"
        refusals.append(Refused(f"{key}: {told}; call self.clip_gradients in its training_step, and leave {key} out"))
    return {"gradient_clip_val": None}


def _is_typed(run: RunContext, *keys: str) -> bool:
    """Return whether the command line has one of the keys: what nobody typed gives way to what a module needs."""
    return any(key_and_value(override)[0] in keys for override in typed_overrides(run.hydra))


def plugins(cfg: DictConfig, cluster: Any, refusals: list[Refused]) -> dict[str, Any]:
    """Return the Trainer's arguments for the cluster environment and for a precision that has no name of Lightning's.

    These are precisions that the config names by their class, and 64-true: Lightning refuses that name with
    fully_shard, which takes any dtype.
    """
    precision = cfg.trainer.get("precision")
    if isinstance(precision, DictConfig):
        plugin = instantiated(cfg.trainer, "precision", refusals)
    elif str(precision) in ("64", "64-true"):
        plugin = DoublePrecision()
    else:
        return {"plugins": cluster}
    return {"plugins": [one for one in (cluster, plugin) if one is not None], "precision": None}


def _switched_on(nodes: dict[str, Any] | None) -> list[Any]:
    return [node for node in (nodes or {}).values() if node is not None]


def _asked_for(callbacks: list[Any], trainer: DictConfig) -> list[Any]:
    """Return the callbacks but those of the engine that the Trainer is to do without: it refuses both together."""
    left_out: list[type] = []
    if trainer.get("enable_progress_bar") is False:
        left_out += [Progress]
    if trainer.get("enable_checkpointing") is False:
        left_out += [BestCheckpoint, LastCheckpoints]
    return [callback for callback in callbacks if not isinstance(callback, tuple(left_out))]


def _with_timer(callbacks: list[Any], cfg: DictConfig, run: RunContext) -> list[Any]:
    """Return the callbacks with one that measures steps, if runs are to be compared and the config names none."""
    if not cfg.compare or any(isinstance(callback, StepTimer) for callback in callbacks):
        return callbacks
    return [*callbacks, StepTimer(str(run.run_dir))]


def _with_scaled_learning_rate(cfg: DictConfig, plan: BatchPlan) -> DictConfig:
    rule = cfg.lr_scaling.rule
    if rule == "none":
        return cfg
    cfg, tuned = cfg.copy(), cfg.optimizer.lr
    cfg.optimizer.lr = scaled_learning_rate(tuned, rule, plan.global_batch, cfg.lr_scaling.reference_batch_size)
    log.info(
        "learning rate %g tuned at a global batch of %d becomes %g at %d (%s rule)",
        tuned, cfg.lr_scaling.reference_batch_size, cfg.optimizer.lr, plan.global_batch, rule,
    )  # fmt: skip
    return cfg
