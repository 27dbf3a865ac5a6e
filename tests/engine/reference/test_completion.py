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
from tests.night import at_night

CONF = CHECKOUT / "conf"


@pytest.mark.parametrize(
    ("typed", "ends"),
    [
        ("strat", "strategy="),
        ("trainer.strategy=dd", "ddp ddp_spawn"),
        ("logger=[default,w", "logger=[default,wandb"),
        ("trainer.max_s", "trainer.max_steps="),
        ("optimizer=sgd optimizer.nest", "optimizer.nesterov="),
        ("strategy=fsdp_tp trainer.strategy.tensor", "tensor_parallel_size="),
        ("lr_scaling.ru", "lr_scaling.rule="),
        ("callbacks.last_checkpoint.every", "callbacks.last_checkpoint.every_n_steps="),
        ("~callbacks.thr", "~callbacks.throughput ~callbacks.throughput."),
        ("plan.device=h1", "plan.device=h100"),
        ("mode=va", "mode=validate"),
        ("trainer.precision=bf16-m", "trainer.precision=bf16-mixed"),
        ("--multi", "--multirun"),
        ("resume=ru", ""),  # a path, which the shell completes
    ],
)
def test_what_may_follow_is_offered(typed: str, ends: str) -> None:
    offered = candidates(typed.split(), CONF)
    assert [one for one in offered if one.endswith(tuple(ends.split()))] == offered
    assert len(offered) == len(ends.split())


def test_every_choice_is_offered_to_scripts_of_ours_alone() -> None:
    for path in CONF.glob("*/*.yaml"):
        if path.parent.name != "hydra":
            assert f"{path.parent.name}={path.stem}" in candidates([f"{path.parent.name}={path.stem[:1]}"], CONF)
    assert after("python other.py strategy=") == []
    assert after(f"torchrun --nproc-per-node=2 {CHECKOUT}/train.py strategy=sing") == ["strategy=single"]


def test_neither_hydra_nor_torch_is_imported() -> None:
    script = "import sys, lightswitch.reference.completion\nprint({'torch', 'hydra', 'omegaconf'} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "set()\n"


@pytest.mark.parametrize("shell", ["bash", *at_night("zsh", "fish")])
def test_the_shell_completes_a_word_at_a_tab(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None and os.environ.get("LIGHTSWITCH_REQUIRE_ALL") != "1":
        pytest.skip(f"{shell} is not installed")
    (tmp_path / ".bashrc").write_text("alias ll='ls -l'")
    list(install(tmp_path))
    assert list(install(tmp_path)) == ["open a new terminal to use it"]
    assert (tmp_path / ".bashrc").read_text().startswith("alias ll='ls -l'\nsource ")
    paths = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"HOME": str(tmp_path), "PATH": paths, "TERM": "xterm", "PYTHONPATH": str(CHECKOUT / "src")}
    controller, terminal = pty.openpty()
    # wide, so that no line is cut, however long the prompt
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 250, 0, 0))
    command = ("setsid", "--ctty", shell, "-i")  # fish ends where it can't be in the foreground
    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    process = subprocess.Popen(command, cwd=CHECKOUT, env=environment, **streams)
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
