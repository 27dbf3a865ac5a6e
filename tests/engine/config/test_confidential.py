"""What is secret stays in the environment: it is in no file of the run, in no store, on no terminal."""

from __future__ import annotations

import json
import re
import shlex
import stat
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from socket import gethostname
from typing import Any
from urllib.parse import quote_plus

import pytest
import torch
from omegaconf import OmegaConf

import lightswitch
from lightswitch.cluster import variables
from lightswitch.config import confidential
from lightswitch.config.confidential import Cleaner
from lightswitch.errors import Refused
from tests.engine.conftest import PLAIN, Finished, Train, runs_in

SECRET = "hunter2-correct-horse"
KEY = "MIIEvQIBADANBgkqhkiG9w0"
PEM = f"-----BEGIN KEY-----\n{KEY}+/A\n'{KEY}'\n-----END KEY-----\n"
PIN = 4711081
HIDDEN = ("SLURM_JWT", "DB_PASSWD", "HF_AUTH", "token", "CUDA_TOKEN", "NCCL_AUTH", "TORCH_PASSWORD", "WANDB_API_KEY")
ENVIRONMENT = {
    "API_TOKEN": SECRET,
    "PEM": PEM,
    "PIN": str(PIN),
    **{name: f"{SECRET}-{name}" for name in HIDDEN},
    "NCCL_NET": f"http://me:{SECRET}@x",
}
RUN = """
model._target_=tests.engine.config.secretive.SecretModel +model.token=${oc.env:API_TOKEN} +model.how=raises
+model.pem=${oc.env:PEM} "+model.pin='${oc.decode:${oc.env:PIN}}'" model.rank=1
data._target_=tests.engine.config.secretive.SecretData "+data.password='Basic ${oc.env:API_TOKEN}'"
strategy=ddp trainer.accelerator=cpu trainer.max_steps=4 callbacks.last_checkpoint.every_n_steps=1 run_id=mine
callbacks.stranger._target_=tests.engine.config.secretive.Stranger callbacks.stranger.folder=${oc.env:SEEN}
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seen")


@pytest.fixture(scope="module")
def failed(seen: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    train = runs_in(tmp_path_factory.mktemp("failed"))
    torchrun = {"TORCHELASTIC_ERROR_FILE": str(seen / "torchrun.json")}
    finished = train(
        *shlex.split(RUN), ranks=2, environment={**ENVIRONMENT, **torchrun, "SEEN": str(seen)}, check=False
    )
    assert finished.returncode == 1, finished.err
    return finished


def test_no_file_of_a_run_holds_a_secret_of_its_environment(failed: Finished) -> None:
    files = [path for path in failed.folder.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"config.yaml", "run.json", "train.log", "hparams.yaml", "trainer.pt", "failure.txt", "rank_1.txt"} <= names
    secrets = re.compile(f"{SECRET}|{KEY}|{PIN}|".encode() + re.escape(PIN.to_bytes(4, "little")))  # in a pickle, too
    assert [path for path in files if secrets.search(path.read_bytes())] == []


def test_neither_the_terminal_nor_torchrun_is_told_one(failed: Finished, seen: Path) -> None:
    assert "token=${oc.env:API_TOKEN}" in (seen / "torchrun.json").read_text()
    assert SECRET not in (seen / "torchrun.json").read_text()
    assert "RuntimeError: 401 for https://example.org/?token=${oc.env:API_TOKEN}" in failed.err
    assert 'KeyError: "${oc.env:PEM}"' in failed.err
    assert not re.search(f"{SECRET}|{KEY}", failed.out + failed.err)


def test_ranks_meet_on_their_machine_alone_and_the_store_has_digests_until_they_have(
    failed: Finished, seen: Path
) -> None:
    before, after = ((seen / name).read_text() for name in ("before", "after"))
    assert (seen / "served").read_text() == "127.0.0.1"
    assert "meeting/0 " in before
    assert not re.search(f"{SECRET}|API_TOKEN", before)
    assert set(re.findall("meeting/[a-z]*", after)) <= {"meeting/place", "meeting/world"}  # which ranks are taken
    assert not list(failed.run_dir.glob(".meeting_*"))


def test_a_crash_report_is_its_owners_alone_and_shows_the_variables_that_are_named(failed: Finished) -> None:
    (report,) = (failed.run_dir / "crash").iterdir()
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (report, report.parent)} == {0o700}
    assert {stat.S_IMODE(file.stat().st_mode) for file in report.iterdir()} == {0o600}
    told = (report / "rank_1.txt").read_text()
    assert "\nRANK=1\n" in told
    assert "\nNCCL_NET=(not shown)\n" in told
    assert not [name for name in HIDDEN if f"\n{name}=" in told]


def test_the_model_has_what_its_files_do_not(failed: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    last = failed.run_dir / "checkpoints" / "last.ckpt"
    saved = torch.load(last / "trainer.pt", weights_only=True)["hyper_parameters"]
    for written in (saved, OmegaConf.to_container(OmegaConf.load(failed.run_dir / "config.yaml"))["model"]):
        assert (written["token"], written["pin"]) == ("${oc.env:API_TOKEN}", "${oc.decode:${oc.env:PIN}}")
    for name, value in {"API_TOKEN": "another", "PEM": PEM, "PIN": str(PIN), "SEEN": str(failed.folder)}.items():
        monkeypatch.setenv(name, value)
    assert lightswitch.load(last, trust=True).token == "another"  # it trusts the decoder of the pin
    monkeypatch.delenv("API_TOKEN")
    with pytest.raises(Refused, match="Environment variable 'API_TOKEN' not found"):
        lightswitch.load(last, trust=True)


@pytest.mark.nightly
def test_a_rank_with_another_secret_is_named_without_it(train: Train) -> None:
    refused = train(*PLAIN, "strategy=ddp", "trainer.accelerator=cpu", "tags=[${oc.env:RANK}]", ranks=2, check=False)
    assert refused.returncode == 2
    assert f"rank 1 on {gethostname()} has another tags than rank 0 on {gethostname()}; " in refused.err


def test_a_reference_to_what_comes_from_the_environment_is_written_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", SECRET)
    cfg = OmegaConf.create(
        {"one": "${oc.env:TOKEN}", "two": "${one}", "three": {"four": ["${two}", 5]}, "six": "${three}"}
    )
    written = OmegaConf.to_container(confidential.redacted(cfg))
    assert written == {
        "one": "${oc.env:TOKEN}",
        "two": "${oc.env:TOKEN}",
        "three": {"four": ["${oc.env:TOKEN}", 5]},
        "six": {"four": ["${oc.env:TOKEN}", 5]},
    }
    assert confidential.values(cfg).hidden == {"one", "two", "three.four", "six.four"}


FORMS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "repr": repr,
    "repr of more": lambda pem: repr(f'"{pem}"'),
    "JSON": json.dumps,
    "a part of a URL": quote_plus,
    "one line": lambda pem: " ".join(pem.split()),
    "lines": str.splitlines,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_value_is_known_in_the_forms_in_which_errors_show_it(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEM", PEM)
    told = f"KeyError: {FORMS[form](PEM)}"
    assert KEY in told
    cleaned = Cleaner.of(OmegaConf.create({"pem": "${oc.env:PEM}"})).cleaned(told)
    assert cleaned.startswith("KeyError: ")
    assert KEY not in cleaned


KNOWN: dict[str, tuple[str, Any, Any]] = {  # the config's value, what is cleaned and what becomes of it
    "a part": ("https://u:${oc.env:SECRET}@host/", "failed for marker123456", "failed for ${oc.env:SECRET}"),
    "decoded": ("${oc.decode:'[${oc.env:SECRET}]'}", "failed for marker123456", "failed for ${oc.env:SECRET}"),
    "a short one alone": ("${oc.env:SHORT}", "1234567", "${oc.env:SHORT}"),
    "a short one in other text": ("${oc.env:SHORT}", "12345678", "12345678"),
    "an empty one": ("${oc.env:NONE,''}", "", ""),
    "a number": ("${oc.decode:${oc.env:PIN}}", [4711, 0.5], ["${oc.decode:${oc.env:PIN}}", 0.5]),
    "a small number": ("${oc.decode:${oc.env:SMALL}}", {"value": 7}, {"value": "${oc.decode:${oc.env:SMALL}}"}),
    "that number elsewhere": ("${oc.decode:${oc.env:SMALL}}", {"layers": 7}, {"layers": 7}),
    "a flag elsewhere": ("${oc.decode:${oc.env:FLAG}}", {"bias": True}, {"bias": True}),
    "a mapping": ("${oc.decode:${oc.env:AUTH}}", {"x": {"user": "me"}}, {"x": "${oc.decode:${oc.env:AUTH}}"}),
}


@pytest.mark.parametrize("of", KNOWN)
def test_a_value_of_a_variable_is_known_where_it_is_shown(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"SECRET": "marker123456", "SHORT": "1234567", "PIN": "4711", "SMALL": "7", "FLAG": "true"}
    for name, value in (variables | {"AUTH": "{user: me}"}).items():
        monkeypatch.setenv(name, value)
    written, told, expected = KNOWN[of]
    assert Cleaner.of(OmegaConf.create({"value": written})).cleaned(told) == expected


def test_loggers_get_a_config_without_what_reads_like_a_secret() -> None:
    written = {
        "api_key": "hunter2",
        "seed": 1,
        "tokens": 8,
        "user": [{"password": "${oc.env:NONE,x}", "name": "${seed}"}],
    }
    told = {"api_key": "***", "seed": 1, "tokens": 8, "user": [{"password": "${oc.env:NONE,x}", "name": 1}]}
    assert confidential.public(OmegaConf.create(written)) == told


SECRETS = """
HF_TOKEN=hf_x hftoken=x hfToken=x access_token=x api_tokens=[x,y] token=null0 token='12' WANDB_API_KEY=x apiKey=x
api-key=1 apikeys=[x] aws_secret_access_key=x secret_key=7 ssh_key=x private_key=x encryption_key=x
openai_key=sk-4bd1c09a2f7e66d0 key=AKIAIOSFODNN7EXAMPLE jwt=x password=x password=12345678 DB_PASSWD=x PGPASSWORD=x
pwd=x passphrase=x credentials=x client_secret=x auth=x http_auth=x oauth2=x authorization=x bearer=x cookie=x
dsn=postgres://u:p@host/x url=https://key@sentry.io/1 options={a:{apiKey:x},b:1} o={"token":x}
"""
SETTINGS = """
tokens_per_sample=1024 max_tokens=4096 tokens=train.txt tokenizer=bpe eos_token=2 eos_token_id=2 key_dim=64
num_kv_heads=8 keys=[a,b] sort_key=len label_key=label monkey=x keyboard=x author=x authority=x use_auth=1
use_auth=true token=null password=null private=False token=${oc.env:HF_TOKEN} url=https://host/x@y
options={max_tokens:5,sort_key:len}
"""


@pytest.mark.parametrize("override", SECRETS.split())
def test_what_reads_like_a_secret_is_no_part_of_a_command(override: str) -> None:
    assert confidential.without_secret(f"+data.{override}") == f"+data.{override.partition('=')[0]}=***"


@pytest.mark.parametrize("override", SETTINGS.split())
def test_settings_are_shown(override: str) -> None:
    assert confidential.without_secret(f"+data.{override}") == f"+data.{override}"


def test_numbers_that_differ_between_ranks_are_shown_and_texts_of_secrets_are_not() -> None:
    cfg = OmegaConf.create(
        {"max_tokens": 8, "eos_token": 2, "token": "12", "password": 34, "auth": None, "sort_key": "x"}
    )
    assert confidential.values(cfg).hidden == {"token", "password"}


def test_a_mapping_keeps_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "a-long-secret")
    cleaned = Cleaner.of(OmegaConf.create({"token": "${oc.env:TOKEN}"})).cleaned
    found = cleaned(defaultdict(float, {"a": 2.0, "token": "a-long-secret"}))
    assert found == {"a": 2.0, "token": "${oc.env:TOKEN}"}
    assert found["b"] == 0.0


def test_variables_are_shown_by_name_alone() -> None:
    environ = dict.fromkeys([*HIDDEN, "SLURM_JOB_ID", "RANK"], "7")
    assert variables.shown(environ) == {"RANK": "7", "SLURM_JOB_ID": "7"}
