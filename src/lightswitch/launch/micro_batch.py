"""The decision of micro_batch_size=auto, before a run is built: the largest micro batch that fits."""

from __future__ import annotations

import gc
import logging
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from lightswitch.batches.plan import BatchPlan
from lightswitch.context import RunContext
from lightswitch.errors import NeedsValues, Refused, Unplanned
from lightswitch.launch import estimates
from lightswitch.planning import candidates, report
from lightswitch.planning.candidates import Candidate

log = logging.getLogger(__name__)

_TYPE = "type micro_batch_size=N"


def decide(cfg: DictConfig, run: RunContext) -> BatchPlan:
    """Put the largest micro batch that fits under the run's strategy into a composed config; return the batch.

    It is found by simulation, so that no device has to run out of memory, and divides a device's share of the global
    batch: the run stays as it is.

    Raises:
        Refused: none fits, or a step can't be simulated.
    """
    try:
        request = estimates.requested(cfg, prepares_data=not run.placement.is_external)
        candidate = _candidate(cfg, run)
        found = estimates.confirmed(request, estimates.fitted(request, candidate), [candidate])
    except Unplanned as unplanned:
        raise Refused(f"micro_batch_size=auto: it is not known what a step takes: {unplanned}; {_TYPE}") from unplanned
    except NeedsValues as error:
        raise Refused(f"micro_batch_size=auto: it is not known what a step takes, which {error}; {_TYPE}") from error
    finally:
        gc.collect()  # which is off until all is built: nothing stays of what was simulated
    if not found.memory.fits:
        what_would = candidates.what_would_fit([found], [], request.device)
        raise Refused(f"micro_batch_size=auto: {report.answer(found, request.device)}; {what_would}")
    if run.is_first:
        log.info("auto       %s", report.took(found, request.device))
    return _put(estimates.batch_of(request, candidate, found.run.micro_batch), cfg, run)


def _candidate(cfg: DictConfig, run: RunContext) -> Candidate:
    world, choice = estimates.world_of(cfg), str(run.hydra.runtime.choices.get("strategy"))
    if choice == "auto":  # which has taken no other
        name = "single" if world.size == 1 else "ddp"
        found = candidates.every(run.hydra, world.nodes)
        return next(one for one in found if one.name == name)
    node: Any = OmegaConf.to_container(cfg.trainer.strategy, resolve=True)
    return candidates.chosen(choice, node)


def _put(batch: BatchPlan, cfg: DictConfig, run: RunContext) -> BatchPlan:
    run.process.decided.append(f"micro_batch_size={batch.micro_batch}")
    with open_dict(cfg):
        cfg.micro_batch_size = batch.micro_batch
    return batch
