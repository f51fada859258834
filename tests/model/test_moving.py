import pytest
import torch
from torch import Tensor, nn

from pipework import MicroBatches, Pipe
from pipework.model.moving import moved


def test_a_tensor_that_is_there_is_not_copied() -> None:
    x = torch.ones(2)
    assert moved(x, torch.device("cpu")) is x


@pytest.mark.gpu
@pytest.mark.parametrize("given", [False, True])
def test_a_cpu_worker_reads_what_the_accelerator_has_finished(given: bool) -> None:
    gpu = torch.accelerator.current_accelerator()
    busy = torch.ones(1024, 1024, device=gpu)
    pipe = Pipe(nn.Sequential(nn.Identity(), nn.Identity()), 2, balance=[1, 1], devices=["cpu", "cpu"])
    expected = torch.randn(4, 8)
    source, x = expected.to(gpu), torch.full((4, 8), torch.nan, device=gpu)
    torch.accelerator.synchronize()
    with torch.no_grad():
        for _ in range(3):
            x.fill_(torch.nan)
            for _ in range(20):
                torch.mm(busy, busy)
            x.copy_(source)
            output = pipe(MicroBatches(x.split(2)) if given else x)
            tensors: list[Tensor] = list(output) if given else [output]
            assert torch.equal(torch.cat(tensors), expected)
