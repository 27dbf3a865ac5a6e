"""Construction of a run: model, data, Trainer and callbacks, what does not fit together, and the meeting of ranks."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import Any

import torch
from hydra.errors import InstantiationException
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy, ParallelStrategy, Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, OmegaConf, open_dict
from torch._C._distributed_c10d import Store

from lightswitch.batches.callback import GlobalBatch
from lightswitch.batches.plan import BatchPlan, Position, scaled_learning_rate
from lightswitch.batches.seeds import mix, own_generators, restoring, seed_generators, seeded
from lightswitch.checkpoints.last import LastCheckpoints
from lightswitch.cluster import environments, rendezvous
from lightswitch.cluster.rendezvous import Evidence, Meeting, MeetingPoint
from lightswitch.config import confidential, hydra_versions
from lightswitch.context import RunContext
from lightswitch.errors import Refused, RefusedRequest, ReportedElsewhere
from lightswitch.failures import classify
from lightswitch.failures.launchers import install_launcher
from lightswitch.failures.stopping import LossCheck, Survival
from lightswitch.failures.watchdog import Timeouts, Watchdog
from lightswitch.hooked_strategy import HookedStrategy, callbacks_of, hooked
from lightswitch.launch import commands
from lightswitch.loop.hooks import skip_empty_hooks
from lightswitch.loop.loops import replace_loops
from lightswitch.monitoring.metrics import MetricsFile
from lightswitch.monitoring.monitored import BestCheckpoint
from lightswitch.monitoring.notices import Notices
from lightswitch.monitoring.progress import Progress
from lightswitch.preflight import devices, root_keys
from lightswitch.preflight.targets import ENGINE_KEYS, GIVEN, OF_PYTORCH_LIGHTNING
from lightswitch.process import leave_group_at_exit
from lightswitch.runs import log as run_log
from lightswitch.runs import resume
from lightswitch.runs.record import RunRecord
from lightswitch.runs.resume import Beginning
from lightswitch.strategies.agreement import Agreement
from lightswitch.strategies.callbacks import StrategyCallback, callback_problems
from lightswitch.strategies.ddp import auto
from lightswitch.strategies.units import Compilation

log = logging.getLogger(__name__)


Built = tuple[LightningModule, LightningDataModule | None, Trainer]


def build(cfg: DictConfig, run: RunContext, plan: BatchPlan, start: Beginning | None = None) -> Built:
    """Build the model, the data and the Trainer, with the engine's callbacks first.

    Args:
        start: the checkpoint that the run reads; None to find it.

    Raises:
        RefusedRequest: constructors reject their arguments, or the parts don't go together; the error has all
            messages, and tracebacks of user code.
    """
    position = (start or resume.find(cfg, run)).position
    _take_seed(cfg, run, position)
    gc.freeze()  # imported objects stay, so the collector, off since launch/hydra_entry, needn't search them
    gc.enable()
    atexit.register(_unfreeze_for_triton)
    leave_group_at_exit()
    skip_empty_hooks()
    run_log.quiet_libraries()
    used = _as_used(cfg)  # what the record of the run has: the request, before the learning rate is scaled
    cfg = _with_scaled_learning_rate(cfg, plan)
    refusals: list[Refused] = []
    if (cluster := instantiated(cfg, "cluster", refusals)) is not None:
        environments.export(cluster, cfg.trainer.num_nodes, devices.count(cfg.trainer))
    model = instantiated(cfg, "model", refusals)
    data = _data(cfg, refusals, position)
    named, compilation = (instantiated(cfg, name, refusals) for name in ("callbacks", "compile"))
    loggers = instantiated(_named_by_job(cfg, run), "logger", refusals)
    raise_all(refusals)
    raise_all(list(problems_of_parts(model, data, cfg, plan)))
    # GlobalBatch stores the random state after the constructors above; nothing may draw random numbers in between.
    batch = GlobalBatch(plan, cfg.seed, shares_streams=not shards_itself(cfg))
    record = RunRecord(used, run, batch)
    watchdog = Watchdog(cfg, run, batch, Timeouts(**cfg.watch), partial(_what_to_try, plan))
    engine = callbacks_of_engine(cfg, run, record, watchdog, batch, compilation or None)  # {} for compile=false
    users = callbacks_of_config(named, cfg.trainer)
    strategy = _strategy(cfg.trainer)
    own = own_generators(data)
    strategy.on_data = partial(_begin_data, _seed_of_data(cfg, position), [restoring(one) for one in own])
    trainer: Trainer = instantiated(
        cfg,
        "trainer",
        refusals,
        strategy=strategy,
        callbacks=[*engine, *users],
        logger=in_order(loggers or {}),
        **plugins(cfg, cluster, refusals, strategy),
        **plan.trainer_arguments(cfg.trainer),
        **trainer_arguments(users, cfg.trainer),
        accumulate_grad_batches=plan.accumulation,
        enable_autolog_hparams=False,  # RunRecord logs them, once the run proceeds
    )
    raise_all(refusals)
    if message := list(trainer_problems(trainer, model, cfg)):
        raise RefusedRequest(message)
    record.hold_loggers(trainer)
    replace_loops(trainer)
    arrange_handshake(cfg, run, trainer, strategy, watchdog)
    install_launcher(strategy, run)
    return model, data, trainer


def _unfreeze_for_triton() -> None:
    """Let Python free what was imported, which takes a second, only where triton is: it reports the rest as leaked."""
    if "triton" in sys.modules:
        gc.unfreeze()


def _as_used(cfg: DictConfig) -> DictConfig:
    """Return a config without the optimizer and the schedule that no module reads: it has its own, or none."""
    unused = root_keys.unread(cfg, (group for group in GIVEN if cfg.get(group) is not None))
    used = cfg.copy()
    with open_dict(used):
        for group in unused:
            del used[group]
    return used


def _named_by_job(cfg: DictConfig, run: RunContext) -> DictConfig:
    """Return the config for loggers, in which the run_id of a sweep's job has its number: the jobs share the rest."""
    if OmegaConf.is_missing(run.hydra.job, "num"):
        return cfg
    of_job = cfg.copy()
    of_job.run_id = f"{cfg.run_id}-{run.hydra.job.num}"
    return of_job


