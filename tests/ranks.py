"""The same test bodies in several rank processes at once, each a worker of every pipe: what is different there.

All ranks run the same tests in the same order and draw the same random numbers. Each has the whole un-pipelined model,
and compares the layers that its part of the pipe holds. tests/distributed/together/test_same_bodies.py starts them.
"""

import functools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import pipework
from pipework import Mesh, Pipe


@functools.cache
def own_mesh() -> Mesh | None:
    """The ranks that run this test; None if it is run by one process, whose pipes have threads."""
    return pipework.init()


def recut(balance: Sequence[int], partitions: int) -> list[int]:
    """The balance with another number of partitions: the smallest neighbours are joined, the largest one is halved."""
    cut = list(balance)
    while len(cut) > partitions:
        at = min(range(len(cut) - 1), key=lambda n: cut[n] + cut[n + 1])
        cut[at : at + 2] = [cut[at] + cut[at + 1]]
    while len(cut) < partitions:
        at = max(range(len(cut)), key=cut.__getitem__)
        if cut[at] < 2:
            pytest.skip(f"{sum(cut)} layers are too few for {partitions} stages")
        cut[at : at + 1] = [cut[at] // 2, cut[at] - cut[at] // 2]
    return cut


def held(plain: nn.Module, pipe: Pipe) -> nn.Sequential:
    """The layers of the un-pipelined model that the pipe holds in this process; all, if its workers are threads."""
    return nn.Sequential(OrderedDict((name, plain.get_submodule(name)) for name in pipe._modules))


def layers_of_stages(pipe: Pipe) -> list[tuple[int, nn.Module]]:
    """The layers in this process, each with the number of its stage."""
    return [(stage, layer) for stage, partition in pipe._partitions.items() for layer in partition]


def workers_of(count: int) -> dict[str, Any]:
    """The arguments of a pipe for its workers; threads are on the default device, or without an index on all alike."""
    mesh = own_mesh()
    if mesh is None:
        default = torch.get_default_device()
        if default.type == "cpu" or default.index is not None:
            return {"devices": [default] * count}
        return {"devices": [torch.device(default.type, n % torch.accelerator.device_count()) for n in range(count)]}
    if len(mesh.ranks) != count:
        pytest.skip(f"{count} workers are not as many as there are ranks, {len(mesh.ranks)}")
    return {"mesh": mesh}


class RankPipe(Pipe):
    """A pipe whose outputs every rank gets, as test bodies take for granted."""

    made = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        RankPipe.made += 1

    def forward(self, *inputs: Any, target: Any = None, return_output: bool = False, **keywords: Any) -> Any:
        """Where there is a loss only, nothing else is sent."""
        wanted = "all" if target is None or return_output else "last"
        return super().forward(*inputs, target=target, return_output=return_output, outputs=wanted, **keywords)
