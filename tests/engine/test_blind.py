"""A test that names no device means the CPU, also where there is a GPU."""

from __future__ import annotations

import os
import sys

import torch

from tests.engine.conftest import PLAIN, Train
from tests.engine.processes import Start, said


def test_no_gpu_is_seen_by_a_test_nor_by_what_it_starts(start: Start) -> None:
    assert torch.cuda.device_count() == 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert said(start(sys.executable, "-c", "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))")) == "''\n"


def test_what_train_starts_sees_what_its_test_sees(train: Train) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "one"
    refused = train(*PLAIN, check=False)
    assert refused.err.startswith("error: CUDA_VISIBLE_DEVICES: found 'one', expected numbers of GPUs")
