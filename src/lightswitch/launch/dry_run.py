"""A dry run: what the ranks of a run would do, and its job's script, told by this process, which starts none."""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, OmegaConf

from lightswitch import regular_files
from lightswitch.batches.plan import BatchPlan
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
from lightswitch.preflight import planned
from lightswitch.process import call_each_forked
from lightswitch.runs import finished

log = logging.getLogger(__name__)
SCRIPT, OF_ONE_NODE = Path("slurm/multinode.sh"), Path("slurm/single.sh")


def dry_run(cfg: DictConfig, run: RunContext) -> None:
    """Log what ranks would do, and write it as dry_run.json.

    Raises:
        Refused: a start of the run would be refused, or its strategy can't be simulated.
    """
    found = _found(cfg, run)
    log.info("\n%s\n", page(found))
    finished.write_results(run.run_dir, _metrics(found.first.estimate))
    path = run.run_dir / FILE
    regular_files.write_text(path, json.dumps(as_data(found), indent=1, default=str))
    log.info("dry run    %s", shown(path))


def _metrics(estimate: Estimate) -> dict[str, float]:
    """Return what a sweep can compare its jobs by: objective=seconds_per_step."""
    seconds = estimate.time.least_seconds
    return {"gib": estimate.memory.bytes / GIB} | ({} if seconds is None else {"seconds_per_step": seconds})


def _found(cfg: DictConfig, run: RunContext) -> DryRun:
    request = estimates.requested(cfg)
    request = replace(request, samples=replace(request.samples, is_cut=False))  # one micro batch is told
    candidate = candidates.chosen(run.hydra.runtime.choices.get("strategy"), request.trainer["strategy"])
    batch = estimates.batch_of(request, candidate, cfg.micro_batch_size)
    estimates.check(request, candidate, batch)
    strategy = estimates.strategy_of(request, candidate)
    raise_all(problems_elsewhere(cfg, run, batch, strategy, request.world.size))
    _check_evaluation(request, batch)
    asked: Any = OmegaConf.to_container(cfg.dry_run)
    tasks = [partial(_rehearsed, request, candidate, batch, number) for number in planned.ranks(asked["rank"])]
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
            f"the step of {request.cfg.model._target_} {error}; use mode=plan, which tells what is known without it"
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
    folder = Path(program[1]).absolute().parent
    return job_script(folder, request.world, request.device.kind, program, commands.overrides_of_run())


def job_script(
    folder: Path, world: World, kind: str, program: Sequence[str], overrides: Sequence[str]
) -> dict[str, str]:
    """Return the parts of a job on the nodes of a world; nothing where the folder has no script.

    Args:
        folder: of the entry script.
        kind: of the devices.
        program: the words that start one process.
        overrides: of the run, without nodes and devices, which it takes from the job.
    """
    script = OF_ONE_NODE if world.nodes == 1 and (folder / OF_ONE_NODE).is_file() else SCRIPT  # older forks have one
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
    """Return sbatch's options that a world needs: a task for each device."""
    if kind == "cuda":
        return [f"--nodes={world.nodes}", *_gpus(world, kind)]
    none = ["--gpus-per-node=0"] if world.nodes == 1 else []  # single.sh asks for one
    return [f"--nodes={world.nodes}", *none, f"--ntasks-per-node={world.devices_per_node}"]


def _gpus(world: World, kind: str) -> list[str]:
    return [f"--gpus-per-node={world.devices_per_node}"] if kind == "cuda" else []


def _options_in(script: Path) -> list[str]:
    """Return the options that a script gives itself."""
    return re.findall(r"^#SBATCH (--\S+)", script.read_text(), re.MULTILINE)


def _merged(own: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return a script's own options, replaced by those of the command line where both have one."""
    found = {option.partition("=")[0]: option for option in (*own, *given)}
    return list(found.values())
