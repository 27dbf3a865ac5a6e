"""What happens to the files of a checkpoint: on a disk, on the way to another, by a hand that slips."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

Damage = Callable[[Random, Path], None]


def flip_one(random: Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def flip(random: Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(random.choice((1, 1, 1, 2, 50))):
        if content:
            content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def truncate(random: Random, path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: random.choice((0, 1, len(content) // 2, max(0, len(content) - 1)))])


def extend(random: Random, path: Path) -> None:
    with path.open("ab") as file:
        file.write(random.choice((b"\0", b"\n", random.randbytes(100), b"x  ../y\n", path.read_bytes())))


def zero(random: Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    start = random.randrange(len(content) + 1)
    end = min(len(content), start + random.choice((1, 512, len(content))))
    content[start:end] = bytes(end - start)
    path.write_bytes(content)


def fill_with_noise(random: Random, path: Path) -> None:
    path.write_bytes(random.randbytes(path.stat().st_size))


def delete(random: Random, path: Path) -> None:
    path.unlink()


def swap(random: Random, path: Path) -> None:
    other = random.choice([file for file in sorted(path.parent.iterdir()) if file.is_file() and not file.is_symlink()])
    own, others = path.read_bytes(), other.read_bytes()
    path.write_bytes(others)
    other.write_bytes(own)


def take_that_of_another(random: Random, path: Path) -> None:
    shutil.copyfile(path.parents[1] / "step_2.ckpt" / path.name, path)


def put_a_directory(random: Random, path: Path) -> None:
    path.unlink()
    path.mkdir()


UNREADABLE = "/proc/self/mem"  # Linux answers with EIO, as a disk does that is failing
TARGETS = ("nowhere", ".", "/", "/dev/null", UNREADABLE, "trainer.pt", "../step_2.ckpt")


def put_a_link(random: Random, path: Path, targets: tuple[str, ...] = ()) -> None:
    target = random.choice(targets or (*TARGETS, path.name, f"../step_2.ckpt/{path.name}"))
    path.unlink()
    path.symlink_to(target)


def forbid(random: Random, path: Path) -> None:
    path.chmod(0)


def lose_lines(random: Random, path: Path) -> None:
    sums = _sums(path)
    lines = sums.read_text(errors="replace").splitlines(keepends=True)
    sums.write_text("".join(line for line in lines if path.name not in line and random.random() < 0.8))


def lose_it_and_its_line(random: Random, path: Path) -> None:
    lose_lines(random, path)
    path.unlink(missing_ok=True)


def _sums(path: Path) -> Path:
    sums = path.with_name("SHA256SUMS")
    if not sums.is_file() or sums.is_symlink():
        raise FileNotFoundError(sums)
    return sums


OF_A_FILE: tuple[Damage, ...] = (
    *(flip, truncate, extend, zero, fill_with_noise, delete, swap, take_that_of_another, put_a_directory),
    *(put_a_link, forbid, lose_lines, lose_it_and_its_line),
)


def damage(random: Random, folder: Path) -> list[str]:
    """One to three of them, one after the other where the one before lets it."""
    done = []
    for _ in range(random.choice((1, 1, 2, 3))):
        path = random.choice(sorted(folder.iterdir()))
        harm = random.choice(OF_A_FILE)
        if path.is_file() and not path.is_symlink():
            try:
                harm(random, path)
            except OSError:  # the one before has left nothing to harm
                continue
            done.append(f"{harm.__name__} {path.name}")
    return done
