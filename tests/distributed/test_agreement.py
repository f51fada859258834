"""All ranks compare what they were started with: schedule, layers, settings."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore
from torch.distributed.device_mesh import init_device_mesh

from pipework import Mesh, Pipe, PipelineError
from pipework.assignment.assignment import assign
from pipework.distributed.agreement import agree, contract
from pipework.distributed.transport.groups import group_of
from pipework.schedule import ScheduleSpec, fill_drain, one_forward_one_backward
from tests.jobs import runs_on

SAME = {"schedule": "1f1b", "chunks": 8, "layers": ["Linear(4, 8)", "ReLU"], "versions": {"torch": "2.13"}}
HUGE = {f"layer.{n}.weight": "torch.float32 (1024, 1024)" for n in range(20_000)}


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"chunks": 4}, "chunks: 8 on rank 1, 5; 4 on rank 3"),
        ({"layers": ["Linear(4, 8)", "GELU"]}, 'layers, first difference at 1: "ReLU" on rank 1, 5; "GELU" on rank 3'),
        ({"layers": ["Linear(4, 8)"]}, 'layers, first difference at 1: "ReLU" on rank 1, 5; nothing on rank 3'),
        ({"versions": {"torch": 2}}, 'versions, first difference at torch: "2.13" on rank 1, 5; 2 on rank 3'),
        ({"more": None}, "more: nothing on rank 1, 5; null on rank 3"),
        ({"layers": []}, 'layers, first difference at 0: "Linear(4, 8)" on rank 1, 5; nothing on rank 3'),
        ({"more": HUGE}, 'more, first difference at layer.0.weight: nothing on rank 1, 5; "torch.float32 (1024, 1024)'),
        ({}, None),
    ],
)
def test_differences_are_shown_on_every_rank(changed: dict[str, Any], line: str | None) -> None:
    store, ranks = HashStore(), [1, 3, 5]

    def one(rank: int) -> str | None:
        try:
            agree(group_of(store, "all", ranks, rank), ranks, {**SAME, **changed} if rank == 3 else SAME)
        except ValueError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(ranks)) as threads:
        first, *others = threads.map(one, ranks)
    assert others == [first, first]
    if line is None:
        assert first is None
    else:
        assert str(first).startswith(
            f"the ranks were started with different settings, and must have the same:\n  {line}"
        )


@pytest.mark.thorough
@runs_on(2, fresh=True)  # ranks that have made other numbers of pipes do not meet again
def test_who_does_not_come_is_named(mesh: Mesh) -> None:
    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    if mesh.rank == 0:
        with pytest.raises(TimeoutError, match="rank 1 did not come within 1 s, and the others of the 2 ranks of this"):
            Pipe(model(), 1, mesh=Mesh.of(device_mesh, timeout=1))
    dist.barrier()
    if mesh.rank == 1:  # it would wait without end for a rank that was there, and has given up
        with pytest.raises(PipelineError, match=r"rank 0 .* failed in making the pipe: TimeoutError: rank 1 did not"):
            Pipe(model(), 1, mesh=Mesh.of(device_mesh))
    dist.barrier()
    Pipe(model(), 1, mesh=Mesh.of(device_mesh))
    dist.barrier()


# ---- what is compared ----------------------------------------------------------------------------------------------


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.BatchNorm1d(2))


def agreed(change: Callable[[nn.Sequential], object], **settings: Any) -> dict[str, Any]:
    module = model()
    change(module)
    return contract(module, assign(module, "gpipe", 1, [2, 2], ["cpu", "cpu"]), **settings)


def tie(module: nn.Sequential) -> None:
    module[2].weight = module[0].weight


def put(name: str, layer: nn.Module) -> Callable[[nn.Sequential], object]:
    return lambda module: setattr(module, name, layer)


@pytest.mark.parametrize(
    ("change", "key", "name", "form"),
    [
        (tie, "parameters", "2.weight", "torch.float32 (2, 2), tied to 0.weight"),
        (lambda module: module[2].half(), "parameters", "2.bias", "torch.float16 (2,)"),
        (put("2", nn.Linear(2, 3)), "parameters", "2.bias", "torch.float32 (3,)"),
        (put("2", nn.Linear(2, 2, bias=False)), "parameters", "2.bias", None),
        (lambda module: module[3].register_buffer("more", torch.ones(1)), "parameters", "3.more", "torch.float32 (1,)"),
    ],
)
def test_what_makes_a_difference(change: Any, key: str, name: str, form: str | None) -> None:
    assert agreed(change) != agreed(lambda module: None)
    assert agreed(change)[key].get(name) == form


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module[0].requires_grad_(False),  # it may be in another process, or thawed after a step
        lambda module: nn.init.zeros_(module[0].weight),
        lambda module: module.eval(),
    ],
)
def test_what_makes_none(change: Any) -> None:
    assert agreed(change) == agreed(lambda module: None)


def test_a_spec_of_ones_own_is_compared_by_its_orders() -> None:
    def of(schedule: Any) -> str:
        module = model()
        return contract(module, assign(module, schedule, 3, [2, 2], ["cpu", "cpu"]), chunks=3)["schedule"]

    assert of(ScheduleSpec(fill_drain)) == of(fill_drain(2, 3))
    assert of(ScheduleSpec(one_forward_one_backward)) == of(one_forward_one_backward(2, 3))
    assert of(ScheduleSpec(fill_drain)) != of(ScheduleSpec(one_forward_one_backward))
