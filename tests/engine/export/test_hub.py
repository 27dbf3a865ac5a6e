"""The model card of an export for the hub, which others read: no secret, no HTML of somebody's."""

from __future__ import annotations

import json
from pathlib import Path

from lightswitch.export.hub import _card

OVERRIDES = [
    *("data.token=hunter2", "+data.auth={user: me, password: hunter2}", "data.url=https://me:hunter2@x/"),
    *("data.api_key='${oc.env:API_KEY}'", "model.tokenizer=gpt2", "name=a\n\n<script>alert(1)</script>"),
]


def test_a_card_holds_no_secret_that_was_typed_and_no_html(tmp_path: Path) -> None:
    run = {"overrides": OVERRIDES, "commit": "<img src=x>\n# head"}
    (tmp_path / "run.json").write_text(json.dumps(run))
    (tmp_path / "results.json").write_text('{"val/loss": 0.5, "a|b <script>": 1.0, "\\u001b[31m": 2.0}')
    card = _card(tmp_path / "checkpoints" / "last.ckpt", None)
    assert "hunter2" not in card
    for shown in ("data.token=***", "+data.auth=***", "data.url=***", "${oc.env:API_KEY}", "model.tokenizer=gpt2"):
        assert shown in card
    assert "<script>" not in card
    assert "<img" not in card
    assert "\x1b" not in card
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in card
    assert "\n| a\\|b &lt;script> | 1 |\n" in card


def test_records_that_are_none_make_a_card_without_them(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"overrides": 5}')
    (tmp_path / "results.json").write_text(f'{{"a": {"9" * 400}}}')
    assert "<pre>python train.py</pre>" in _card(tmp_path / "last.ckpt", None)
