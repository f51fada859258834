"""SIGTERM: all ranks end the step together, and save if the script wants it; nobody waits to be killed."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipework import Mesh, save_checkpoint
from tests.faults.processes.launching import Launch
from tests.faults.processes.training import PATIENCE, Failing, note_strikes, small_pipe

BOUND = 2.0  # seconds, and the time of a step
LIMIT = 400  # steps, more than anybody should come to


def trains(mesh: Mesh, folder: str, heeds: bool) -> int:
    note_strikes(folder, mesh.rank)
    pipe = small_pipe(mesh)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    x = torch.randn(8, 8)
    done = 0
    try:
        for step in range(LIMIT):
            pipe(x, target=x).backward()
            optimizer.step()
            optimizer.zero_grad()
            done = step + 1
            if heeds and pipe.stopping:
                save_checkpoint(folder, pipe, optimizer, step=done)
                break
            time.sleep(0.05)
        return done
    finally:
        Path(folder, f"left.{mesh.rank}").write_text(f"{time.time()} {done}")


def seconds(folder: Path) -> float:
    """From the first signal until the last rank has left."""
    struck = min(float(path.read_text()) for path in folder.glob("struck.*"))
    return max(float(path.read_text().split()[0]) for path in folder.glob("left.*")) - struck


AT_EACH_ACTION = [
    pytest.param(f"{rank}step=3,action={action}", 2, 1, marks=pytest.mark.slow)
    for rank, actions in (("rank=0,", ("F", "B", "SEND_F", "RECV_B")), ("", ("F", "B")))
    for action in (*(f"{each},micro_batch=1" for each in actions), "optimizer")
]


@pytest.mark.parametrize(
    ("place", "ranks", "dp"),
    [
        ("rank=1,step=3,action=B,micro_batch=0", 2, 1),
        ("step=3,action=F,micro_batch=1", 2, 1),
        ("rank=2,step=3,action=optimizer", 4, 2),
        *AT_EACH_ACTION,
    ],
)
def test_all_save_after_the_same_step(failing: Failing, place: str, ranks: int, dp: int) -> None:
    outcome = failing(ranks, f"{place},kind=terminate", body=trains, init={"dp": dp}, heeds=True)
    assert [each.code for each in outcome.ended] == [0] * ranks, [each.errors for each in outcome.ended]
    steps = {each.result for each in outcome.ended}
    assert len(steps) == 1
    assert 3 < steps.pop() < LIMIT
    assert len(list(outcome.folder.glob("step-*/COMPLETE"))) == 1
    assert seconds(outcome.folder) <= BOUND * PATIENCE


def test_a_script_that_does_not_look_is_made_to_leave(failing: Failing) -> None:
    outcome = failing(2, "rank=1,step=3,action=B,micro_batch=0,kind=terminate", body=trains, heeds=False)
    assert [each.code for each in outcome.ended] == [143, 143], [each.errors for each in outcome.ended]
    done = {path.read_text().split()[1] for path in outcome.folder.glob("left.*")}
    assert len(done) == 1
    assert seconds(outcome.folder) <= BOUND * PATIENCE
    assert all(
        "leaving before the next training step, as a process was asked to end" in each.errors for each in outcome.ended
    )


def test_the_second_one_ends_a_rank_at_once(failing: Failing) -> None:
    place = "rank=1,step=3,action=F,micro_batch=0,"
    # Two signals at the same time would be one.
    what = ["kind=terminate", "kind=sleep,seconds=0.5", "kind=terminate", "kind=sleep,seconds=30"]
    outcome = failing(2, ";".join(place + each for each in what), body=trains, heeds=True)
    assert outcome.ended[1].code == 143
    assert outcome.ended[0].code == 72
    assert max(each.seconds for each in outcome.ended) - min(each.seconds for each in outcome.ended) <= BOUND * PATIENCE


def survives(mesh: Mesh, folder: str) -> None:
    note_strikes(folder, mesh.rank)
    pipe, x = small_pipe(mesh), torch.randn(4, 8)
    try:
        for _ in range(5):
            pipe(x, target=x).backward()
    except RuntimeError:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)  # such as a script that cleans up


def test_a_failed_job_ends_soon_after_it_is_asked_to(failing: Failing) -> None:
    begin = time.monotonic()
    outcome = failing(2, "rank=1,step=2,action=F,micro_batch=0,kind=raise", body=survives)
    assert [each.code for each in outcome.ended] == [143, 143]
    assert max(each.seconds for each in outcome.ended) < 60
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("heedless", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_torchrun_is_asked_to_end(launch: Callable[..., Launch], heedless: bool) -> None:
    launched = launch("--steps", "2000", "--pause", "0.05", *(["--heedless"] if heedless else []))
    launched.until("step.0.1")
    begin = time.monotonic()
    launched.process.send_signal(signal.SIGTERM)
    launched.wait()
    assert time.monotonic() - begin <= BOUND * PATIENCE + 2  # the launcher itself takes its time
    assert not launched.left_over()
    assert "forcefully exiting" not in launched.log
    steps = {path.read_text().split()[0] for path in launched.folder.glob("step.0.?")}
    assert len(steps) == 1
    if not heedless:
        assert (launched.folder / "checkpoints" / f"step-{int(steps.pop()):08d}" / "COMPLETE").is_file(), launched.log
