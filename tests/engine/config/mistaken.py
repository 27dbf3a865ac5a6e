"""What train.py answers to mistaken command lines, each in a process forked before torch is imported.

They are forked by a process that lives as long as the run of tests: it imports the engine once. What is answered only
after torch is imported comes sooner from `train(...)`, whose processes have imported it.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import runpy
import subprocess
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lightswitch.config.overrides import key_and_value

TRAIN = Path(__file__).parents[3] / "train.py"


@dataclass(frozen=True)
class Answer:
    returncode: int
    out: str
    err: str
    imported: list[str]  # of torch and lightning
    left: list[str]  # what is left in the working directory


def answers(commands: dict[str, list[str]], folder: Path) -> dict[str, Answer]:
    """One answer a command, by its name. As in a shell, a command may begin with variables: `RANK=0`, in capitals."""
    (folder / "commands.json").write_text(json.dumps([list(commands.values()), dict(os.environ)]))
    forking = _forking()
    assert forking.stdin is not None
    assert forking.stdout is not None
    print(folder, file=forking.stdin, flush=True)
    assert forking.stdout.readline() == f"{folder}\n"
    return {name: _read(folder / str(number)) for number, name in enumerate(commands)}


def refused(commands: Iterable[Sequence[str]], folder: Path, before: Sequence[str] = ()) -> dict[str, str]:
    """Return those that are refused for something else than the one mistake that is put in, with what is told."""
    named = {" ".join(words): [*before, *words, "meet_timeout_seconds=x"] for words in joined(commands)}
    told = "error: meet_timeout_seconds=x: found str, expected float or int\n"
    return {line: answer.err for line, answer in answers(named, folder).items() if answer.err != told}


def joined(commands: Iterable[Sequence[str]]) -> list[list[str]]:
    """Return commands in as few as have no key twice; what begins with a flag, or has an experiment, by itself."""
    found: list[list[str]] = []
    for words in commands:
        into = next((one for one in found if not _clash(one, words)), None)
        if into is None:
            found.append(into := [])
        into += words
    return found


def _clash(some: Sequence[str], others: Sequence[str]) -> bool:
    ours, theirs = ([_key(word) for word in words] for words in (some, others))
    is_alone = any(key == "experiment" or key.startswith("-") for key in (*ours, *theirs))
    return is_alone or any(
        f"{one}.".startswith(f"{two}.") or f"{two}.".startswith(f"{one}.") for one in ours for two in theirs
    )


def _key(word: str) -> str:
    return key_and_value(word.removeprefix("~"))[0].removesuffix("._target_")


@cache
def _forking() -> subprocess.Popen[str]:
    """Return the process that reads folders, forks one for each command of theirs, and prints what it has done."""
    command = [sys.executable, "-m", "tests.engine.config.mistaken"]
    process = subprocess.Popen(command, cwd=TRAIN.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.communicate)  # it ends with its input
    return process


def _read(told: Path) -> Answer:
    left = sorted(str(path.relative_to(told / "cwd")) for path in (told / "cwd").rglob("*"))
    ended = json.loads((told / "ended.json").read_text())
    return Answer(out=(told / "out").read_text(), err=(told / "err").read_text(), left=left, **ended)


def _answer(arguments: list[str], told: Path) -> None:
    (told / "cwd").mkdir(parents=True)
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(told / name, os.O_WRONLY | os.O_CREAT), stream)
    os.chdir(told / "cwd")
    while arguments and re.match("[A-Z_]+=", arguments[0]):
        name, _, value = arguments.pop(0).partition("=")
        os.environ[name] = value
    sys.argv = [str(TRAIN), *arguments]
    code: object = 0
    try:
        runpy.run_path(str(TRAIN), run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    imported = sorted({"torch", "lightning"} & sys.modules.keys())
    (told / "ended.json").write_text(json.dumps({"returncode": code or 0, "imported": imported}))
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    import gc

    from hydra import compose, initialize_config_dir

    import lightswitch.launch.hydra_entry
    import lightswitch.preflight.check  # noqa: F401  # once, for all that are forked

    with initialize_config_dir(str(TRAIN.with_name("conf")), version_base="1.3"):
        compose("config", ["trainer.max_steps=3", "+trainer.list=[1]"], return_hydra_config=True)  # and Hydra's grammar
    gc.freeze()  # no child looks at what all have
    for line in sys.stdin:
        _answer_all(Path(line.rstrip("\n")))
        print(line, end="", flush=True)


def _answer_all(folder: Path) -> None:
    commands, environment = json.loads((folder / "commands.json").read_text())
    children: list[int] = []
    for number, arguments in enumerate(commands):
        if len(children) == 2:
            os.waitpid(children.pop(0), 0)
        children.append(os.fork())
        if not children[-1]:
            os.environ.clear()
            os.environ.update(environment)
            _answer(arguments, folder / str(number))
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
