"""A dry run, which reports what the ranks of a run would do, and its job script, without starting any rank."""

from __future__ import annotations

import json
import logging
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, OmegaConf

from lightswitch import regular_files
from lightswitch.batches.plan import BatchPlan
from lightswitch.config.confidential import masked_override
from lightswitch.context import RunContext
from lightswitch.errors import NeedsValues, Refused, RefusedRequest, shown
from lightswitch.failures.classify import full_traceback, one_line
from lightswitch.launch import commands, estimates
from lightswitch.launch.build import problems_elsewhere
from lightswitch.launch.estimates import Request
from lightswitch.launch.instantiation import raise_all
from lightswitch.planning import candidates
from lightswitch.planning.candidates import Candidate
from lightswitch.planning.collectives import exchanges
from lightswitch.planning.device import GIB
from lightswitch.planning.dry_run import DryRun, Rank, Rehearsed, as_data, page, rehearse
from lightswitch.planning.estimate import Estimate, Step, estimate
from lightswitch.planning.fakes import World
from lightswitch.planning.samples import check_evaluation, first_reads
from lightswitch.planning.scaling import FILE
from lightswitch.preflight import strategies
from lightswitch.process import call_each_forked
from lightswitch.runs import resume

log = logging.getLogger(__name__)
SCRIPT, OF_ONE_NODE = Path("slurm/multinode.sh"), Path("slurm/single.sh")


def dry_run(cfg: DictConfig, run: RunContext) -> None:
    """Log what the ranks would do, and write it to dry_run.json.

    Raises:
        Refused: the run would be refused at its start, or its strategy can't be simulated.
    """
    found = _found(cfg, run)
    log.info("\n%s\n", page(found))
    regular_files.write_json(run.run_dir / resume.RESULTS, _metrics(found.first.estimate))
    path = run.run_dir / FILE
    regular_files.write_text(path, json.dumps(as_data(found), indent=1, default=str))
    log.info("dry run    %s", shown(path))


def _metrics(estimate: Estimate) -> dict[str, float]:
    """Return the metrics by which a sweep can compare its jobs, for example objective=seconds_per_step."""
    seconds = estimate.time.least_seconds
    return {"gib": estimate.memory.bytes / GIB} | ({} if seconds is None else {"seconds_per_step": seconds})


def _found(cfg: DictConfig, run: RunContext) -> DryRun:
    request = estimates.requested(cfg)
    request = replace(request, samples=replace(request.samples, is_cut=False))  # only one micro-batch size is reported
    candidate = candidates.chosen(run.hydra.runtime.choices.get("strategy"), request.trainer["strategy"])
    batch = estimates.batch_of(request, candidate, cfg.micro_batch_size)
    estimates.check(request, candidate, batch)
    strategy = estimates.strategy_of(request, candidate)
    raise_all(problems_elsewhere(cfg, run, batch, strategy, request.world.size))
    _check_evaluation(request, batch)
    asked: Any = OmegaConf.to_container(cfg.dry_run)
    tasks = [partial(_rehearsed, request, candidate, batch, number) for number in strategies.ranks(asked["rank"])]
    ranks = tuple(_with_reads(request, batch, one) for one in call_each_forked(tasks))
    return DryRun(
        f"{candidate.words[0]}, precision {cfg.trainer.get('precision')}",
        request.device,
        batch,
        ranks,
        _script(request),
        commands.of_each_launcher(request.world.nodes, request.world.devices_per_node, request.device.kind == "cuda"),
    )


def _check_evaluation(request: Request, batch: BatchPlan) -> None:
    owner = request.samples.owner
    if is_overridden("val_dataloader", owner) and request.trainer.get("limit_val_batches") != 0:
        check_evaluation(owner.val_dataloader(), batch)


def _rehearsed(request: Request, candidate: Candidate, batch: BatchPlan, number: int) -> Rehearsed:
    rank, step = _rank_and_step(request, candidate, batch, number)
    own, before_last = _estimate(request, candidate, batch, step), batch.accumulation - 1
    micro = ((collective, before_last) for collective in step.micro_collectives)
    sent = exchanges([*micro, *((collective, 1) for collective in step.last_collectives)])
    return Rehearsed(rank, own, sent)


def _rank_and_step(request: Request, candidate: Candidate, batch: BatchPlan, number: int) -> tuple[Rank, Step]:
    try:
        strategy = estimates.strategy_of(request, candidate)
        return rehearse(estimates.work_of(request, batch), strategy, replace(request.world, rank=number))
    except NeedsValues as error:
        raise Refused(
            f"the step of {request.cfg.model._target_} {error}; use mode=plan, which reports what is known without it"
        ) from error
    except Refused:
        raise
    except Exception as error:
        raise RefusedRequest([f"a step of the model fails: {one_line(error)}"], full_traceback(error)) from error


def _estimate(request: Request, candidate: Candidate, batch: BatchPlan, step: Step) -> Estimate:
    return estimate(
        candidate.words, step, estimates.run_of(request, candidate, batch), request.device, candidate.on_host
    )


def _with_reads(request: Request, batch: BatchPlan, one: Rehearsed) -> Rehearsed:
    cfg = request.cfg
    reads = first_reads(request.samples.loaders, batch, one.rank.data_rank, cfg.seed, cfg.dry_run.steps)
    return replace(one, reads=reads)


def _script(request: Request) -> dict[str, str]:
    program = commands.script_words()
    folder = Path(sys.argv[0]).absolute().parent
    typed = [masked_override(word) for word in commands.overrides_of_run()]
    return job_script(folder, request.world, request.device.kind, program, typed)


def job_script(
    folder: Path, world: World, kind: str, program: Sequence[str], overrides: Sequence[str]
) -> dict[str, str]:
    """Return the sbatch command, the script's options and the srun command of a job; empty if there is no job script.

    Args:
        folder: the folder of the entry script, below which the job script is.
        kind: the kind of the devices, such as cuda.
        program: the command that starts one process, as words.
        overrides: the run's overrides without nodes and devices, which the run reads from the job.
    """
    # forks of older versions have no single.sh
    script = OF_ONE_NODE if world.nodes == 1 and (folder / OF_ONE_NODE).is_file() else SCRIPT
    if not (folder / script).is_file():
        return {}
    options = submitted(world, kind)
    per_node = [f"--ntasks-per-node={world.devices_per_node}", *_gpus(world, kind)]
    tasks = [f"--nodes={world.nodes}", f"--ntasks={world.size}", *per_node]
    return {
        "submit": shlex.join(["sbatch", *options, str(script), *overrides]),
        "#SBATCH": shlex.join(_merged(_options_in(folder / script), options)),
        "srun": shlex.join([*tasks, *program, *overrides]),
    }


def submitted(world: World, kind: str) -> list[str]:
    """Return the sbatch options for a world, with one task for each device."""
    if kind == "cuda":
        return [f"--nodes={world.nodes}", *_gpus(world, kind)]
    none = ["--gpus-per-node=0"] if world.nodes == 1 else []  # single.sh requests one
    return [f"--nodes={world.nodes}", *none, f"--ntasks-per-node={world.devices_per_node}"]


def _gpus(world: World, kind: str) -> list[str]:
    return [f"--gpus-per-node={world.devices_per_node}"] if kind == "cuda" else []


def _options_in(script: Path) -> list[str]:
    """Return the options in the #SBATCH lines of a script."""
    return re.findall(r"^#SBATCH (--\S+)", script.read_text(), re.MULTILINE)


def _merged(own: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return the script's options merged with those of the command line, which take precedence."""
    found = {option.partition("=")[0]: option for option in (*own, *given)}
    return list(found.values())
