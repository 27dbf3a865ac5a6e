"""The pages of docs/reference/ that `make docs` makes from conf and from the code; git does not keep them.

python -m tests.engine.tables.reference
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeGuard

from lightswitch import errors
from lightswitch.errors import ExitCode
from lightswitch.reference.choices import Choice, Key, config, groups
from tests.engine.conftest import CHECKOUT
from tests.engine.tables import environment, run_directory
from tests.engine.tables.documents import MEASURED, code, page, table

FOLDER = CHECKOUT / "docs"
ENGINE = CHECKOUT / "src" / "lightswitch"
SCRIPTS = CHECKOUT / "slurm"
_VARIABLE = re.compile(r"[$](?:{#?)?(\w+)(?:\[\w+\]|\[@\])?(?:(?::-|//)[^}]*)?}?")  # of a shell
_TOLD_BY_SCRIPT = re.compile(r'(?<=refuse ").*?(?="\n)|(?<=echo ").*?(?=" (?:>&2|\|\s*tee))')
# Exceptions whose text is told in a line: the engine's own, and those by which constructors refuse an argument
SENTENCE = re.compile(r"use \S|(?![,;])(?=.*[a-z]{2}(?![^{]*\}))(?:\S* ){3,}")  # no lone word, and not all is filled in
OF_PYTHON = ("len", "repr", "sorted", "str", "type", "listed", "one_line", "quoted")
SILENT = ("compare", "reference")  # packages whose texts are pages and tables
RAISED = {name for name, found in vars(errors).items() if isinstance(found, type) and issubclass(found, Exception)}
RAISED |= {"ValueError", "LookupError", "ModuleNotFoundError", "ArgumentTypeError", "Damaged", "UnsafeFile"}
NAMES = ("choices", "commands", "environment", "messages", "patches", "run-directory")
COMMANDS = ("fork", "doctor", "compare", "export", "reference.schema")


def main() -> None:
    for name, text in pages().items():
        (FOLDER / name).write_text(text)


def pages() -> dict[str, str]:
    """Return the text of each page by its path in docs/."""
    reference = {"choices": _choices(), "commands": _commands(), "messages": _messages()}
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


def _messages() -> str:
    intro = (
        "Every message that ends a start or a run for a reason that you can mend, as the code has it: what stands in "
        "braces is filled in. A message says what was found, what was expected and what to type instead."
    )
    sections = []
    for folder in sorted(path for path in ENGINE.iterdir() if path.is_dir() or path.suffix == ".py"):
        if folder.stem in SILENT:
            continue
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
        for told in _TOLD_BY_SCRIPT.findall(re.sub(r'\\(\n|(?="))', "", path.read_text()))
        if told != "error: $1"
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
    """Yield the texts of refusals: raised, yielded or returned, put together before, or in a table of the module."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            yield from (text for text in _texts(node.value.values) if re.search("[;:,]| is ", text))  # no list of keys
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        parts = list(ast.walk(function))
        returned = [text for part in parts if isinstance(part, ast.Return) for text in _texts([part.value])]
        refusals = [part for part in parts if _refuses(part)]
        told = [text for text in returned if re.search(r"[;:] |can't", text)]
        assigned = [part for part in parts if isinstance(part, ast.Assign)]
        if told or refusals:
            yield from _texts([part.value for part in assigned if not _is_begun(part)])
        yield from told
        for refusal in refusals:
            before = [part for part in assigned if _is_begun(part) and part.lineno < refusal.lineno]
            begun = _template(max(before, key=lambda part: part.lineno).value) if before else "{found}"
            for text in _texts([refusal.value] if isinstance(refusal, ast.Yield) else refusal.args):
                yield text.replace("{found}", begun)


def _is_begun(node: ast.Assign) -> bool:
    """Whether it is the beginning of a line, which a refusal after it ends."""
    return ast.unparse(node.targets[0]) == "found" and bool(_template(node.value))


def _refuses(node: ast.AST) -> TypeGuard[ast.Yield | ast.Call]:
    """Whether it yields something, or makes an error whose text a user reads."""
    is_error = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in RAISED
    return is_error or isinstance(node, ast.Yield)


def _texts(values: Iterable[ast.expr | None]) -> Iterator[str]:
    for value in values:
        if isinstance(value, ast.List | ast.Tuple):
            yield from _texts(value.elts)
        elif isinstance(value, ast.IfExp):
            yield from _texts([value.body, value.orelse])
        elif isinstance(value, ast.ListComp | ast.GeneratorExp):
            yield from _texts([value.elt])
        elif value is not None and SENTENCE.match(text := " ".join(_template(value).split())):
            yield re.sub(r"\{([A-Z]\w+)\}", lambda found: _constants().get(found[1], found[0]), text)


@functools.cache
def _constants() -> dict[str, str]:
    """Return the texts that modules of the engine have a name for, without the underscore; none of a name with two."""
    found: dict[str, set[str]] = {}
    for path in ENGINE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.JoinedStr):
                found.setdefault(ast.unparse(node.targets[0]).strip("_"), set()).add(_template(node.value))
    return {name: text for name, (text, *more) in found.items() if text and not more}


def _template(value: ast.expr) -> str:
    """Return the text of a string, with a word for what is filled in between braces; nothing where it is no string."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return value.value
    if isinstance(value, ast.JoinedStr):
        return "".join(_template(p) if isinstance(p, ast.Constant) else f"{{{_word_for(p)}}}" for p in value.values)
    return ""


def _word_for(part: ast.expr) -> str:
    """Return the name of what is filled in; dots where it is computed."""
    match part:
        case ast.FormattedValue(value=inner) | ast.Subscript(value=inner, slice=ast.Slice() | ast.UnaryOp()):
            return _word_for(inner)
        case ast.Subscript(slice=ast.Constant(value=str(key))):
            return key
        case ast.Attribute(attr="__name__" | "name"):
            return "name"
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_")
        case ast.Call(func=ast.Name(id=called), args=[inner, *_]) if called in OF_PYTHON:
            return _word_for(inner)
        case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="join"), args=[inner]):
            return _word_for(inner)
        case ast.Call(func=ast.Attribute(value=inner)):
            return _word_for(inner)
    return "…"


if __name__ == "__main__":
    main()
