"""Row 21 of the fault matrix: what goes wrong in a `DataLoader` is the user's own error, and the pipe trains on."""

import copy
import gc
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, _utils

from pipework import Pipe
from pipework.testing import draw_key, reference_backward
from tests.programs import RunPython

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the loader's workers are forked"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _loaders_end_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A loader that an exception holds waits for its processes when it is collected: here, not in another test."""
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)  # seconds, and not five
    yield
    gc.collect()


class Rows(Dataset[Tensor]):
    """Ten rows, of which one may be out of order; worker processes are born while the pipe's threads are there."""

    def __init__(self, mishap: Callable[[], None] = lambda: None, at: int = -1) -> None:
        self.rows = torch.randn(10, 4)
        self.mishap, self.at = mishap, at

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        if index == self.at:
            self.mishap()
        return self.rows[index]


def loader_of(dataset: Any, batch_size: int, workers: int = 0, **options: Any) -> DataLoader[Any]:
    """Its workers are forked, which is no longer what Python 3.14 does by itself."""
    how = "fork" if workers else None
    return DataLoader(dataset, batch_size, num_workers=workers, multiprocessing_context=how, **options)


def broken() -> None:
    raise LookupError("row 7 cannot be read")


def used_pipe() -> Pipe:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 2))
    pipe = Pipe(module, 3, balance=[1, 2], devices=["cpu"] * 2)
    pipe(torch.randn(4, 4)).sum().backward()
    pipe.zero_grad()
    return pipe


def trained(step: Callable[[Tensor], Tensor], loader: Iterable[Tensor]) -> tuple[list[Tensor], Exception | None]:
    """The outputs of an epoch, and what ended it."""
    outputs: list[Tensor] = []
    torch.manual_seed(1)
    try:
        for x in loader:
            outputs.append(step(x).detach())
    except Exception as error:
        return outputs, error
    return outputs, None


def assert_epochs_alike(loader: DataLoader[Tensor]) -> tuple[list[Tensor], Exception | None]:
    """One epoch of the plain module and one of the pipe: the same outputs and gradients, and the same end."""
    pipe = used_pipe()
    plain = copy.deepcopy(nn.Sequential(*pipe))

    def plain_step(x: Tensor) -> Tensor:
        return reference_backward(plain, x, torch.sum, 3, draw_key()).output

    def pipe_step(x: Tensor) -> Tensor:
        output = pipe(x)
        output.sum().backward()
        return output

    expected, plain_error = trained(plain_step, loader)
    outputs, error = trained(pipe_step, loader)
    assert len(outputs) == len(expected)
    assert all(map(torch.equal, outputs, expected))
    for actual, wanted in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert torch.equal(actual.grad, wanted.grad)
    assert type(error) is type(plain_error)
    pipe(torch.randn(5, 4)).sum().backward()
    return outputs, error


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.thorough)])  # these take long to end
def test_a_row_that_cannot_be_read(workers: int) -> None:
    outputs, error = assert_epochs_alike(loader_of(Rows(broken, at=7), 3, workers))
    assert isinstance(error, LookupError)
    assert "row 7 cannot be read" in str(error)
    assert not hasattr(error, "__notes__"), "it did not arise in the pipe"
    assert [len(output) for output in outputs] == [3, 3]


KILLED = """
import os, signal, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader
from pipework import Pipe

class Slow(nn.Module):
    seconds = 0.0

    def forward(self, x):
        time.sleep(self.seconds)
        return x

torch.set_num_threads(1)
torch.manual_seed(0)
slow = Slow()
pipe = Pipe(nn.Sequential(nn.Linear(4, 4), slow, nn.Linear(4, 2)), 3, balance=[2, 1], devices=["cpu"] * 2)
x = torch.randn(6, 4)
pipe(x).sum().backward()
expected = [parameter.grad for parameter in pipe.parameters()]
pipe.zero_grad()
loader = iter(DataLoader(torch.randn(1000, 4), batch_size=3, num_workers=1, multiprocessing_context="fork"))
try:
    for step, batch in enumerate(loader):
        if step == 2:
            os.kill(loader._workers[0].pid, signal.SIGKILL)
            if sys.argv[1] == "elsewhere":
                time.sleep(5)
            slow.seconds = 0.5
        pipe(batch).sum().backward()
except RuntimeError as error:
    print("inside" if slow.seconds else "elsewhere", error)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch would raise in the next instruction, too
slow.seconds = 0.0
pipe.zero_grad()
pipe(x).sum().backward()
assert all(torch.equal(p.grad, gradient) for p, gradient in zip(pipe.parameters(), expected, strict=True))
sys.stdout.flush()
os._exit(0)  # what is left of the loader complains at exit
"""


@pytest.mark.parametrize("place", ["inside", "elsewhere"])
def test_a_worker_process_that_is_killed(run_python: RunPython, place: str) -> None:
    """PyTorch raises its error from a signal handler, wherever the caller is: waiting for the pipe, too."""
    result = run_python(["-c", KILLED, place], timeout=50)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(place)
    assert "is killed by signal: Killed" in result.stdout


@pytest.mark.parametrize("workers", [0, 2])
def test_a_short_last_batch_and_a_short_epoch(workers: int) -> None:
    """Ten rows in batches of four leave two, which make two micro-batches instead of three."""
    outputs, error = assert_epochs_alike(loader_of(Rows(), 4, workers))
    assert error is None
    assert [len(output) for output in outputs] == [4, 4, 2]
    outputs, error = assert_epochs_alike(loader_of(Rows(), 16, workers))
    assert [len(output) for output in outputs] == [10]
    assert trained(used_pipe(), loader_of(Rows(), 16, workers, drop_last=True)) == ([], None)
