"""A dry run: what the ranks of a run would read and write, without starting any rank."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import CombinedLoader
from omegaconf import DictConfig, OmegaConf
from torch.utils._pytree import tree_leaves

from lightswitch import regular_files
from lightswitch.batches.loaders import CYCLE, Combined, obstacle, training_loader
from lightswitch.batches.order import TrainingSlices
from lightswitch.batches.plan import BatchPlan, RankShare
from lightswitch.context import RunContext
from lightswitch.errors import listed, shown
from lightswitch.launch import plan
from lightswitch.launch.build import problems_elsewhere, raise_all
from lightswitch.launch.plan import Request
from lightswitch.planning import candidates, report
from lightswitch.planning.estimate import Estimate
from lightswitch.preflight import strategies

log = logging.getLogger(__name__)
_SHOWN_SAMPLES = 8


def dry_run(cfg: DictConfig, run: RunContext) -> None:
    """Log what the ranks would do, and write it to dry_run.json.

    Raises:
        Refused: the run would be refused at its start, or its step can't be simulated.
    """
    request = plan.requested(cfg)
    candidate = candidates.chosen(run.hydra.runtime.choices.get("strategy"), request.trainer["strategy"])
    batch = plan.batch_of(request, candidate, cfg.micro_batch_size)
    plan.check(request, candidate, batch)
    raise_all(problems_elsewhere(cfg, run, batch, plan.strategy_of(candidate)))
    found = plan.at(request, candidate, batch)
    ranks = strategies.ranks(OmegaConf.to_container(cfg.dry_run)["rank"])  # type: ignore[index,call-overload]  # a node
    reads = {rank: _reads(request, candidate.ranks_of_a_sample, batch, rank) for rank in ranks}
    world, precision = request.world, cfg.trainer.get("precision")
    devices = f"{world.nodes} × {world.devices_per_node} {request.device.name} (nodes × devices)"
    places = [f"rank {rank} is device {rank % world.devices_per_node} of node {rank // world.devices_per_node}, from 0"
              for rank in reads if rank]  # fmt: skip
    sections = {
        "world": [f"{world.size} ranks, {devices}, {candidate.words[0]}, precision {precision}", *places],
        "batch": [str(batch)],
        "samples": list(_samples(reads)),
        "memory": [*report.table([found]).splitlines(), *filter(None, [report.replaced(found)])],
        "files": list(_files(cfg, run.run_dir, found)),
    }
    lines = ((name if index == 0 else "", line) for name, text in sections.items() for index, line in enumerate(text))
    log.info("\n%s\n", "\n".join(f"{name:<12} {line}".rstrip() for name, line in lines))
    samples = {rank: [asdict(one) for one in of_rank] for rank, of_rank in reads.items()}
    path = run.run_dir / "dry_run.json"
    data = {"batch": asdict(batch), "samples": samples, "estimate": report.as_data(found), "files": sections["files"]}
    regular_files.write_text(path, json.dumps(data, indent=1, default=str))
    log.info("dry run    %s", shown(path))


@dataclass(frozen=True)
class Reads:
    """Samples that one rank reads from one training loader.

    Attributes:
        why_not: the reason why the samples are unknown; if set, the other attributes are empty.
        samples: number of samples in an epoch, over all ranks.
        steps: sample indices, by step and micro-batch.
    """

    why_not: str | None = None
    samples: int = 0
    steps: tuple[tuple[tuple[Any, ...], ...], ...] = ()


def _reads(request: Request, ranks_of_a_sample: int, batch: BatchPlan, rank: int) -> list[Reads]:
    """Return the samples that a rank reads from each training loader in its first steps.

    Args:
        ranks_of_a_sample: number of consecutive ranks that read the same samples.

    Raises:
        Refused: the loaders can't be split over this many devices, or can't be combined.
    """
    loaders, cfg = request.samples.loaders, request.cfg
    mode = loaders._mode if isinstance(loaders, CombinedLoader) else CYCLE
    combined = Combined(lambda: mode)
    share = RankShare(batch, rank // ranks_of_a_sample, cfg.seed)
    found: list[Reads | TrainingSlices] = []
    for loader in tree_leaves(loaders.iterables if isinstance(loaders, CombinedLoader) else loaders):
        if (reason := obstacle(loader)) is not None:
            combined.others.append(loader)
            found.append(Reads(reason))
            continue
        slices = training_loader(loader, share, combined).batch_sampler
        found.append(slices if isinstance(slices, TrainingSlices) else Reads("its samples have no indices"))
    combined.check()
    return [one if isinstance(one, Reads) else _first_steps(one, batch, cfg.dry_run.steps) for one in found]


def _first_steps(slices: TrainingSlices, batch: BatchPlan, steps: int) -> Reads:
    micro = [tuple(chosen) for *_, chosen in islice(slices, steps * batch.accumulation)]
    starts = range(0, len(micro), batch.accumulation)
    return Reads(None, slices.epoch_samples, tuple(tuple(micro[at : at + batch.accumulation]) for at in starts))


def _samples(reads: Mapping[int, Sequence[Reads]]) -> Iterator[str]:
    first = next(iter(reads.values()))
    for number, loader in enumerate(first):
        which = f"loader {number}: " if len(first) > 1 else ""
        if loader.why_not:
            yield f"{which}not known, because {loader.why_not}"
            continue
        yield f"{which}{loader.samples} per epoch; the first steps read, by rank and micro batch"
        for step in range(len(loader.steps)):
            for rank, of_rank in reads.items():
                micro = of_rank[number].steps[step]
                shown = [listed([str(index) for index in indices], shown=_SHOWN_SAMPLES) for indices in micro[:2]]
                more = [f"{len(micro) - 2} more"] if len(micro) > 2 else []
                yield f"step {step}  rank {rank:<5} {' | '.join([*shown, *more])}"


def _files(cfg: DictConfig, run_dir: Path, found: Estimate) -> Iterator[str]:
    """Yield what the run will write: its directory, checkpoints and what each logger writes."""
    yield f"{shown(run_dir.parent)}/RUN_ID/: config.yaml, run.json, train.log, results.json"
    every: Any = OmegaConf.to_container(cfg.get("callbacks") or OmegaConf.create())
    saving = [name for name, node in every.items() if node and "Checkpoint" in str(node.get("_target_"))]
    if saving and cfg.trainer.get("enable_checkpointing") is not False:
        yield f"checkpoints/, by {', '.join(saving)}: {report.magnitude(found.checkpoint_bytes)} each, over all ranks"
    loggers: Any = OmegaConf.to_container(cfg.get("logger") or OmegaConf.create())
    yield from (f"by logger.{name}: {node.get('_target_')}" for name, node in loggers.items() if node)
