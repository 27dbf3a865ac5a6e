"""What is installed is what was tested, to the byte."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from dataclasses import dataclass

import pytest

from lightswitch.patches import SUPPORTED
from tests.engine.conftest import CHECKOUT

PINS = (CHECKOUT / "constraints.txt").read_text()
LOWEST = (CHECKOUT / "constraints-lowest.txt").read_text()
VENVS = (".venv", ".venv-lowest")


@pytest.mark.parametrize("pins", [PINS, LOWEST], ids=VENVS)
def test_every_pin_but_torch_has_hashes(pins: str) -> None:
    entries = re.split(r"\n(?=\S)", pins.strip())
    assert entries[0].startswith("# made by `make constraints`")
    entries = [entry for entry in entries if not entry.startswith("# ")]
    assert [
        entry for entry in entries if not re.match(r"[\w.-]+==\S+( ;.*)? \\\n    --hash=sha256:[0-9a-f]{64}", entry)
    ] == [next(entry for entry in entries if entry.startswith("torch=="))]


def test_make_installs_the_versions_that_uv_locks() -> None:
    lock = tomllib.loads((CHECKOUT / "uv.lock").read_text())
    locked = {(package["name"], package["version"]) for package in lock["package"]}
    pinned = re.findall(r"^([\w.-]+)==([\w.+]+)", PINS, re.MULTILINE)
    assert len(pinned) > 150
    assert {*pinned} <= locked


def _chosen(extras: str) -> set[str]:
    """The packages that make installs."""
    plan = ["make", "--dry-run", "--no-print-directory", f"EXTRAS={extras}", "--eval=shown: ; @$(CHOOSE)", "shown"]
    command = subprocess.check_output(plan, cwd=CHECKOUT, text=True).partition(" > ")[0]
    found = subprocess.check_output(["bash", "-c", command], cwd=CHECKOUT, text=True)
    return set(re.findall(r"^([\w.-]+)==", found, re.MULTILINE))


def test_make_installs_what_the_defaults_of_conf_need_and_the_extras_that_are_named() -> None:
    default, named = _chosen(""), _chosen("digits,hf")
    show = ["make", "--silent", "--eval=shown: ; @echo $(EXTRAS)", "shown"]
    assert subprocess.check_output(show, cwd=CHECKOUT, text=True) == "deepspeed,digits\n"  # README's own commands
    assert {"torch", "lightning", "hydra-core", "tensorboard", "pip"} <= default
    assert not {"deepspeed", "matplotlib", "pandas", "pytest", "scikit-learn", "scipy", "transformers"} & default
    assert {"scikit-learn", "scipy", "transformers"} <= named - default
    assert {"deepspeed", "pytest"} <= _chosen("all") - named
    told = subprocess.run(["make", "EXTRAS=hff", "train"], cwd=CHECKOUT, text=True, capture_output=True, check=False)
    assert "found EXTRAS=hff, expected all, or some of datasets,deepspeed,digits,hf," in told.stderr
    extras = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    assert extras - {"comet", "float8"} == {*re.findall(r"^# ([a-z0-9]+): ", PINS, re.MULTILINE)} - {"default"}


def test_the_lowest_pins_are_the_lower_bounds() -> None:
    for package, bounds in SUPPORTED.items():
        pinned, *_ = re.findall(rf"^{package}==(\S+)", LOWEST, re.MULTILINE)
        lowest = bounds.partition(",")[0].removeprefix(">=")
        assert re.fullmatch(rf"{re.escape(lowest)}(\.0)*", pinned)


@pytest.mark.parametrize("venv", VENVS)
def test_make_installs_nothing_by_name_alone_but_torch(venv: str) -> None:
    command = ["make", "--dry-run", "--always-make", "--no-print-directory", f"{venv}/installed"]
    planned = subprocess.check_output(command, cwd=CHECKOUT, text=True)
    installs = [line for line in planned.splitlines() if "pip install" in line]
    unhashed = [line for line in installs if "--require-hashes --no-deps" not in line]
    assert len(installs) == 5
    assert all(f"{venv}/bin/python -m pip" in line for line in installs)
    assert len(unhashed) == 2
    assert all("^torch==" in line or line.endswith("--no-build-isolation --editable .") for line in unhashed)


def test_a_wheelhouse_is_filled_by_the_hashes_and_then_nothing_else_is_asked() -> None:
    """All of it, in a bare root without a network: tests/nightly/slurm/test_without_internet.py."""
    planned = subprocess.check_output(["make", "--dry-run", "wheelhouse"], cwd=CHECKOUT, text=True)
    downloads = [line for line in planned.splitlines() if "pip download" in line]
    assert ["--require-hashes --no-deps" in line for line in downloads] == [True, False]
    assert "grep '^torch=='" in downloads[1]
    shows = ["make", "--silent", "--eval=shown: ; @env", "shown", "WHEELHOUSE=wheelhouse"]
    exported = subprocess.check_output(shows, cwd=CHECKOUT, text=True).splitlines()
    assert {"PIP_NO_INDEX=1", f"PIP_FIND_LINKS={CHECKOUT}/wheelhouse"} <= {*exported}


def test_actions_are_pinned_by_commit() -> None:
    used = re.findall(r"uses: (.*)", "".join(path.read_text() for path in CHECKOUT.glob(".github/workflows/*.yml")))
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v[\d.]+", action) for action in used)


# docs/examples/container has one image in two forms: what it takes from the checkout, what it installs, what it exports


FOLDER = CHECKOUT / "docs" / "examples" / "container"


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


def test_the_development_container_is_the_image_with_the_editors_extensions() -> None:
    folder = CHECKOUT / ".devcontainer"
    settings = json.loads((folder / "devcontainer.json").read_text())
    assert (folder / settings["build"]["dockerfile"]).resolve() == FOLDER / "Dockerfile"
    recommended = json.loads((CHECKOUT / ".vscode/extensions.json").read_text())["recommendations"]
    assert settings["customizations"]["vscode"]["extensions"] == recommended
    python = settings["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"]
    assert python.startswith(of_docker().exported["PATH"].partition(":")[0])


def test_an_image_takes_what_make_reads_and_nothing_that_git_ignores() -> None:
    image = of_docker()
    listed = subprocess.check_output(["git", "ls-files", *image.copied.values()], cwd=CHECKOUT, text=True).splitlines()
    assert all(any(path == one or path.startswith(f"{one}/") for path in listed) for one in image.copied.values())
    planned = ["make", "--dry-run", "--always-make", "--no-print-directory", ".venv/installed", "EXTRAS=all"]
    read = re.findall(r"[\w.-]+\.(?:txt|toml)\b", subprocess.check_output(planned, cwd=CHECKOUT, text=True))
    assert {*read} - {"chosen.txt", "hashed.txt"} <= {*image.copied.values()}
    assert image.commands[-2:] == ["cd /opt/code", "make .venv/installed EXTRAS=all"]
    checked = subprocess.run(["sh", "-n"], input="\n".join(image.commands), capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
