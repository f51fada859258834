"""`DistributedDataParallel` around the old `Pipe`: it passes the reference through and finds the tensors behind it."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipework.compat.sync import Pipe

pytestmark = [
    pytest.mark.usefixtures("rpc", "process_group"),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no distributed"),
]


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A world of one: gradients go the way that they go in a larger one."""
    torch.distributed.init_process_group("gloo", init_method=(tmp_path / "group").as_uri(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("option", ["plain", "find_unused_parameters", "static_graph", "gradient_as_bucket_view"])
def test_gradients_in_every_mode(checkpoint: str, option: str) -> None:
    plain = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    pipe = Pipe(copy.deepcopy(plain), 2, checkpoint)
    replica = DistributedDataParallel(pipe, **({} if option == "plain" else {option: True}))
    assert next(iter(replica.state_dict())) == "module.partitions.0.0.weight"
    for _ in range(3):
        x = torch.randn(4, 2, dtype=torch.float64)
        plain.zero_grad()
        replica.zero_grad()
        plain(x).square().mean().backward()
        reference = replica(x)
        assert isinstance(reference, torch.distributed.rpc.RRef)
        reference.local_value().square().mean().backward()
        for one, other in zip(plain.parameters(), pipe.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad)
