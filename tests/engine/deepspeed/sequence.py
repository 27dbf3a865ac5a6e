"""fit, validate, test and predict under ZeRO-3 with offload, one after another in the same processes."""

from __future__ import annotations

import lightning.pytorch as pl

from lightswitch.deepspeed.strategy import DeepSpeed
from tests.engine.data.pictures import Pictures
from tests.engine.foreign import Convolutions

if __name__ == "__main__":
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=DeepSpeed(stage=3, offload_optimizer=True), max_steps=4, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    pl.seed_everything(1, workers=True, verbose=False)
    module, data = Convolutions(), Pictures()
    trainer.fit(module, data)
    trainer.validate(module, data, verbose=False)
    validated = trainer.callback_metrics["val/loss"].item()
    trainer.test(module, data, verbose=False)
    tested = trainer.callback_metrics["test/loss"].item()
    predicted = sum(len(batch) for batch in trainer.predict(module, data))
    again = trainer.validate(module, data, verbose=False)[0]["val/loss"]
    if trainer.is_global_zero:
        print(f"{validated:.6f} {tested:.6f} {again:.6f} {predicted}")