def _take_seed(cfg: DictConfig, run: RunContext, position: Position | None) -> None:
    """Set the seed of an evaluation to that of the checkpoint's run: another one would split the data in another way,
    and test what was trained on."""
    if position is None or position.seed == cfg.seed:  # a run that is resumed under another seed is refused
        return
    if run.is_first:
        log.info("seed       %d, of the checkpoint's run, which splits data as it did; seed=%d has no effect",
                 position.seed, cfg.seed)  # fmt: skip
    cfg.seed = position.seed
    seed_everything(cfg.seed, workers=True, verbose=False)


def _data(cfg: DictConfig, refusals: list[Refused], position: Position | None) -> Any:
    """Return the data module, whose constructor draws from the seed itself, whatever the model before it has drawn."""
    if position is not None and not position.splits_by_seed:
        return instantiated(cfg, "data", refusals)
    with seeded(cfg.seed):
        return instantiated(cfg, "data", refusals)


def _seed_of_data(cfg: DictConfig, position: Position | None) -> int:
    """Return the seed from which data are prepared and set up: that of `seed_everything(cfg.seed)`, so that a notebook
    splits them as the run does."""
    return cfg.seed if position is None or position.splits_by_seed else mix(cfg.seed)


def _begin_data(seed: int, own: Iterable[Callable[[], None]]) -> None:
    """Bring all generators into the state from which data are prepared and set up, so that a random split is the same
    in each process and stage.

    Args:
        own: functions that restore those that the data module made in its constructor.
    """
    seed_generators(seed)
    for restore in own:
        restore()


def in_order(loggers: dict[str, Logger | None]) -> list[Logger]:
    """Return the loggers with metrics.csv last: the first is a module's `self.logger`, which needs an experiment."""
    named = [logger for logger in loggers.values() if logger is not None]
    return sorted(named, key=lambda logger: isinstance(logger, MetricsFile))


