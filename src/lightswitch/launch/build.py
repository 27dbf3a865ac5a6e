"""Construction of a run: its model, data and Trainer, with the engine's callbacks and hooks in place."""

from __future__ import annotations

import gc
import logging
from functools import partial

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import StrategyRegistry
from omegaconf import DictConfig

from lightswitch.batches.callback import GlobalBatch
from lightswitch.batches.plan import BatchPlan, scaled_learning_rate
from lightswitch.batches.randomness import mix, seed_generators
from lightswitch.context import RunContext
from lightswitch.errors import Refused, RefusedRequest
from lightswitch.failures.launchers import install_launcher
from lightswitch.failures.verdict import Timeouts
from lightswitch.failures.watchdog import Watchdog
from lightswitch.hooked_strategy import HookedStrategy, hooked
from lightswitch.launch import callbacks, compatibility, handshake, instantiation
from lightswitch.launch.hooks import skip_empty_hooks
from lightswitch.launch.instantiation import instantiated, plugins, raise_all, shards_itself
from lightswitch.launch.loop import replace_loops
from lightswitch.monitoring.metrics import MetricsFile
from lightswitch.process.state import leave_group_at_exit
from lightswitch.runs.record import RunRecord
from lightswitch.strategies.auto import auto

log = logging.getLogger(__name__)

Built = tuple[LightningModule, LightningDataModule | None, Trainer]


def build(cfg: DictConfig, run: RunContext, plan: BatchPlan) -> Built:
    """Build the model, the data and the Trainer, with the engine's callbacks first.

    Raises:
        RefusedRequest: with the messages of all constructors about their arguments, and tracebacks of the user's own.
    """
    gc.freeze()  # what was imported stays, so the collector, off since launch/hydra_entry, need not search it again
    gc.enable()
    leave_group_at_exit()
    skip_empty_hooks()
    record = RunRecord(cfg, run, plan)  # before the learning rate is scaled: it records the request
    cfg = _with_scaled_learning_rate(cfg, plan)
    refusals = instantiation.refused_optimizers(cfg)
    model, data, named, loggers, cluster, compilation = (
        instantiated(cfg, name, refusals) for name in ("model", "data", "callbacks", "logger", "cluster", "compile")
    )
    raise_all(refusals)
    raise_all(list(compatibility.problems(model, data, cfg, run, plan)))
    # GlobalBatch notes how far the constructors above have drawn random numbers; nothing may draw any in between.
    batch = GlobalBatch(plan, cfg.seed, shares_streams=not shards_itself(cfg))
    watchdog = Watchdog(cfg, run, batch, Timeouts(**cfg.watch), partial(_what_to_try, cfg, run, plan))
    engine = callbacks.of_engine(cfg, run, record, watchdog, batch, compilation or None)  # {} for compile=false
    users = callbacks.of_config(named, cfg.trainer)
    strategy = _strategy(cfg.trainer)
    strategy.on_data = partial(seed_generators, mix(cfg.seed))  # a split that is drawn is the same in each process
    trainer: Trainer = instantiated(
        cfg,
        "trainer",
        refusals,
        strategy=strategy,
        callbacks=[*engine, *users, *callbacks.step_timer(cfg, run, users)],
        logger=in_order(loggers or {}),
        **plugins(cfg, cluster, refusals),
        **plan.trainer_arguments(cfg.trainer),
        **callbacks.trainer_arguments(users, cfg.trainer),
        **compatibility.clipping(model, cfg, run),
        accumulate_grad_batches=plan.accumulation,
        enable_autolog_hparams=False,  # the record of the run logs them, once it goes on
    )
    raise_all(refusals)
    if told := list(compatibility.trainer_problems(trainer, model, cfg)):
        raise RefusedRequest(told)
    _advise(cfg, run, model)
    record.hold_loggers(trainer)
    replace_loops(trainer)
    handshake.arrange(cfg, run, trainer, strategy, watchdog)
    install_launcher(strategy, run)
    return model, data, trainer


def in_order(loggers: dict[str, Logger | None]) -> list[Logger]:
    """Return the loggers with metrics.csv last: the first is a module's `self.logger`, which has an `experiment`."""
    named = [logger for logger in loggers.values() if logger is not None]
    return sorted(named, key=lambda logger: isinstance(logger, MetricsFile))


def _what_to_try(cfg: DictConfig, run: RunContext, plan: BatchPlan, trainer: Trainer) -> str:
    """Return what to try next where memory has run out."""
    from lightswitch.launch import fitting  # and the code of plans, which no other run imports

    return fitting.out_of_memory(cfg, run, plan, trainer)


def _advise(cfg: DictConfig, run: RunContext, model: LightningModule) -> None:
    if run.is_first and cfg.mode == "fit" and compatibility.leaves_default(model, cfg, run):
        log.info(
            "clipping   %s clips gradients itself, and trainer.gradient_clip_val=%s is left out; type it to have it "
            "handed to configure_gradient_clipping", type(model).__name__, cfg.trainer.gradient_clip_val,
        )  # fmt: skip


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
