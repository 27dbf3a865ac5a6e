"""Complete the command line of train.py: groups, choices, keys, values and flags.

python -m lightswitch.reference.completion --install                     # for the installed shells of bash, zsh, fish
python -m lightswitch.reference.completion "python train.py strategy=f"  # print the completions, one a line

It reads the config folder and the source of the code that the configs name, and imports neither Hydra nor torch.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path

from lightswitch.config.values import ALLOWED
from lightswitch.errors import Command
from lightswitch.reference.choices import Choice, Key, config, groups

_SHELLS = {"bash": ".bashrc", "zsh": ".zshrc", "fish": ".config/fish/conf.d/lightswitch.fish"}
_SCRIPT = re.compile(r"\S*train\.py|\S*slurm/\w+\.sh")
_SELDOM = ("_convert_", "_partial_", "_recursive_")
_FLAGS = ("--cfg=job", "--config-dir=", "--config-name=", "--help", "--hydra-help", "--info", "--multirun")


def main() -> None:
    """Print the completions of a command line, or install the completion."""
    parser = Command("lightswitch.reference.completion", __doc__)
    parser.add_argument("line", nargs="?", metavar="LINE", help="the command line up to the cursor")
    parser.add_argument("--install", action="store_true", help="install the completion for bash, zsh and fish")
    asked = parser.parse_args()
    if asked.install:
        for message in install(Path.home()):
            print(message)
    elif asked.line is not None:
        print("\n".join(after(asked.line)))
    else:
        parser.error("type the command line to complete, or --install")


def after(line: str) -> list[str]:
    """Return the possible last words of a command line, each with the typed beginning; empty for another script."""
    words = line.split(" ")
    scripts = [number for number, word in enumerate(words[:-1]) if _SCRIPT.fullmatch(word)]
    if not scripts:
        return []
    folder = _conf(Path(words[scripts[0]]).expanduser())
    return candidates(words[scripts[0] + 1 :], folder) if (folder / "config.yaml").is_file() else []


def _conf(script: Path) -> Path:
    """Return the config folder of train.py, or of a job script, which runs in the project's folder."""
    return script.parent / "conf" if script.name == "train.py" else Path("conf")


def candidates(words: Sequence[str], folder: Path) -> list[str]:
    """Return the completions of the last word.

    Args:
        words: after train.py; the last one is unfinished, and may be empty.
        folder: the config folder.
    """
    *before, word = words
    if word.startswith("-"):
        return [flag for flag in _FLAGS if flag.startswith(word)]
    found = groups(folder)
    root = config(folder)
    chosen = root.defaults | dict(typed.lstrip("+").split("=", 1) for typed in before if "=" in typed)
    sign = word[: len(word) - len(word.lstrip("+~"))]
    bare = word[len(sign) :]
    if "=" in bare:
        offered = _values(bare, found, root, chosen)
    else:
        offered = _keys(bare, found, root, chosen, is_removed=sign == "~")
    return sorted({sign + one for one in offered if one.startswith(bare)})


def _keys(
    word: str, found: Mapping[str, list[Choice]], root: Choice, chosen: Mapping[str, str | None], is_removed: bool
) -> Iterator[str]:
    """Yield the keys that begin with a word, up to their next dot."""
    paths = [key.path for key in _known(word, found, root, chosen) if key.name not in _SELDOM]
    nodes = {path.rpartition(".")[0] for path in paths}
    for path in (*found, *(path for path in paths if path not in nodes or is_removed)):
        if path.startswith(word):
            head, dot, _ = path[len(word) :].partition(".")
            yield f"{word}{head}{'.' if dot else '' if is_removed else '='}"
    if "." not in word and not is_removed:
        yield from (f"{choice.package}." for choices in found.values() for choice in choices if choice.package)


def _values(
    word: str, found: Mapping[str, list[Choice]], root: Choice, chosen: Mapping[str, str | None]
) -> Iterator[str]:
    """Yield the values that a key may have; after `logger=[default,`, further choices of the group."""
    key, _, typed = word.partition("=")
    group = "device" if key == "plan.device" else "strategy" if key == "trainer.strategy" else key
    if group in found:
        begun = re.match(r"\[?(?:\w+,)*", typed)
        yield from (f"{key}={begun[0] if begun else ''}{choice.name}" for choice in found[group])
        return
    if key in ALLOWED:
        yield from (f"{key}={word}" for word in ALLOWED[key])
    for one in _known(key, found, root, chosen):
        if one.path == key:
            yield from (f"{key}={word}" for word in _words(one))


def _words(key: Key) -> Iterator[str]:
    """Yield the literals and booleans that a key accepts."""
    parameter = key.parameter
    if parameter is not None and parameter.literals is not None and parameter.kinds is not None:
        yield from (str(literal) for literal in parameter.literals)
        yield from ("true", "false") if bool in parameter.kinds else ()
    elif key.value in ("true", "false"):
        yield from ("true", "false")


def _known(
    word: str, found: Mapping[str, list[Choice]], root: Choice, chosen: Mapping[str, str | None]
) -> Iterator[Key]:
    """Yield the keys of the config as chosen; those of a group only if the word is below its node."""
    yield from root.keys
    for group, choices in found.items():
        for choice in _chosen(choices, chosen.get(group) or ""):
            if "." in word and choice.package and word.startswith(choice.package.split(".")[0]):
                yield from choice.keys


def _chosen(choices: list[Choice], name: str) -> Iterator[Choice]:
    """Yield the files that a choice selects: `[default,wandb]` selects two, and a file may include others."""
    by_name = {choice.name: choice for choice in choices}
    for one in re.findall(r"[\w.-]+", name):
        if one in by_name:
            yield by_name[one]
            for part in by_name[one].parts:
                yield from _chosen(choices, part)


def install(home: Path) -> Iterator[str]:
    """Install the completion of each shell on this machine, and yield a line for each file that changes."""
    for shell, start in _SHELLS.items():
        if shutil.which(shell) is None:
            continue
        source = resources.files("lightswitch.reference") / f"complete.{shell}"
        if shell == "fish":
            yield from _written(home / start, source.read_text())
            continue
        file = home / ".local" / "share" / "lightswitch" / f"complete.{shell}"
        yield from _written(file, source.read_text())
        yield from _appended(home / start, f'source "{file}"\n')
    yield "open a new terminal to use it"


def _written(path: Path, text: str) -> Iterator[str]:
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        yield f"written    {path}"


def _appended(path: Path, line: str) -> Iterator[str]:
    text = path.read_text() if path.is_file() else ""
    if line not in text:
        with path.open("a") as file:
            file.write(line if not text or text.endswith("\n") else f"\n{line}")
        yield f"added      {line.strip()} to {path}"


if __name__ == "__main__":
    main()
