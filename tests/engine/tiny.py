"""The project's own models, small enough that a run of 50 steps takes seconds: overrides of train.py."""

from __future__ import annotations

from tests.engine.conftest import CHECKOUT

# Cut into accumulated micro batches at 1 and 2 devices. The default clips some of the gradients and not others: were
# all of them clipped, Adam would hide a wrong norm.
RUN = (
    "global_batch_size=24",
    "micro_batch_size=6",
    "trainer.max_steps=50",
    "trainer.val_check_interval=25",
    "trainer.log_every_n_steps=1",
    "model.layers=2",
    "model.heads=2",
    "model.width=32",
)
GPT = ("model=gpt", "model.context=32", "model.sample_tokens=0", "data=text", f"data.files=[{CHECKOUT}/LICENSE]", *RUN)
VIT = ("model=vit", "data=digits", *RUN)
MODELS = {"gpt": GPT, "vit": VIT}

NO_CHECKPOINTS = ("~callbacks.best_checkpoint", "~callbacks.last_checkpoint", "++trainer.enable_checkpointing=false")
