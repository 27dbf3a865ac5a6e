"""torch's older FSDP, where it differs from its successor; test_fsdp.py has its shardings and options."""

from __future__ import annotations

from lightswitch.checkpoints.reader import Reader
from tests.engine.conftest import Train
from tests.engine.tiny import LANGUAGE


def test_a_checkpoint_after_a_resume_holds_the_steps_of_those_that_keep_the_parameters(train: Train) -> None:
    """A rank that keeps nothing of a parameter does not step it."""
    run = (*LANGUAGE, "strategy=fsdp1", "trainer.accelerator=cpu", "run_id=mine", "trainer.limit_val_batches=0")
    begun = train(*run, "trainer.max_steps=2", ranks=2)
    train(*run, "trainer.max_steps=4", ranks=2, folder=begun.folder)
    reader = Reader(begun.run_dir / "checkpoints" / "step_4.ckpt", None)
    steps = {
        name: reader.read(f"optimizer.0.{name}").item()
        for name in reader.names("optimizer.0.")
        if name.endswith(".step")
    }
    assert len(steps) > 10
    assert set(steps.values()) == {4.0}
