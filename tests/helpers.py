"""What tests of several folders need.

Jobs on threads, a pipe that was saved and loaded, moves of a pipe, layers with a skip connection or with views.
"""

import io
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipework import pop, skippable, stash

# Ways to move a module to a device, which a pipe refuses.
MOVES: list[Callable[[Any], object]] = [
    lambda pipe: pipe.cuda(),
    lambda pipe: pipe.cuda(0),
    lambda pipe: pipe.cpu(),
    lambda pipe: pipe.to("cpu"),
    lambda pipe: pipe.to(torch.device("cpu")),
    lambda pipe: pipe.to(device="cpu"),
    lambda pipe: pipe.to("cpu", torch.float64),
    lambda pipe: pipe.to(torch.zeros(1)),
    lambda pipe: pipe.to(tensor=torch.zeros(1)),
]


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return x + skip


class WithAView(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, y[:, 1:]


class Overwrite(nn.Module):
    def forward(self, pair: Any) -> Tensor:
        return torch.cat([pair[0].mul_(2), pair[1] ** 2], dim=1)


def outcomes_in_threads(*jobs: Callable[[], object]) -> list[object]:
    """What each job gives, or its error."""
    outcomes: list[object] = [None] * len(jobs)

    def run(number: int) -> None:
        try:
            outcomes[number] = jobs[number]()
        except BaseException as error:
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), f"a job has not come to its end; what the jobs gave: {outcomes}"
    return outcomes


def in_threads(*jobs: Callable[[], object]) -> None:
    """Runs each job on a new thread to its end, and raises here the first error."""
    for outcome in outcomes_in_threads(*jobs):
        if isinstance(outcome, BaseException):
            raise outcome


def saved_and_loaded(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def assert_same(one: Any, other: Any) -> None:
    """Compares tensors, and what holds tensors, bitwise."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        assert_same(list(one.values()), list(other.values()))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    else:
        assert one == other
