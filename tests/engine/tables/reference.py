"""The pages of docs/reference/ that `make docs` makes from conf and from the code; git does not keep them.

python -m tests.engine.tables.reference
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

from lightswitch.errors import ExitCode
from lightswitch.monitoring.metrics import FIRST_COLUMNS
from lightswitch.reference.choices import Choice, Key, config, groups
from lightswitch.runs.claim import Holder
from lightswitch.runs.record import Origin
from lightswitch.runs.resume import End, Start
from lightswitch.sweeps.record import Record
from tests.engine.conftest import CHECKOUT
from tests.engine.tables.documents import MEASURED, code, page, table

FOLDER = CHECKOUT / "docs"
ENGINE = CHECKOUT / "src" / "lightswitch"
NAMES = ("choices", "commands", "environment", "messages", "patches", "run-directory")
COMMANDS = ("fork", "doctor", "compare", "export", "reference.schema")


def main() -> None:
    (FOLDER / "reference").mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)


def pages() -> dict[str, str]:
    """Return the text of each page by its path in docs/."""
    reference = {**dict(_choices()), "commands": _commands(), "messages": _exit_codes()}
    reference |= {"run-directory": _run_directory(), "environment": _environment(), "patches": _patches()}
    reference |= {path.stem: path.read_text() for path in MEASURED.glob("*.md")}
    return {f"reference/{name}.md": text for name, text in reference.items()}


def _choices() -> Iterator[tuple[str, str]]:
    """Yield a page for each group of conf, and the first one, with the keys of the whole run, by their names."""
    conf = CHECKOUT / "conf"
    keys = [key for key in config(conf).keys if not key.is_node]
    found = groups(conf)
    intro = (
        "Every folder of `conf/` is a group, and every file in it a choice: type `GROUP=CHOICE`, and `KEY=VALUE` for "
        "keys. A value in *set to* is the file's; without one, the code's own default holds."
    )
    names = {name: f"choices-{name.replace('/', '-')}" for name in found}
    rows = ((f"[{name}]({names[name]}.md)", ", ".join(code(one.name) for one in found[name])) for name in found)
    yield (
        "choices",
        page("Choices and keys", intro, table(("group", "choices"), rows), "## Of the whole run", _keys(keys)),
    )
    shared = "[All groups](choices.md). A key that several choices share is listed with the first of them."
    for name, choices in found.items():
        yield names[name], page(f"Choices of {name}", shared, _group(choices))


def _group(choices: list[Choice]) -> str:
    listed = table(("choice", "what it is"), ((code(choice.name), choice.sentence) for choice in choices))
    told: set[str] = set()
    sections = []
    for choice in choices:
        keys = [key for key in choice.keys if not key.is_node and (key.value is not None or key.path not in told)]
        told |= {key.path for key in keys}
        if keys:
            sections.append(f"## {choice.name}\n\n{_keys(keys)}")
    return "\n\n".join((listed, *sections))


def _keys(keys: Iterable[Key]) -> str:
    return table(("key", "set to", "type", "default", "what it is"), map(_row, keys))


def _row(key: Key) -> tuple[str, ...]:
    default = (key.parameter.default or "") if key.parameter else ""
    return (
        code(key.path),
        code(key.value or ""),
        code(key.kind),
        code(default),
        key.sentence or sentences().get(key.path, ""),
    )


@functools.cache
def sentences() -> dict[str, str]:
    """Return the description of each key of conf, by path, for the keys that have one."""
    conf = CHECKOUT / "conf"
    choices = (config(conf), *(choice for group in groups(conf).values() for choice in group))
    return {key.path: key.sentence for choice in reversed(choices) for key in choice.keys if key.sentence}


def _commands() -> str:
    intro = "Commands beside `python train.py`. On a mistake each prints one line and ends with exit code 2."
    made = subprocess.run(["make", "help"], cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    targets = table(("target", "what it does"), (_target(line) for line in made.splitlines() if " make " in line))
    return page("Commands", intro, f"## make\n\n{targets}", *map(_command, COMMANDS))


def _target(line: str) -> tuple[str, str]:
    name, _, told = line.strip().removeprefix("make ").partition(" ")
    return code(f"make {name}"), told.strip()


def _command(name: str) -> str:
    path = ENGINE.joinpath(*name.split("."))
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    if "argparse" not in file.read_text() and "Command(" not in file.read_text():
        return f"## lightswitch.{name}\n\n```text\n{docstring}\n```"
    help_ = subprocess.run(
        [sys.executable, "-m", f"lightswitch.{name}", "--help"],
        cwd=CHECKOUT,
        env={"COLUMNS": "120", "PATH": "", "PYTHONPATH": str(CHECKOUT / "src"), "PYTHON_COLORS": "0"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return f"## lightswitch.{name}\n\n```text\n{help_.strip()}\n```"


def _patches() -> str:
    return page("Patches", subprocess.check_output([sys.executable, "-m", "lightswitch.patches"], text=True).strip())


def _exit_codes() -> str:
    source = (ENGINE / "errors.py").read_text()
    rows = []
    for member in ExitCode:
        comment = re.search(rf"^    {member.name} = [^#\n]*(?:# (.*))?$", source, re.MULTILINE)
        rows.append((code(str(member.value)), (comment and comment[1]) or member.name.lower()))
    intro = "The last line of stderr says what was found, what was expected and what to type instead."
    return page("Messages and exit codes", intro, table(("exit code", "what it means"), rows))


# The environment variables that the engine, the project and the job scripts read

_OF_ENVIRONMENT = yaml.safe_load(Path(__file__).with_name("environment.yaml").read_text())
YOURS, OF_LAUNCHERS, SET = (_OF_ENVIRONMENT[kind] for kind in ("yours", "of_launchers", "set"))


def _environment() -> str:
    return page(
        "The environment",
        "The environment variables that are read. What launchers export is checked before any library that relies on "
        "it is imported: a meaningless value, or one without the others, is reported in one line "
        "([scale out](../scale-out.md)).",
        "## Yours to export",
        _rows(YOURS),
        "torch and NCCL have many more: [Debugging](../debugging.md#a-hang). Secrets, as `WANDB_API_KEY`, stay in the "
        "environment ([secrets](../your-project.md#what-a-run-trusts)). A config takes any by `${oc.env:NAME}`.",
        "## Of launchers",
        _rows(OF_LAUNCHERS),
        "## Set by the engine",
        _rows(SET),
        "## In reports",
        "Crash reports and the doctor show the variables of ranks and of the meeting point, and those that begin with "
        "`CUDA_`, `GLOO_`, `MKL_`, `NCCL_`, `OMP_`, `PYTORCH_`, `SLURM_` and `TORCH`, but none named like a secret.",
    )


def _rows(told: dict[str, str]) -> str:
    return table(("variable", "what it is"), ((code(name), sentence) for name, sentence in told.items()))


# A run's directory: its files, the columns of metrics.csv, and the fields of what is JSON

_OF_RUNS = yaml.safe_load(Path(__file__).with_name("run_directory.yaml").read_text())
FILES, FILES_OF_SOME, COLUMNS = (_OF_RUNS[kind] for kind in ("files", "files_of_some", "columns"))
RECORDS = (("run.json", Origin), ("starts of run.json", Start), ("ended of run.json", End), ("job.json", Record))


def _run_directory() -> str:
    """Return the page.

    Raises:
        KeyError: a class of a record has a field without a line in its docstring, or metrics.csv a column.
    """
    files = table(("file", "what it is"), ((code(name), told) for name, told in FILES.items()))
    some = table(("file", "when, and what it is"), ((code(name), told) for name, told in FILES_OF_SOME.items()))
    assert COLUMNS.keys() >= {*FIRST_COLUMNS}
    columns = table(("column", "what it is"), ((code(name), told) for name, told in COLUMNS.items()))
    intro = "A run's files are in `runs/<name>/<run_id>/`. An evaluation has its own, or adds to those of a run."
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


if __name__ == "__main__":
    main()
