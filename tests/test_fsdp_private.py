"""FSDP2's private names: each exists in the installed version, and the file that uses them uses no others."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipework import fsdp_private
from tests.test_torch_private import Names, is_private

OF_STATES = {
    "_is_root", "_lazy_init", "_root_post_backward_final_callback", "_state_ctx",
    "_comm_ctx", "_modules", "_states_to_backward_prefetch", "_states_to_forward_prefetch",
}  # fmt: skip
OF_GROUPS = {
    "_all_gather_result", "_all_reduce_hook", "_post_forward_indices", "_reduce_scatter_comm",
    "_training_state", "all_reduce_grads",
    "force_sum_reduction_for_comms", "fsdp_params", "mesh_info", "post_backward", "post_forward_mesh_info",
    "reduce_grads", "reshard", "reshard_after_backward", "unshard", "wait_for_unshard",
}  # fmt: skip
OF_PARAMETERS = {
    "_sharded_param_data", "offload_to_cpu", "reduce_dtype", "sharded_param",
}  # fmt: skip
OF_SOME_VERSIONS = {"_fsdp_param_group", "_fsdp_param_groups", "reduce_scatter_state", "reduce_scatter_states"}


@pytest.fixture
def state() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        layer = nn.Linear(4, 4)
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
        yield fully_shard.state(layer)  # type: ignore[attr-defined]
    finally:
        dist.destroy_process_group()


def test_they_exist(state: Any) -> None:
    state._lazy_init()
    (group,) = fsdp_private._groups_of(state)
    assert {name for name in OF_STATES if not hasattr(state, name)} == set()
    assert {name for name in OF_GROUPS if not hasattr(group, name)} == set()
    assert hasattr(state._state_ctx, "is_last_backward")
    assert hasattr(state._state_ctx, "iter_forward_root")
    assert {"post_forward_order"} <= vars(state._comm_ctx).keys()
    assert vars(state._comm_ctx).keys() & {"reduce_scatter_state", "reduce_scatter_states"}
    assert hasattr(group.mesh_info, "replicate_mesh_dim")
    assert hasattr(group._reduce_scatter_comm, "allocate")
    assert hasattr(type(group._training_state), "IDLE")
    group.unshard(async_op=True)
    group.wait_for_unshard()
    for each in group.fsdp_params:
        assert {name for name in OF_PARAMETERS if not hasattr(each, name)} == set()
        assert each._unsharded_param.shape == each.sharded_param.shape


def test_there_are_no_others() -> None:
    names = Names.of(ast.parse(Path(fsdp_private.__file__).read_text()))
    used = {name for _, name in names.attributes if is_private(name)} | names.texts
    own = {
        "_states", "_groups", "_changed", "_private", "_set", "_works", "_of_group", "_now",
        "_has_several", "__slots__",
    }  # fmt: skip
    listed = OF_STATES | OF_GROUPS | OF_PARAMETERS | OF_SOME_VERSIONS | {"_unsharded_param", "_local_tensor"}
    assert used - own - listed == set()
