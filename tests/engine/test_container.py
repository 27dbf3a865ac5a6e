"""container/ has one image in two forms: what it takes from the checkout, what it installs, what it exports."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

from tests.engine.conftest import CHECKOUT

FOLDER = CHECKOUT / "container"


@dataclass(frozen=True)
class Image:
    """A definition, read.

    Attributes:
        base: the image that it begins with.
        copied: paths of the checkout, by their path in the image.
        commands: of a shell, one a line, in the folder of the code from the one that changes to it.
        exported: variables by name.
    """

    base: str
    copied: dict[str, str]
    commands: list[str]
    exported: dict[str, str]


def of_docker() -> Image:
    text = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", (FOLDER / "Dockerfile").read_text(), flags=re.MULTILINE))
    lines = [line.partition(" ")[::2] for line in text.splitlines() if line]
    assert {word for word, _ in lines} == {"FROM", "RUN", "WORKDIR", "COPY", "ENV"}
    (base,), (folder,), (exported,) = (
        [rest for word, rest in lines if word == one] for one in ("FROM", "WORKDIR", "ENV")
    )
    copied: dict[str, str] = {}
    commands: list[str] = []
    for word, rest in lines:
        if word == "COPY":
            *sources, to = rest.split()
            copied |= {
                f"{folder}/{source if to.endswith('/') else to}".replace("/./", "/"): source for source in sources
            }
        commands += rest.split(" && ") if word == "RUN" else [f"cd {folder}"] if word == "WORKDIR" else []
    return Image(base, copied, commands, dict(re.findall(r"(\w+)=(\S+)", exported)))


def of_apptainer() -> Image:
    head, *sections = re.split(r"^%", (FOLDER / "apptainer.def").read_text(), flags=re.MULTILINE)
    lines = {name: [line.strip() for line in rest if line] for name, *rest in map(str.splitlines, sections)}
    assert lines.keys() == {"files", "post", "environment"}
    assert "\nBootstrap: docker\n" in head
    (base,) = re.findall(r"^From: (.*)$", head, re.MULTILINE)
    copied = {to: source for source, to in map(str.split, lines["files"])}
    exported = dict(re.findall(r"^export (\w+)=(\S+)$", "\n".join(lines["environment"]), re.MULTILINE))
    return Image(base, copied, lines["post"], exported)


def test_both_forms_are_one_image() -> None:
    docker, apptainer = of_docker(), of_apptainer()
    assert docker.base == apptainer.base
    assert docker.copied == apptainer.copied
    assert docker.commands == apptainer.commands
    given = {**docker.exported, "PYTHONPATH": f"${{PYTHONPATH:-{docker.exported['PYTHONPATH']}}}"}  # by a job script
    assert apptainer.exported == given


def test_an_image_takes_what_make_reads_and_nothing_that_git_ignores() -> None:
    image = of_docker()
    listed = subprocess.check_output(["git", "ls-files", *image.copied.values()], cwd=CHECKOUT, text=True).splitlines()
    assert all(any(path == one or path.startswith(f"{one}/") for path in listed) for one in image.copied.values())
    planned = ["make", "--dry-run", "--always-make", "--no-print-directory", ".venv/installed"]
    read = re.findall(r"[\w.-]+\.(?:txt|toml)\b", subprocess.check_output(planned, cwd=CHECKOUT, text=True))
    assert {*read} - {"hashed.txt"} <= {*image.copied.values()}
    assert image.commands[-2:] == ["cd /opt/code", "make .venv/installed"]
    checked = subprocess.run(["sh", "-n"], input="\n".join(image.commands), capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
