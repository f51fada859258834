"""`DistributedDataParallel(pipe)` on two gloo processes: the gradients of the whole batch, in every way and mode."""

from pathlib import Path

import pytest
import torch

from tests.programs import RunPython

SCRIPT = Path(__file__).with_name("replica.py")
SCHEDULES = ("outside", "1f1b", "interleaved-1f1b", "zb-v")
OPTIONS = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "no_sync", "return_output")
CASES = [(schedule, mode, "plain") for schedule in SCHEDULES for mode in ("never", "except_last", "always")]
CASES += [(schedule, "except_last", option) for schedule in SCHEDULES[1:] for option in OPTIONS]
CASES += [("outside", "always", option) for option in OPTIONS if option != "return_output"]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no distributed")
@pytest.mark.thorough
def test_replicas_get_the_gradients_of_the_whole_batch(run_ranks: RunPython) -> None:
    ended = run_ranks(2, [SCRIPT, *map(":".join, CASES)])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines() == [f"{':'.join(case)}=equal" for case in CASES]
