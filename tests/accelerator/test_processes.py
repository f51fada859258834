"""Pipes over processes whose tensors are on accelerators, between which they go through the CPU, by gloo."""

import pytest

from tests.programs import RunPython


@pytest.mark.gpu
@pytest.mark.parametrize("replicas", [1, 2])
def test_two_ranks_have_the_bits_of_the_plain_model(run_ranks: RunPython, replicas: int) -> None:
    done = run_ranks(2, ["-m", "tests.accelerator.ranks_on_devices", replicas])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"rank {rank}: 4 cases are equal" for rank in range(2)]
