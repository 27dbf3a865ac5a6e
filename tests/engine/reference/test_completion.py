"""What a shell completes after train.py, in the shells themselves."""

from __future__ import annotations

import fcntl
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from lightswitch.reference.completion import after, candidates, install
from tests.engine.conftest import CHECKOUT
from tests.engine.processes import shown_by

CONF = CHECKOUT / "conf"


def _offered(*words: str) -> list[str]:
    return candidates(words, CONF)


@pytest.mark.parametrize(
    ("typed", "expected"),
    {
        "a group": (("strat",), ["strategy="]),
        "a choice": (("strategy=fsdp_h",), ["strategy=fsdp_hybrid"]),
        "Lightning's way": (("trainer.strategy=dd",), ["ddp", "ddp_spawn"]),
        "one more of a group": (("logger=[default,w",), ["logger=[default,wandb"]),
        "an argument of the Trainer": (("trainer.max_s",), ["trainer.max_steps="]),
        "an argument of what is chosen": (("optimizer=sgd", "optimizer.nest"), ["optimizer.nesterov="]),
        "of the chosen strategy": (("strategy=fsdp_tp", "trainer.strategy.tensor"), ["tensor_parallel_size="]),
        "a node of the config": (("lr_scaling.ru",), ["lr_scaling.rule="]),
        "a callback's": (("callbacks.last_checkpoint.every",), ["callbacks.last_checkpoint.every_n_steps="]),
        "what is removed": (("~callbacks.thr",), ["~callbacks.throughput", "~callbacks.throughput."]),
        "a device of a plan": (("plan.device=h1",), ["plan.device=h100"]),
        "a mode": (("mode=va",), ["mode=validate"]),
        "a switch": (("compare=t",), ["compare=true"]),
        "a literal": (("trainer.precision=bf16-m",), ["trainer.precision=bf16-mixed"]),
        "a flag": (("--multi",), ["--multirun"]),
        "a path": (("resume=ru",), []),
    }.values(),
)
def test_what_may_follow_is_offered(typed: tuple[str, ...], expected: list[str]) -> None:
    offered = _offered(*typed)
    assert [one for one in offered if one.endswith(tuple(expected))] == offered
    assert len(offered) == len(expected)


def test_every_choice_of_every_group_is_offered() -> None:
    for path in CONF.glob("*/*.yaml"):
        if path.parent.name != "hydra":
            assert f"{path.parent.name}={path.stem}" in _offered(f"{path.parent.name}={path.stem[:1]}")


def test_other_scripts_are_left_alone() -> None:
    assert after("python other.py strategy=") == []
    assert after(f"torchrun --nproc-per-node=2 {CHECKOUT}/train.py strategy=sing") == ["strategy=single"]


def test_neither_hydra_nor_torch_is_imported() -> None:
    script = "import sys, lightswitch.reference.completion\nprint({'torch', 'hydra', 'omegaconf'} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "set()\n"


def test_an_installation_is_made_once(tmp_path: Path) -> None:
    (tmp_path / ".bashrc").write_text("alias ll='ls -l'")
    first, again = list(install(tmp_path)), list(install(tmp_path))
    assert len(first) >= 3
    assert again == ["open a new terminal to use it"]
    assert (tmp_path / ".bashrc").read_text().startswith("alias ll='ls -l'\nsource ")


SHELLS = {"bash": ("bash", "-i"), "zsh": ("zsh", "-i"), "fish": ("fish", "-i")}


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_completes_a_word_at_a_tab(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None and os.environ.get("LIGHTSWITCH_REQUIRE_ALL") != "1":
        pytest.skip(f"{shell} is not installed")
    list(install(tmp_path))
    paths = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"HOME": str(tmp_path), "PATH": paths, "TERM": "xterm", "PYTHONPATH": str(CHECKOUT / "src")}
    controller, terminal = pty.openpty()
    # wide, so that no line is cut, however long the prompt
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 250, 0, 0))
    process = subprocess.Popen(
        ("setsid", "--ctty", *SHELLS[shell]),  # fish ends where it can't be in the foreground
        cwd=CHECKOUT,
        env=environment,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    try:
        time.sleep(1)
        assert _completes(controller, b"python train.py strategy=fsdp_gr", "ad_op")
        assert _completes(controller, b"python train.py strategy=fsdp_grad_op trainer.max_st", "eps=")
    finally:
        process.kill()
        process.wait()
        os.close(controller)


def _completes(controller: int, typed: bytes, rest: str) -> bool:
    """Type a line and a tab, again where nothing comes of it: a shell drops what is typed before its prompt."""
    clears_the_line = b"\x15"
    for seconds in (10, 20, 40, 80):
        os.write(controller, clears_the_line + typed + b"\t")
        if rest in shown_by(controller, lambda text: rest in text, seconds):
            return True
    return False
