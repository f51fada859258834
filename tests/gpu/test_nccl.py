"""Two ranks train through NCCL, on one card or on two, with the bits of two threads, and end without a word.

NCCL refuses two ranks on one card unless it takes them for processes of different hosts. The same ranks train through
gloo on the CPU where there is no card.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.two_processes import address_of, hosted_store
from tests.gpu.ranks import CAPTURED, SCHEDULES, WORKERS

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 110.0
AT_THE_END = 10.0  # seconds from the last step to the end of the process: no timeout is waited for
CARDS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def environment(rank: int, address: dict[str, str]) -> dict[str, str]:
    """What a launcher would set."""
    shared = {**address, "WORLD_SIZE": str(WORKERS), "RANK": str(rank)}
    if CARDS == 1:
        apart = {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        return {**shared, **apart, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return {**shared, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(WORKERS)}


def run_all(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    """Runs both ranks, and the threads beside them.

    Returns:
        What the ranks found; what the threads did; and all that the ranks have printed.
    """
    store = hosted_store()
    address = address_of(store)
    own = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.ranks", str(folder / str(number))],
            cwd=ROOT, env={**own, **extra}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for number, extra in enumerate([*(environment(rank, address) for rank in range(WORKERS)), {}])
    ]  # fmt: skip
    deadline, printed, found = time.monotonic() + SECONDS, [], []
    try:
        for number, process in enumerate(processes):
            printed.append(process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0])
            assert process.returncode == 0, f"process {number} ended with {process.returncode}:\n{printed[-1]}"
            found.append(json.loads((folder / str(number)).read_text(encoding="utf-8")))
            if number == WORKERS - 1:
                assert time.time() - max(each["finished"] for each in found) < AT_THE_END
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return found[:WORKERS], found[WORKERS], printed[:WORKERS]


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("gloo", marks=[pytest.mark.slow, pytest.mark.skipif(CARDS > 0, reason="there is a card")]),
        pytest.param("nccl", marks=[pytest.mark.gpu, pytest.mark.skipif(CARDS == 0, reason="needs an NVIDIA GPU")]),
    ],
)
def test_two_ranks_have_the_bits_of_two_threads_and_print_nothing(backend: str, tmp_path: Path) -> None:
    ranks, threads, printed = run_all(tmp_path)
    assert all(backend in rank["backend"] for rank in ranks)
    for schedule in (*SCHEDULES, *(f"{each}, captured" for each in CAPTURED)):
        wanted = threads[schedule]
        gradients: dict[str, str] = {}
        for rank in ranks:
            assert rank[schedule]["losses"] == wanted["losses"], schedule
            assert rank[schedule]["norms"] == pytest.approx(wanted["norms"], rel=1e-5), schedule  # summed by rank
            assert (rank[schedule]["replayed"] > 0) == (CARDS > 0 and "captured" in schedule)
            gradients |= rank[schedule]["gradients"]
        assert gradients == wanted["gradients"], schedule
    assert printed == ["", ""]
