"""A small language model with its data, whose runs of 50 steps take seconds: overrides of train.py."""

from __future__ import annotations

# Cut into accumulated micro batches at 1 and 2 devices. The norm of 1 clips some of the gradients and not others: were
# all of them clipped, Adam would hide a wrong norm.
RUN = (
    "global_batch_size=24",
    "micro_batch_size=6",
    "trainer=clipped",
    "trainer.max_steps=50",
    "trainer.val_check_interval=25",
    "trainer.log_every_n_steps=1",
)
PICTURES = "data._target_=tests.engine.models.pictures.Pictures"
LANGUAGE_MODEL = (
    "model._target_=tests.engine.models.language.LanguageModel",
    "model.optimizer=${optimizer}",
    "model.scheduler=${scheduler}",
)
TEXT = "data._target_=tests.engine.data.text.Text"
LANGUAGE = (*LANGUAGE_MODEL, TEXT, *RUN)

NO_CHECKPOINTS = ("~callbacks.best_checkpoint", "~callbacks.last_checkpoint", "++trainer.enable_checkpointing=false")
RECORD = ("callbacks.record._target_=tests.engine.plain.Record", "callbacks.record.folder=${hydra:runtime.output_dir}")
