"""What a config takes from the environment, or names like a secret, is in no file of the run and in no store."""

from __future__ import annotations

import re
import shlex
import stat
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

import lightswitch
from lightswitch.cluster.placement import reported_variables
from lightswitch.compare import run as compare
from lightswitch.config.confidential import masked_override, public, values
from lightswitch.errors import Refused
from lightswitch.runs import resume
from tests.engine.conftest import Finished, runs_in

SECRET, TYPED = "hunter2-correct-horse", "swordfish-typed"
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
+model.pem=${oc.env:PEM} "+model.pin='${oc.decode:${oc.env:PIN}}'" +model.api_key=swordfish-typed model.rank=1
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
    finished = train(*shlex.split(RUN), ranks=2, environment={**ENVIRONMENT, "SEEN": str(seen)}, check=False)
    assert finished.returncode == 1, finished.err
    return finished


def test_no_file_of_a_run_holds_a_secret_of_its_environment(failed: Finished) -> None:
    files = [path for path in failed.folder.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"config.yaml", "run.json", "train.log", "hparams.yaml", "trainer.pt", "failure.txt", "rank_1.txt"} <= names
    secrets = re.compile(
        f"{SECRET}|{TYPED}|{KEY}|{PIN}|".encode() + re.escape(PIN.to_bytes(4, "little"))
    )  # in a pickle, too
    assert [path for path in files if secrets.search(path.read_bytes())] == []


def test_the_command_that_goes_on_does_not_show_what_was_typed(failed: Finished) -> None:
    assert re.search(r"^go on .* '\+model.api_key=\*\*\*' ", failed.out, re.MULTILINE)
    assert not re.search(f"{SECRET}|{TYPED}|{KEY}", failed.out + failed.err)


def test_ranks_meet_on_their_machine_alone_and_the_store_has_no_secret(failed: Finished, seen: Path) -> None:
    store = (seen / "before").read_text()
    assert (seen / "served").read_text() == "127.0.0.1"
    assert "meeting/0 " in store
    assert not re.search(f"{SECRET}|{TYPED}|{KEY}|{PIN}", store)
    assert not list(failed.run_dir.glob(".meeting_*"))


def test_a_crash_report_is_its_owners_alone_and_shows_no_variable(failed: Finished) -> None:
    (report,) = (failed.run_dir / "crash").iterdir()
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (report, report.parent)} == {0o700}
    assert {stat.S_IMODE(file.stat().st_mode) for file in report.iterdir()} == {0o600}
    told = (report / "rank_1.txt").read_text()
    assert not [name for name in ("RANK", *ENVIRONMENT) if f"\n{name}=" in told]


def test_the_model_has_what_its_files_do_not(failed: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    last, config = failed.run_dir / "checkpoints" / "last.ckpt", failed.run_dir / "config.yaml"
    arguments = torch.load(last / "trainer.pt", weights_only=True)["hyper_parameters"]
    for written in (arguments, OmegaConf.to_container(OmegaConf.load(config))["model"]):
        assert (written["token"], written["pin"]) == ("${oc.env:API_TOKEN}", "${oc.decode:${oc.env:PIN}}")
    for name, value in {"API_TOKEN": "another", "PEM": PEM, "PIN": str(PIN), "SEEN": str(failed.folder)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Refused, match="a secret was typed, and is not written: api_key; type it into that file"):
        lightswitch.load(last, trust=True)
    config.write_text(config.read_text().replace("'***'", "another"))
    assert lightswitch.load(last, trust=True).token == "another"  # it trusts the decoder of the pin
    monkeypatch.delenv("API_TOKEN")
    with pytest.raises(Refused, match="Environment variable 'API_TOKEN' not found"):
        lightswitch.load(last, trust=True)
    (run,) = compare.read([failed.run_dir])  # which needs no value
    assert run.config["model.rank"] == "1"


def test_a_config_is_written_resolved_but_for_the_environment_and_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_it_is = ["${oc.env:TOKEN}", "Basic ${oc.env:TOKEN}", "${oc.decode:'[${oc.env:TOKEN}]'}", "${oc.env:NONE,null}"]
    cfg = OmegaConf.create(
        {
            "seed": 1,
            "one": as_it_is,
            "two": "${one.0}",
            "three": {"four": ["${two}", "${seed}"]},
            "six": "${three}",
            "length": "${oc.dict.keys:${oc.env:TOKEN}}",
            "api_key": "hunter2",
            "tokens": 8,
            "users": [{"password": "${two}", "name": "${seed}", "pwd": 34}],
        }
    )
    written = {
        "seed": 1,
        "one": as_it_is,
        "two": "${oc.env:TOKEN}",
        "three": {"four": ["${oc.env:TOKEN}", 1]},
        "six": {"four": ["${oc.env:TOKEN}", 1]},
        "length": "${oc.dict.keys:${oc.env:TOKEN}}",
        "api_key": "***",
        "tokens": 8,
        "users": [{"password": "${oc.env:TOKEN}", "name": 1, "pwd": "***"}],
    }
    assert public(cfg) == written
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(written)))
    assert resume.changes_since(tmp_path, cfg) == ""
    monkeypatch.setenv("TOKEN", SECRET)
    del cfg.length
    assert public(cfg) == {key: value for key, value in written.items() if key != "length"}
    assert (values(cfg)["two"], values(cfg)["api_key"]) == ("${oc.env:TOKEN}", "***")


SECRETS = """
HF_TOKEN=hf_x hftoken=x hfToken=x access_token=x api_tokens=[x,y] token=null0 token='12' WANDB_API_KEY=x apiKey=x
api-key=1 apikeys=[x] aws_secret_access_key=x secret_key=7 ssh_key=x private_key=x encryption_key=x
openai_api_key=x backend_token=x jwt=x password=x password=12345678 DB_PASSWD=x PGPASSWORD=x
pwd=x passphrase=x credentials=x client_secret=x auth=x http_auth=x oauth2=x authorization=x bearer=x cookie=x
dsn=postgres://u:p@host/x url=https://key@sentry.io/1 options={a:{apiKey:x},b:1} o={"token":x}
"""
SETTINGS = """
tokens_per_sample=1024 max_tokens=4096 tokens=train.txt tokenizer=bpe eos_token=</s> eos_token_id=2
token_mixer=attention shared_key_dim=64 key_dim=64
num_kv_heads=8 keys=[a,b] sort_key=len label_key=label monkey=x keyboard=x author=x authority=x use_auth=1
use_auth=true token=null password=null private=False token=${oc.env:HF_TOKEN} url=https://host/x@y
options={max_tokens:5,sort_key:len}
"""


def test_what_is_named_like_a_secret_is_no_part_of_a_command_and_settings_are() -> None:
    for override in SECRETS.split():
        assert masked_override(f"+data.{override}") == f"+data.{override.partition('=')[0]}=***"
    for override in SETTINGS.split():
        assert masked_override(f"+data.{override}") == f"+data.{override}"


def test_variables_are_shown_by_name_alone() -> None:
    environ = dict.fromkeys([*HIDDEN, "SLURM_JOB_ID", "RANK"], "7")
    assert reported_variables(environ) == {"RANK": "7", "SLURM_JOB_ID": "7"}
