"""DeepSpeed's directories are read as DeepSpeed's own converter reads them, but as data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightswitch.checkpoints import directory, foreign
from tests.engine.checkpoints import hostile
from tests.engine.checkpoints.test_foreign import AS_LIGHTNING
from tests.engine.conftest import Train
from tests.engine.tiny import PICTURES
from tests.night import at_night

LATE = ("model._target_=tests.engine.foreign.Late", PICTURES, "trainer.accelerator=cpu", "~callbacks.progress")
RUN = (*LATE, "trainer.max_steps=1", "trainer.limit_val_batches=0", "trainer.limit_test_batches=0")


@pytest.mark.filterwarnings("ignore")  # DeepSpeed's own, when it is imported
@pytest.mark.parametrize("stage", [3, *at_night(2)])
def test_weights_are_those_of_deepspeeds_own_converter(stage: int, train: Train) -> None:
    """Of frozen and tied parameters, single numbers, buffers of both kinds; 3 ranks divide nothing evenly."""
    batch = ("global_batch_size=24", "micro_batch_size=4")
    written = train(*RUN, *batch, f"strategy=deepspeed_stage_{stage}", *AS_LIGHTNING, ranks=3)
    path = written.run_dir / "lightnings.ckpt"
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    expected = get_fp32_state_dict_from_zero_checkpoint(str(path), tag="checkpoint")
    found = foreign.zero_weights(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert found["tied_again.weight"] is found["tied.weight"]
    own = directory.read_state(written.run_dir / "checkpoints" / "last.ckpt")
    assert own["names_of_tied"] == {"tied_again.weight": "tied.weight"}


def test_a_rank_that_is_missing_is_told(tmp_path: Path) -> None:
    path = hostile.good_zero(tmp_path / "x.ckpt")
    assert torch.equal(foreign.zero_weights(path)["w"], torch.arange(15.0).view(3, 5))
    (path / "checkpoint" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ValueError, match="has the states of 1 ranks, expected 2"):
        foreign.zero_weights(path)


@pytest.mark.parametrize("shape", [(1 << 22, 1 << 22), (3, 7)])
def test_shapes_that_the_numbers_do_not_fill_are_told(shape: tuple[int, int], tmp_path: Path) -> None:
    path = hostile.good_zero(tmp_path / "x.ckpt")
    file = path / "checkpoint" / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(file), "param_shapes": [{"w": torch.Size(shape)}]}, file)
    with pytest.raises(ValueError, match="has too few numbers for its parameters"):
        foreign.zero_weights(path)
