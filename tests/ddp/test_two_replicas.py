"""`DistributedDataParallel(pipe)` on two gloo processes: the gradients of the whole batch, in every way and mode."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.two_processes import address_of, hosted_store

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no distributed"),
    pytest.mark.thorough,
]

SCRIPT = Path(__file__).with_name("replica.py")
OPTIONS = ("plain", "find_unused_parameters", "static_graph", "gradient_as_bucket_view", "no_sync", "return_output")
CASES = [
    (schedule, checkpoint, option)
    for schedule in ("outside", "gpipe", "1f1b", "interleaved-1f1b")
    for checkpoint in ("never", "except_last", "always")
    for option in OPTIONS
    if (schedule, option) != ("outside", "return_output")
]


@pytest.fixture(scope="module")
def verdicts() -> dict[str, str]:
    """All cases in one pair of processes: starting them costs more than running them."""
    store = hosted_store()
    environment = {**os.environ, **address_of(store), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *map(":".join, CASES)],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=110)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0, 0], outputs
    return dict(line.split("=") for line in outputs[0].splitlines() if "=" in line)


@pytest.mark.parametrize(("schedule", "checkpoint", "option"), CASES)
def test_replicas_get_the_gradients_of_the_whole_batch(
    verdicts: dict[str, str], schedule: str, checkpoint: str, option: str
) -> None:
    assert verdicts[f"{schedule}:{checkpoint}:{option}"] == "equal"