def _what_to_try(plan: BatchPlan, trainer: Trainer) -> str:
    """Return advice on what to try next after memory has run out."""
    share = plan.micro_batch * plan.accumulation
    smaller = [size for size in range(1, plan.micro_batch // 2 + 1) if share % size == 0]
    typed = f"type micro_batch_size={smaller[-1]}; " if smaller else ""
    return f"next: {typed}what fits is computed by {commands.plan(trainer.num_nodes, trainer.num_devices)}"


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
    """Return the strategy whose class the Trainer's config names.

    Raises:
        Refused: it names no class, or the constructor rejects its arguments.
    """
    named, refusals = trainer.get("strategy", "auto"), list[Refused]()
    if named == "auto":
        return hooked(auto(trainer.accelerator, trainer.devices, trainer.num_nodes))
    if not isinstance(named, DictConfig):
        raise Refused(
            f"trainer.strategy={named}: it names no class; type strategy={named}, or trainer.strategy._target_="
        )
    strategy = instantiated(trainer, "strategy", refusals)
    raise_all(refusals)
    return hooked(strategy)


def callbacks_of_engine(
    cfg: DictConfig,
    run: RunContext,
    record: RunRecord,
    watchdog: Watchdog,
    batch: GlobalBatch,
    compilation: Compilation | None,
) -> list[Callback]:
    """Return the engine's callbacks in the order in which their hooks run.

    The record of the run comes first, then the division of batches (docs/architecture.md has the reasons).
    """
    engine: list[Callback] = [record, batch]
    losses = None if cfg.on_nan == "ignore" else LossCheck(batch)
    ends_again = (cfg.ckpt_path or cfg.resume) == "auto"
    engine.append(Survival(run.signals, watchdog, losses, cfg.init_from, cfg.get("init_names"), ends_again))
    compares = [Agreement()] if cfg.trainer.num_nodes * devices.count(cfg.trainer) > 1 else []
    return [*engine, Notices(), StrategyCallback(cfg.matmul_precision, compilation), *compares]


def callbacks_of_config(nodes: dict[str, Any] | None, trainer: DictConfig) -> list[Any]:
    """Return the callbacks that the config names, without those that the Trainer's arguments disable.

    Lightning rejects a progress bar with `enable_progress_bar=false`, a checkpoint callback with
    `enable_checkpointing=false`, and a second progress bar; another bar replaces the engine's.

    Args:
        nodes: callbacks by name; None for one that is disabled.
    """
    users = [one for one in (nodes or {}).values() if one is not None]
    has_other_bar = any(isinstance(one, ProgressBar) and not isinstance(one, Progress) for one in users)
    left_out: list[type] = []
    if trainer.get("enable_progress_bar") is False or has_other_bar:
        left_out += [Progress]
    if trainer.get("enable_checkpointing") is False:
        left_out += [BestCheckpoint, LastCheckpoints]
    return [one for one in users if not isinstance(one, tuple(left_out))]


def trainer_arguments(users: list[Any], trainer: DictConfig) -> dict[str, Any]:
    """Return the argument that keeps Lightning from adding a progress bar: `~callbacks.progress` means no bar."""
    is_asked_for = trainer.get("enable_progress_bar") is not None
    has_bar = any(isinstance(one, ProgressBar) for one in users)
    return {} if is_asked_for or has_bar else {"enable_progress_bar": False}


def problems_of_parts(model: Any, data: Any, cfg: DictConfig, plan: BatchPlan) -> Iterator[Refused]:
    """Yield the reasons why a model and its data can't be trained as configured."""
    yield from _of_other_kinds(model, data, cfg)
    if not getattr(model, "automatic_optimization", True):
        yield from _by_hand(model, cfg, plan)


def trainer_problems(trainer: Trainer, model: LightningModule, cfg: DictConfig) -> Iterator[str]:
    """Yield the reasons why a Trainer's strategy can't run on its devices, or with the model or the callbacks."""
    if cfg.mode == "fit":
        yield from _clips_itself(model, trainer.strategy)
    yield from callback_problems(callbacks_of(trainer), trainer.strategy)


def problems_elsewhere(cfg: DictConfig, run: RunContext, plan: BatchPlan, strategy: Strategy) -> list[Refused]:
    """Return the reasons to refuse a start on other devices; the model is built on the meta device."""
    refusals: list[Refused] = []
    with torch.device("meta"):
        model = instantiated(cfg, "model", refusals)
    data, nodes = (instantiated(cfg, name, refusals) for name in ("data", "callbacks"))
    if refusals:
        return refusals
    users = callbacks_of_config(nodes, cfg.trainer)
    refusals += problems_of_parts(model, data, cfg, plan)
    refusals += map(Refused, _clips_itself(model, strategy))
    refusals += map(Refused, callback_problems(users, strategy))
    return refusals


def _of_other_kinds(model: Any, data: Any, cfg: DictConfig) -> Iterator[Refused]:
    """Yield a problem if model or data are not of Lightning's classes, or if there is no data."""
    for name, made, kind in (("model", model, LightningModule), ("data", data, LightningDataModule)):
        if made is not None and not isinstance(made, kind):
            found, target = type(made).__name__, cfg[name].get("_target_")
            is_of_other = "pytorch_lightning" in str(type(made).__mro__)
            hint = f", not pytorch_lightning's{OF_PYTORCH_LIGHTNING}" if is_of_other else ""
            yield Refused(
                f"{name}._target_={target}: found a {found}, expected lightning.pytorch's {kind.__name__}{hint}"
            )
    trains_without = data is None and cfg.mode == "fit" and isinstance(model, LightningModule)
    if trains_without and not is_overridden("train_dataloader", model):
        yield Refused(f"there is no data, and {type(model).__name__} has no train_dataloader; type data=NAME")


def _by_hand(model: LightningModule, cfg: DictConfig, plan: BatchPlan) -> Iterator[Refused]:
    """Yield settings that Lightning doesn't support under manual optimization: accumulation and gradient clipping."""
    name = f"{type(model).__name__} uses manual optimization"
    if plan.accumulation > 1:
        size = plan.micro_batch * plan.replicas
        instead = f"leave it out, or type global_batch_size={size} for steps of that size"
        yield Refused(f"micro_batch_size={plan.micro_batch}: {name}, which steps in each micro-batch; {instead}")
    if cfg.trainer.get("gradient_clip_val"):
        instead = "call self.clip_gradients in its training_step, and type trainer.gradient_clip_val=null"
        yield Refused(f"trainer.gradient_clip_val: {name}, for which Lightning does not clip gradients; {instead}")


def _clips_itself(model: LightningModule, strategy: Strategy) -> Iterator[str]:
    """Yield a problem if a module clips gradients itself where it would see none."""
    clips = model.automatic_optimization and is_overridden("configure_gradient_clipping", model)
    if clips and isinstance(strategy, DeepSpeedStrategy):
        yield (
            f"{type(model).__name__} clips gradients itself, in configure_gradient_clipping, but DeepSpeed does not "
            "expose gradients; use strategy=ddp or fsdp"
        )


# A constructor raises the first about files that its arguments name and, by a `raise` statement, the second about the
# arguments. Any other error is a bug.
_ABOUT_FILES = (OSError, ModuleNotFoundError)
_ABOUT_ARGUMENTS = (ValueError, MisconfigurationException)

_LIBRARIES = ("lightning", "lightswitch", "torch")  # their messages about arguments need no traceback


def instantiated(cfg: DictConfig, name: str, refusals: list[Refused], **arguments: Any) -> Any:
    """Instantiate a config node; if its arguments are rejected, append the refusal to ``refusals`` and return None.

    Lists and dicts become plain Python objects: OmegaConf's would make checkpoints unsafe to read.
    """
    try:
        return hydra_versions.instantiate(_node(cfg, name), **arguments) if cfg.get(name) is not None else None
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, Refused):
            refusals.append(cause)
            return None
        key = getattr(error, "full_key", None) or name
        if not (isinstance(cause, _ABOUT_FILES) or (isinstance(cause, _ABOUT_ARGUMENTS) and classify.raised_in(cause))):
            raise
        message = str(cause)
        details = classify.full_traceback(cause) if _is_of_user(cause) else ""
        refusals.append(RefusedRequest([message if message.startswith(name) else f"{key}: {message}"], details))
        return None


def _node(cfg: DictConfig, name: str) -> Any:
    """Return a config node without the keys that only the engine reads."""
    own = [key for key in ENGINE_KEYS.get(name, ()) if key in cfg[name]]
    whole = cfg.copy() if own else cfg  # Hydra 1.4 copies a node from the whole config that it belongs to
    with open_dict(whole):
        for key in own:
            del whole[name][key]
    return whole[name]


def _is_of_user(error: BaseException) -> bool:
    """Return whether the constructor that Hydra called when the error was raised is user code."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    called = [*dropwhile(lambda module: module.startswith(("hydra.", hydra_versions.__name__)), modules)]
    return bool(called) and called[0].partition(".")[0] not in _LIBRARIES


def raise_all(refusals: list[Refused]) -> None:
    """Raise all refusals as one error, if there are any.

    Raises:
        RefusedRequest: with the lines of each.
    """
    if refusals:
        lines = [problem for refusal in refusals for problem in refusal.problems]
        raise RefusedRequest(lines, "\n".join(refusal.details for refusal in refusals if refusal.details))


def plugins(cfg: DictConfig, cluster: Any, refusals: list[Refused], strategy: Strategy | None = None) -> dict[str, Any]:
    """Return the Trainer's arguments for the cluster environment and for a precision that is passed as a plugin.

    These precisions are those that the config names by class, and 64-true and 16-mixed: Lightning rejects these names
    with fully_shard, which supports any dtype.
    """
    precision = cfg.trainer.get("precision")
    if isinstance(precision, DictConfig):
        plugin = instantiated(cfg.trainer, "precision", refusals)
    elif str(precision) in ("64", "64-true"):
        plugin = DoublePrecision()
    elif str(precision) in ("16", "16-mixed") and isinstance(strategy, ModelParallelStrategy):
        plugin = MixedPrecision("16-mixed", "cuda")
    else:
        return {"plugins": cluster}
    return {"plugins": [one for one in (cluster, plugin) if one is not None], "precision": None}


def shards_itself(cfg: DictConfig) -> bool:
    """Return whether the config declares that datasets without indices split themselves between ranks."""
    return bool(cfg.get("data") and cfg.data.get("sharded_by") == "dataset")


def arrange_handshake(
    cfg: DictConfig, run: RunContext, trainer: Trainer, strategy: HookedStrategy, watchdog: Watchdog
) -> None:
    """Have a strategy compare a Trainer's processes before it forms the process group, and join the watchdog after.

    A group may hang in its first collective if NCCL versions differ, and in any later one if code or config differ.
    """
    if not isinstance(strategy, ParallelStrategy) or trainer.num_nodes * trainer.num_devices == 1:
        return
    evidence = _evidence(cfg, run, trainer)
    have_met = False

    @contextmanager
    def meeting() -> Iterator[None]:
        nonlocal have_met
        store = None if have_met else _compare(run, _meeting_point(cfg, trainer, strategy), evidence)
        have_met = True
        yield  # the group is formed; until then, the store at its port is held
        del store
        watchdog.join(trainer)

    strategy.meeting = meeting


def _evidence(cfg: DictConfig, run: RunContext, trainer: Trainer) -> Evidence:
    conf = [Path(source.path) for source in run.hydra.runtime.config_sources if source.schema == "file"]
    code = [Path(sys.argv[0]).resolve(), *conf, *rendezvous.source_folders(__name__)]
    for node in filter(None, (cfg.get("model"), cfg.get("data"))):
        code += rendezvous.source_folders(node._target_)
    config = confidential.values(cfg, without=("cluster.",))  # by which each process finds the others
    versions = rendezvous.software(on_gpu=isinstance(trainer.accelerator, CUDAAccelerator))
    return {"versions": versions, "code": rendezvous.digests(code), "config": config}


def _meeting_point(cfg: DictConfig, trainer: Trainer, strategy: ParallelStrategy) -> MeetingPoint:
    cluster, devices = strategy.cluster_environment, strategy.parallel_devices
    assert cluster is not None
    assert devices is not None
    rank = cluster.node_rank() * len(devices) + cluster.local_rank()
    world_size = trainer.num_nodes * len(devices)
    return MeetingPoint(cluster.main_address, cluster.main_port, rank, world_size, cfg.meet_timeout_seconds)


def _compare(run: RunContext, point: MeetingPoint, evidence: Evidence) -> Store:
    """Compare this process with the others, and return the store at which they have met.

    Raises:
        Refused: the processes differ, or some did not connect in time.
    """
    met = run.process.meeting
    store = rendezvous.open_store(point, "meeting", met if isinstance(met, Meeting) else None)
    verdict = rendezvous.compare(store, point, evidence, run.run_dir, run.process.refusal)
    if verdict:
        # the first process of this node, which has started this one, prints it in the same terminal
        is_child = not run.placement.is_external and os.environ.get("LOCAL_RANK", "0") != "0"
        raise ReportedElsewhere(verdict) if is_child else Refused(verdict)
    return store
