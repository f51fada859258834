"""FSDP2's private names: the installed version has them, and the error says so if it has not got one."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipework import fsdp_private
from tests.test_torch_private import Names, is_private, looked_up

# Those that not every supported version has, and those that are there from the first time that parameters are gathered.
LOOKED_FOR = {"_fsdp_param_group", "_fsdp_param_groups", "reduce_scatter_states", "_unsharded_param"}


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
    states = fsdp_private.FSDPStates(state._modules)
    assert vars(state._comm_ctx).keys() & {"reduce_scatter_state", "reduce_scatter_states"}
    states.unshard()
    (group,) = fsdp_private._groups_of(state)
    for each in group.fsdp_params:
        assert each._unsharded_param.shape == each.sharded_param.shape
    fsdp_private.free_shards(state._modules)


def test_without_one_the_error_says_so(state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (group,) = fsdp_private._groups_of(state)
    monkeypatch.delattr(type(group), "wait_for_unshard")
    said = f"PyTorch {torch.__version__} has no FSDPParamGroup.wait_for_unshard, which pipework uses: install a version"
    with pytest.raises(ImportError, match=re.escape(said)):
        fsdp_private.FSDPStates(state._modules)


def test_all_are_looked_up() -> None:
    tree = ast.parse(Path(fsdp_private.__file__).read_text())
    names = Names.of(tree)
    used = {name for _, name in names.attributes if is_private(name)} | names.texts
    own = {
        "_states", "_groups", "_changed", "_private", "_set",
        "_has_several", "__slots__", "_change",
    }  # fmt: skip
    known = {part for paths in looked_up(tree).values() for path in paths for part in path.split(".")}
    assert used - own - known - LOOKED_FOR == set()
