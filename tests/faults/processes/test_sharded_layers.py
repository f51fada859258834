"""A rank fails while others wait for it inside of their layers' own collectives: it is named, and they are not."""

import dataclasses
import signal
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from pipework import Mesh
from tests.faults.processes.training import BOUND, DETECT, PATIENCE, Failing, assert_clean_exit, model, train_layers

RANKS = 4


def tensor_parallel(mesh: Mesh, folder: str, **options: Any) -> dict[str, Any]:
    """Ranks 0 and 1 compute the first stage together, 2 and 3 the second."""
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    layers = model()
    for layer in layers:
        if isinstance(layer, nn.Linear):
            parallelize_module(layer, device_mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    return train_layers(dataclasses.replace(mesh, device_mesh=device_mesh), folder, layers, **options)


def fully_sharded(mesh: Mesh, folder: str, whole_stages: int | None = None, **options: Any) -> dict[str, Any]:
    """Ranks 0 and 1 share the weights of the first stage, 2 and 3 those of the second."""
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    layers = model()
    for layer in layers:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=device_mesh["dp"])
    mesh = dataclasses.replace(mesh, device_mesh=device_mesh, whole_stages=whole_stages)
    return train_layers(mesh, folder, layers, **options)


BODIES = {"tp": tensor_parallel, "fsdp": fully_sharded}


def others_of(failing: Failing, fault: str, kind: str, **options: Any) -> Any:
    """What the ranks raised that did not fail; all of them name the one that did."""
    failed = int(fault[5])
    outcome = failing(RANKS, fault, body=BODIES[kind], **options)
    assert outcome.raised.keys() | {failed} == set(range(RANKS)), [each.errors for each in outcome.ended]
    for rank, error in outcome.raised.items():
        if rank != failed:
            assert error.type == "PipelineError", (rank, error)
            assert error.rank == failed, (rank, error.text)
            place = "tp" if kind == "tp" else "replica"
            assert f"rank {failed} (stage {failed // 2}, {place} {failed % 2})" in error.text
            assert_clean_exit(outcome.ended[rank])
    return outcome


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("rank=1,step=2,action=F,micro_batch=2,kind=kill", "tp"),
        ("rank=2,step=1,action=B,micro_batch=0,kind=kill", "tp"),
        ("rank=3,step=1,action=F,micro_batch=1,kind=kill", "fsdp"),
        ("rank=0,step=1,action=REDUCE_GRAD,kind=kill", "fsdp"),
    ],
)
def test_death(failing: Failing, fault: str, kind: str) -> None:
    outcome = others_of(failing, fault, kind)
    failed = int(fault[5])
    assert outcome.ended[failed].code == -signal.SIGKILL
    assert {error.kind for error in outcome.raised.values()} == {"lost"}
    assert {outcome.ended[rank].code for rank in range(RANKS) if rank != failed} == {72}
    assert outcome.seconds <= BOUND * PATIENCE


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("rank=1,step=1,action=F,micro_batch=2,kind=raise", "tp"), ("rank=2,step=1,action=UNSHARD,kind=raise", "fsdp")],
)
def test_exceptions(failing: Failing, fault: str, kind: str) -> None:
    outcome = others_of(failing, fault, kind, **({"whole_stages": 1} if kind == "fsdp" else {}))
    failed = int(fault[5])
    assert outcome.raised[failed].type == "InjectedFault"
    assert {error.kind for rank, error in outcome.raised.items() if rank != failed} == {"error"}
    assert outcome.seconds <= BOUND * PATIENCE


@pytest.mark.parametrize("kind", ["tp", "fsdp"])
def test_a_silent_rank(failing: Failing, kind: str) -> None:
    outcome = others_of(
        failing, "rank=1,step=1,action=F,micro_batch=1,kind=stop", kind, but=[1], init={"detect": DETECT}
    )
    assert {error.kind for error in outcome.raised.values()} == {"lost"}
    assert outcome.seconds <= (DETECT + 1) * PATIENCE


def test_a_stuck_rank_and_one_that_waits_for_it(failing: Failing) -> None:
    outcome = failing(
        RANKS,
        "rank=1,step=1,action=F,micro_batch=1,kind=hang",
        body=tensor_parallel,
        init={"detect": DETECT, "action_timeout": DETECT},
    )
    for rank in (0, 2, 3):
        error = outcome.raised[rank]
        assert (error.rank, error.kind) == (1, "stuck"), error.text
        assert_clean_exit(outcome.ended[rank])
    assert outcome.ended[1].code == 70, outcome.ended[1].errors
