"""The page of the environment variables that the engine, the project and the job scripts read."""

from __future__ import annotations

import ast
import dis
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.engine.conftest import CHECKOUT
from tests.engine.tables.documents import code, page, table

_TOLD = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
YOURS, OF_LAUNCHERS, SET = (_TOLD[kind] for kind in ("yours", "of_launchers", "set"))
OTHER_NAMES = {
    "FETCH_HEAD",
    "GIT_COMMITTER_IDENT",
    *("COMMUNICATION_DATA_TYPE", "NOT_AVAILABLE"),  # of DeepSpeed
    "TO_BOOL",  # of Python's bytecode, from 3.13
}


def text() -> str:
    """Return the page.

    Raises:
        KeyError: a variable that is told of is read nowhere.
    """
    where = readers()
    return page(
        "The environment",
        "The environment variables that are read, and by which file of `src/lightswitch`, or script. What launchers "
        "export is checked before anything is imported that believes it: a value that means nothing, or one without "
        "the others, is told in a line ([On a cluster](../clusters.md)).",
        "## Yours to export",
        _rows(YOURS, where),
        "torch and NCCL have many more: [Debugging](../debugging.md#a-hang). Secrets, as `WANDB_API_KEY`, stay in the "
        "environment: [Security](../security.md#secrets). A config takes any variable by `${oc.env:NAME}`.",
        "## Of launchers",
        _rows(OF_LAUNCHERS, where),
        "## Set by the engine",
        _rows(SET, where),
        "## In reports",
        "Crash reports and the doctor show the variables of ranks and of the meeting point, and those that begin with "
        "`CUDA_`, `GLOO_`, `MKL_`, `NCCL_`, `OMP_`, `PYTORCH_`, `SLURM_` and `TORCH`, but none named like a secret.",
    )


def _rows(told: dict[str, str], where: dict[str, list[str]]) -> str:
    rows = ((code(name), sentence, ", ".join(map(code, where[name]))) for name, sentence in told.items())
    return table(("variable", "what it is", "read by"), rows)


def readers() -> dict[str, list[str]]:
    """Return the files that name each variable, by its name."""
    found: dict[str, list[str]] = {}
    engine = CHECKOUT / "src" / "lightswitch"
    for path in [*sorted(engine.rglob("*.py")), *sorted((CHECKOUT / "slurm").glob("*.sh"))]:
        name = str(path.relative_to(engine if path.suffix == ".py" else CHECKOUT))
        for variable in sorted({*(_of_python(path) if path.suffix == ".py" else _of_shell(path))} - OTHER_NAMES):
            found.setdefault(variable, []).append(name)
    return found


def _of_python(path: Path) -> Iterator[str]:
    """Yield what looks like a variable, and is no opcode, in a file that reads any."""
    source = path.read_text()
    if not re.search(r"\benviron\b", source) and "IFNAME" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in dis.opmap:
            yield from re.findall(r"^(?:RANK|ENVIRONMENT|[A-Z0-9]+(?:_[A-Z0-9]+)+)$", node.value)
        elif isinstance(node, ast.keyword) and re.fullmatch("[A-Z]+_[A-Z_]+", node.arg or ""):
            yield str(node.arg)


def _of_shell(path: Path) -> Iterator[str]:
    yield from re.findall(r"(?:\$\{?|\(\()((?:SLURM|TORCH|OMP|CONDA|VIRTUAL)_[A-Z_]+)", path.read_text())
