"""The pages of docs/ that are made from conf, from the code, and from what was measured.

python -m tests.engine.tables.reference         # tests/engine/reference/test_pages.py fails while they are older
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from lightswitch.errors import ExitCode
from lightswitch.reference.choices import Choice, Key, config, groups
from tests.engine.conftest import CHECKOUT
from tests.engine.tables import environment, measurements, run_directory
from tests.engine.tables.page import code, page, table

FOLDER = CHECKOUT / "docs"
ENGINE = CHECKOUT / "src" / "lightswitch"
SCRIPTS = CHECKOUT / "slurm"
_VARIABLE = re.compile(r"[$](?:{#?)?(\w+)(?:\[@\])?(?::-\w+)?}?")  # of a shell
COMMANDS = ("fork", "doctor", "compare", "export", "fork.update", "config.moved", "reference.schema")
COMMANDS += ("reference.completion", "patches")


def main() -> None:
    for name, text in pages().items():
        (FOLDER / name).write_text(text)


def pages() -> dict[str, str]:
    """Return the text of each page by its path in docs/."""
    reference = {"choices": _choices(), "commands": _commands(), "messages": _messages()}
    reference |= {"run-directory": run_directory.text(), "environment": environment.text()}
    return {f"reference/{name}.md": text for name, text in reference.items()} | {"measurements.md": measurements.text()}


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
    sentences = table(("choice", "what it is"), ((code(choice.name), choice.sentence) for choice in choices))
    told: set[str] = set()
    sections = []
    for choice in choices:
        keys = [key for key in choice.keys if not key.is_node and (key.value is not None or key.path not in told)]
        told |= {key.path for key in keys}
        if keys:
            sections.append(f"### {name}={choice.name}\n\n{_keys(keys)}")
    return "\n\n".join((f"## {name}", sentences, *sections))


def _keys(keys: Iterable[Key]) -> str:
    return table(("key", "set to", "type", "default", "what it is"), map(_row, keys))


def _row(key: Key) -> tuple[str, ...]:
    annotation = key.parameter.annotation if key.parameter else ""
    default = (key.parameter.default or "") if key.parameter else ""
    return code(key.path), code(key.value or ""), code(annotation), code(default), key.sentence


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


def _messages() -> str:
    intro = (
        "Every message that ends a start or a run for a reason that you can mend, as the code has it: what stands in "
        "braces is filled in. A message says what was found, what was expected and what to type instead."
    )
    sections = []
    for folder in sorted(path for path in ENGINE.iterdir() if path.is_dir() or path.suffix == ".py"):
        files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]
        found = [(file, list(dict.fromkeys(_told(ast.parse(file.read_text()))))) for file in files]
        listed = [_of_file(file, messages) for file, messages in found if messages]
        if listed:
            sections.append("\n\n".join((f"## {folder.stem}", *listed)))
    return page("Messages and exit codes", _exit_codes(), intro, *sections, _of_scripts())


def _of_file(file: Path, messages: list[str]) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    lines = "\n".join(f"- {code(message)}" for message in messages)
    return f"*{' '.join(docstring.splitlines()[0].split())}*\n\n{lines}"


def _of_scripts() -> str:
    lines = [
        f"- {code(_VARIABLE.sub(_word, told))} ({path.name})"
        for path in sorted(SCRIPTS.glob("*.sh"))
        for told in re.findall(r'echo "(.*?)" >&2', path.read_text())
    ]
    return "\n".join(("## The job scripts\n", *lines))


def _word(variable: re.Match[str]) -> str:
    return "{code}" if variable[1] == "1" else f"{{{variable[1]}}}"  # an argument has no name


def _exit_codes() -> str:
    source = (ENGINE / "errors.py").read_text()
    rows = []
    for member in ExitCode:
        comment = re.search(rf"^    {member.name} = [^#\n]*(?:# (.*))?$", source, re.MULTILINE)
        rows.append((code(str(member.value)), (comment and comment[1]) or member.name.lower()))
    return table(("exit code", "what it means"), rows)


def _told(tree: ast.Module) -> Iterator[str]:
    """Yield the texts of refusals, and of problems that a function yields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = ast.unparse(node.exc.func)
            if name.rpartition(".")[2] in ("Refused", "RefusedRequest", "UnfitCheckpoint", "BatchError", "LostRank"):
                yield from _texts(node.exc.args)
        elif isinstance(node, ast.Yield) and node.value is not None:
            yield from _texts([node.value])


def _texts(values: Iterable[ast.expr]) -> Iterator[str]:
    for value in values:
        if isinstance(value, ast.List):
            yield from _texts(value.elts)
        text = _template(value)
        if text is not None and len(text.split()) > 3:  # and no lone word, as a name that is yielded
            yield text


def _template(value: ast.expr) -> str | None:
    """Return the text of a string, with the source of what is filled in between braces."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return value.value
    if isinstance(value, ast.JoinedStr):
        parts = (str(part.value) if isinstance(part, ast.Constant) else f"{{{_filled(part)}}}" for part in value.values)
        return "".join(parts)
    return None


def _filled(part: ast.expr) -> str:
    """Return a word for what is filled in: the last name of its expression."""
    names = re.findall(r"[A-Za-z_]\w*", re.sub(r"(['\"]).*?\1", "", ast.unparse(getattr(part, "value", part))))
    return names[-1].strip("_") if names else "…"


if __name__ == "__main__":
    main()
