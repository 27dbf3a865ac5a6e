"""The page of a run's directory: its files, the columns of metrics.csv, and the fields of what is JSON."""

from __future__ import annotations

import dataclasses
import re

from lightswitch.monitoring.metrics import FIRST_COLUMNS
from lightswitch.monitoring.step_times import StepTimes
from lightswitch.runs.finished import Mark
from lightswitch.runs.holder import Holder
from lightswitch.runs.record import Origin
from lightswitch.sweeps.record import Record
from tests.engine.tables.page import code, page, table

FILES = {  # of any run that trains
    "config.yaml": "every value of the run, resolved; what the environment gives stays as `${oc.env:NAME}`",
    ".hydra/": "the config and the overrides as given",
    "run.json": "commit, versions, command: [below](#runjson)",
    "train.log": "what the terminal showed, with times; tracebacks that it was spared",
    "metrics.csv": "a row each logged step (`trainer.log_every_n_steps`, 10): [below](#metricscsv)",
    "tensorboard/": "the same for `tensorboard --logdir runs`",
    "checkpoints/best.ckpt/": "the best by validation loss ([what a checkpoint is](../checkpoints.md#the-format))",
    "checkpoints/step_<n>.ckpt/": "the last two saves (`callbacks.last_checkpoint`)",
    "checkpoints/last.ckpt": "a link to the newest",
    "results.json": "once a run, or an evaluation, has ended: [below](#resultsjson)",
    "ended.json": "once fit and test have ended: [below](#endedjson)",
}
FILES_OF_SOME = {  # and the option, the mode or the event that makes each
    ".lock": "while a run goes on: which process on which machine writes here ([below](#lock))",
    "checkpoints_<n>/": "an earlier start's, set aside by `resume=never`; they take disk until you remove them",
    "step_times.json": "with `compare=true`: start-up, memory, where a step's time goes ([below](#step_timesjson))",
    "lr_finder.csv": "the loss at each rate of [`LearningRateFinder`](../bring-your-own.md#the-learning-rate-finder)",
    "lr_finder.svg": "the same as a picture, and `lr_finder_dark.svg`",
    "predictions/": "of `mode=predict`: a file for each rank, whose shares follow one another",
    "plan.json": "of `mode=plan`: each strategy's memory and time ([planning.md](../planning.md))",
    "plan.svg": "the same as a picture, and `plan_dark.svg`",
    "dry_run.json": "of `mode=dry_run`: what the ranks would do ([dry-run.md](../dry-run.md))",
    "check.json": "of `mode=check`: each promise under each strategy ([check.md](../check.md))",
    "job.json": "of a sweep's job: [below](#jobjson)",
    "crash/<time>/": "after a bug or a lost process ([the crash report](../failures.md#the-crash-report))",
    "fit-profile.txt": "with `debug=profiler`: the time in each of Lightning's hooks",
    "metrics_damaged_<n>.csv": "a metrics.csv whose lines could not be read, kept as it was found",
    "compare.html": "and `compare.md`, in the folder above the runs: [runs beside one another](../comparison.md)",
}
COLUMNS = {
    "step": "the index of the last optimizer step, from 0, as in Lightning and TensorBoard",
    "samples": "consumed so far, over all devices",
    "epoch": "from 0",
    "train/loss": "the mean over the global batch",
    "lr-<optimizer>": "the learning rate; with a number for each group of several",
    "memory/peak_gib": "the most that rank 0 has taken: of its GPU, or of its process where there is none",
    "throughput/step_seconds": "since the last logged step, without validation and saves",
    "throughput/samples_per_second": "of all devices",
    "throughput/tokens_per_second": "where samples are sequences",
    "grad_norm": "before clipping, over all devices: `callbacks=[default,grad_norm]`",
    "<name>": "what the module logs: `val/loss`, `test/accuracy`; over the whole validation or test set",
}
RECORDS = (("run.json", Origin), ("ended.json", Mark), ("step_times.json", StepTimes), ("job.json", Record))


def text() -> str:
    """Return the page.

    Raises:
        KeyError: a class of a record has a field without a line in its docstring, or metrics.csv a column.
    """
    files = table(("file", "what it is"), ((code(name), told) for name, told in FILES.items()))
    some = table(("file", "when, and what it is"), ((code(name), told) for name, told in FILES_OF_SOME.items()))
    assert COLUMNS.keys() >= {*FIRST_COLUMNS}
    columns = table(("column", "what it is"), ((code(name), told) for name, told in COLUMNS.items()))
    intro = "A run's files are in `runs/<name>/<run_id>/`; an evaluation has a directory of its own."
    return page(
        "The run directory",
        intro,
        files,
        f"Some runs have more:\n\n{some}",
        "## metrics.csv",
        "A row for each step at which something was logged. It is complete on disk after each row, and a run that goes "
        "on first drops the rows that it will write again.",
        columns,
        "## results.json",
        "The last value of each metric, by its name in metrics.csv. A run that was stopped has those so far.",
        *(_section(name, record) for name, record in RECORDS),
        _section(".lock", Holder),
    )


def _section(file: str, record: type) -> str:
    described, _, arguments = (record.__doc__ or "").partition("Args:")
    told = {name: " ".join(text.split()) for name, text in re.findall(_ARGUMENT, arguments, re.MULTILINE)}
    rows = ((code(f.name), code(str(f.type)), told[f.name]) for f in dataclasses.fields(record))
    return f"## {file}\n\n{' '.join(described.split())}\n\n{table(('field', 'type', 'what it is'), rows)}"


_ARGUMENT = r"^        (\w+): (.*(?:\n            .*)*)"
