import gc
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipework import Pipe
from pipework.runtime.device import WorkerDevice
from pipework.runtime.worker_threads import WorkerThreads
from tests.programs import RunPython


def cpu_workers(count: int) -> WorkerThreads:
    return WorkerThreads([WorkerDevice(torch.device("cpu")) for _ in range(count)])


def test_each_job_runs_on_a_thread_of_its_own() -> None:
    names: list[str] = []
    workers = cpu_workers(3)
    for _ in range(2):
        workers.run([lambda: names.append(threading.current_thread().name)] * 3, pytest.fail)
    assert sorted(names) == sorted([f"pipework worker {number}" for number in range(3)] * 2)


def test_threads_end_when_the_workers_are_dropped(own_workers: Callable[[], list[threading.Thread]]) -> None:
    workers = cpu_workers(2)
    assert len(own_workers()) == 2
    del workers
    assert own_workers() == []


def test_threads_do_not_keep_what_the_callers_variables_hold(variables_given: list[bool]) -> None:
    cpu_workers(2)
    assert variables_given == [False, False]


@pytest.mark.thorough
def test_workers_can_be_collected_from_one_of_their_own_threads(
    own_workers: Callable[[], list[threading.Thread]],
) -> None:
    holder = {"workers": cpu_workers(1)}
    holder["cycle"] = holder
    workers = holder["workers"]
    started = threading.Event()

    def drop_the_last_reference() -> None:
        started.wait(20)
        gc.collect()

    runner = threading.Thread(target=lambda w: w.run([drop_the_last_reference], pytest.fail), args=(workers,))
    del workers, holder
    runner.start()
    started.set()
    runner.join(20)
    del runner
    gc.collect()
    deadline = time.monotonic() + 10
    while own_workers() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert own_workers() == []


def test_backward_on_a_worker_stays_on_that_worker() -> None:
    seen: list[bool] = []
    cpu_workers(1).run([lambda: seen.append(torch.autograd.is_multithreading_enabled())], pytest.fail)
    assert seen == [False]


@pytest.mark.parametrize("ending", ["", "raise SystemExit(0)", "import os; del pipe", "output = pipe(x)"])
@pytest.mark.thorough
def test_a_process_with_idle_workers_ends_at_once(run_python: RunPython, ending: str) -> None:
    script = (
        "import torch\nfrom torch import nn\nfrom pipework import Pipe\n"
        "pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2, balance=[1, 1], devices=['cpu'] * 2)\n"
        "x = torch.ones(4, 2)\npipe(x).sum().backward()\n" + ending
    )
    run_python(["-c", script]).check_returncode()


@pytest.mark.parametrize("inside", [True, False])
def test_a_pipe_that_a_layer_of_its_own_calls_is_refused(inside: bool) -> None:
    class Calls(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(pipe(x, target=x) if inside else pipe(x))

    pipe = Pipe(nn.Sequential(Calls(2, 2), nn.Identity()), 2, balance=[2], loss_fn=nn.functional.mse_loss)
    with pytest.raises(RuntimeError, match="has called that pipe"):
        pipe(torch.ones(4, 2), target=torch.ones(4, 2)) if inside else pipe(torch.ones(4, 2))
