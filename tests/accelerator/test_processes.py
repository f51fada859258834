"""Pipes over processes whose tensors are on accelerators, between which they go through the CPU, by gloo."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("replicas", [1, 2])
def test_two_ranks_have_the_bits_of_the_plain_model(replicas: int) -> None:
    here = Path(__file__)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(here.parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(here.with_name("ranks_on_devices.py")), str(replicas)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # The ranks may print on one line, since each writes the end of its line by itself.
    assert sorted(re.findall(r"rank \d: \d cases are equal", done.stdout)) == [
        "rank 0: 4 cases are equal",
        "rank 1: 4 cases are equal",
    ]
