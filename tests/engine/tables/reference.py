"""The pages of docs/reference/ that `make docs` makes from conf and from the code; git does not keep them.

python -m tests.engine.tables.reference
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable

from lightswitch.errors import ExitCode
from lightswitch.reference.choices import Choice, Key, config, groups
from tests.engine.conftest import CHECKOUT
from tests.engine.tables import environment, run_directory
from tests.engine.tables.documents import MEASURED, code, page, table

FOLDER = CHECKOUT / "docs"
ENGINE = CHECKOUT / "src" / "lightswitch"
NAMES = ("choices", "commands", "environment", "messages", "patches", "run-directory")
COMMANDS = ("fork", "doctor", "compare", "export", "reference.schema")


def main() -> None:
    for name, text in pages().items():
        (FOLDER / name).write_text(text)


def pages() -> dict[str, str]:
    """Return the text of each page by its path in docs/."""
    reference = {"choices": _choices(), "commands": _commands(), "messages": _exit_codes()}
    reference |= {"run-directory": run_directory.text(), "environment": environment.text(), "patches": _patches()}
    reference |= {path.stem: path.read_text() for path in MEASURED.glob("*.md")}
    return {f"reference/{name}.md": text for name, text in reference.items()}


def _choices() -> str:
    intro = (
        "Every group of `conf/`, every choice in it, and every key that can be typed: `GROUP=CHOICE` and `KEY=VALUE`. "
        "A value in *set to* is the file's; where there is none, the code's own default holds. "
        "A key that several choices share is listed with the first of them."
    )
    conf = CHECKOUT / "conf"
    keys = [key for key in config(conf).keys if not key.is_node]
    parts = [f"## Of the whole run\n\n{_keys(keys)}"]
    parts += [_group(name, choices) for name, choices in groups(conf).items()]
    return page("Choices and keys", intro, *parts)


def _group(name: str, choices: list[Choice]) -> str:
    listed = table(("choice", "what it is"), ((code(choice.name), choice.sentence) for choice in choices))
    told: set[str] = set()
    sections = []
    for choice in choices:
        keys = [key for key in choice.keys if not key.is_node and (key.value is not None or key.path not in told)]
        told |= {key.path for key in keys}
        if keys:
            sections.append(f"### {name}={choice.name}\n\n{_keys(keys)}")
    return "\n\n".join((f"## {name}", listed, *sections))


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
    intro = "What is run beside `python train.py`. Each refuses in a line, with exit code 2."
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


if __name__ == "__main__":
    main()
