"""Groups of NCCL, for which others stand in: when they are connected, and how they and the processes end."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from pipework import Mesh, Pipe, torch_private
from pipework.distributed.transport import groups
from pipework.distributed.transport.groups import group_of
from pipework.values import tensor_form
from tests.jobs import Ended, Job
from tests.nccl_stand_in import NcclStandIn

STEPS = 3


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))


def made(schedule: str, **workers: Any) -> Pipe:
    torch.manual_seed(0)
    pipe = Pipe(layers(), 4, schedule=schedule, loss_fn=functional.mse_loss, **workers)
    vars(torch)["a pipe"] = pipe  # it lives as long as the program
    return pipe


def losses(pipe: Pipe) -> list[float]:
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(STEPS):
        loss = pipe(x, target=x)
        loss.backward()
        found.append(loss.item())
    return found


def says_how_it_ends(mesh: Mesh, with_nccl: bool) -> list[str]:
    """Prints which group is ended, and what becomes of those of the job; returns what was done to NCCL's."""
    done: list[str] = []

    class Group(NcclStandIn):
        def __init__(self, name: str, group: Any) -> None:
            super().__init__(group)
            self.name = name
            done.append(f"connected {name}")

        def _start_coalescing(self) -> None:
            super()._start_coalescing()
            done.append(f"used {self.name}")

        def abort(self) -> None:
            print("ended", self.name.removesuffix(", NCCL"))

    def stand_in(store: Any, name: str, members: Any, rank: int, device: torch.device) -> NcclStandIn:
        return Group(name, group_of(store, name, members, rank))

    def said(what: str, function: Callable[[], None]) -> Callable[[], None]:
        def say() -> None:
            print(what)
            function()

        return say

    dist.destroy_process_group = said("destroyed", dist.destroy_process_group)
    torch_private.abort_process_groups = said("aborted", torch_private.abort_process_groups)
    if with_nccl:
        Mesh.uses_nccl = property(lambda self: True)
        groups.nccl_group = stand_in
        tensor_form.lies_on_accelerator = lambda tensor: tensor.dtype is torch.float32
        torch.accelerator.synchronize = lambda device: None
    return done


def trains(mesh: Mesh) -> tuple[list[str], list[float], list[float]]:
    done = says_how_it_ends(mesh, with_nccl=True)
    pipe = made("1f1b", mesh=mesh)
    found = losses(pipe)
    pipe.zero_grad()
    on_threads = losses(made("1f1b", devices=["cpu"] * 3))
    vars(torch)["a pipe"] = pipe
    return done, found, on_threads


@pytest.mark.thorough
def test_they_are_connected_in_one_order_before_the_first_step(start: Callable[..., Job]) -> None:
    every = start(3, trains).ended()
    assert [each.code for each in every] == [0, 0, 0], every
    for rank, ended in enumerate(every):
        done, found, expected = ended.result
        assert found == expected
        others = [pair for pair in ((0, 1), (0, 2), (1, 2)) if rank in pair]
        names = [name for low, high in others for name in (f"{low} to {high}", f"{high} to {low}")]
        in_rendezvous = [f"{what} {name}, NCCL" for low, high in others for what in ("connected", "used")
                         for name in (f"{low} to {high}", f"{high} to {low}")]  # fmt: skip
        assert done[: len(in_rendezvous)] == in_rendezvous
        low = max(rank - 1, 0)
        assert f"used {low} to {low + 1}, NCCL" in done[len(in_rendezvous) :]
        assert ends(ended) == [*(f"ended {name}" for name in names), "destroyed"]
    assert max(each.seconds for each in every) - min(each.seconds for each in every) < 1


def leaves(mesh: Mesh, with_nccl: bool, how: str) -> None:
    says_how_it_ends(mesh, with_nccl)
    pipe = made("gpipe", mesh=mesh)
    losses(pipe)
    if how == "early":
        time.sleep(0 if mesh.rank else 4)
    elif how == "error" and mesh.rank:
        raise ValueError("bad row")
    elif how == "Ctrl-C" and mesh.rank:
        with contextlib.suppress(OSError):
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
    elif how == "error" or how == "Ctrl-C":
        losses(pipe)
    sys.exit(3 if how == "exit" else 0)


GROUPS = ["ended 0 to 1", "ended 1 to 0"]


def ends(ended: Ended) -> list[str]:
    """A failure may end a group that is then ended once more."""
    lines = dict.fromkeys(ended.output.splitlines())
    return [line for line in lines if line.partition(" ")[0] in ("ended", "destroyed", "aborted")]


@pytest.mark.parametrize(
    ("with_nccl", "how", "codes", "ends_of_all"),
    [
        (False, "exit", [3, 3], [["destroyed"], ["destroyed"]]),
        (True, "exit", [3, 3], [[*GROUPS, "destroyed"], [*GROUPS, "destroyed"]]),
        (False, "early", [0, 0], [["destroyed"], ["destroyed"]]),
        (True, "early", [0, 0], [[*GROUPS, "destroyed"], [*GROUPS, "aborted"]]),  # of what may wait for the other rank
        (True, "error", [71, 70], [GROUPS, GROUPS]),
        (True, "Ctrl-C", [71, -signal.SIGINT], [GROUPS, GROUPS]),
    ],
)
def test_what_a_process_leaves_behind(
    start: Callable[..., Job], with_nccl: bool, how: str, codes: list[int], ends_of_all: list[list[str]]
) -> None:
    every = start(2, leaves, own_store=True, with_nccl=with_nccl, how=how).ended()
    assert [each.code for each in every] == codes, every
    assert [ends(each) for each in every] == ends_of_all
    if how == "early":  # it does not wait for the end of the other rank
        assert every[0].seconds - every[1].seconds > (2 if with_nccl else 3)
    else:
        assert max(each.seconds for each in every) < 30
