import pytest
import torch
from torch import Tensor, nn

from pipework import MicroBatches, Pipe
from pipework.model.exchange import MetaMemory, move_module, moved

CPU = torch.device("cpu")


def test_tied_tensors_get_memory_once_and_stay_tied() -> None:
    first, second = nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta")
    second.weight = first.weight
    memory = MetaMemory(nn.Sequential(first, second), CPU)
    assert len(memory.tensors) == 3
    assert second.weight is first.weight
    assert first.weight.device == CPU


def test_tensors_with_data_are_left_alone() -> None:
    layer = nn.Linear(2, 2)
    assert MetaMemory(layer, CPU).tensors == []


def test_floats_are_filled_when_no_number_is_missing() -> None:
    layer = nn.Linear(2, 2, bias=False, device="meta")
    memory = MetaMemory(layer, CPU)
    with torch.no_grad():
        layer.weight[0].fill_(1.0)
        assert memory.is_written(layer.weight)
        assert not memory.is_filled(layer.weight)
        layer.weight[1].fill_(1.0)
    assert memory.is_filled(layer.weight)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_of_integers_it_is_known_that_they_were_written(dtype: torch.dtype) -> None:
    layer = nn.Module()
    layer.register_buffer("mask", torch.ones(2, dtype=dtype, device="meta"))
    memory = MetaMemory(layer, CPU)
    assert not memory.is_filled(layer.mask)
    layer.mask.zero_()
    assert memory.is_filled(layer.mask)


def test_an_error_gives_back_what_was_given_before() -> None:
    layer = nn.Linear(2, 2, device="meta")
    layer.bias.register_hook(print)
    with pytest.raises(RuntimeError, match=r"'bias' lies on the meta device .* losing its hooks"):
        MetaMemory(layer, CPU)
    assert layer.weight.is_meta


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


@pytest.mark.gpu
def test_a_module_keeps_its_parameters_gradients_and_what_it_shares() -> None:
    gpu = torch.accelerator.current_accelerator()
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.GRU(2, 2), nn.BatchNorm1d(2))
    module[1].weight = module[0].weight
    module[0].weight.grad = torch.ones(2, 2)
    parameters, values = [*module.parameters()], [parameter.detach().clone() for parameter in module.parameters()]
    for device in (gpu, torch.device("cpu"), gpu):
        move_module(module, device)
        assert all(now is before for now, before in zip(module.parameters(), parameters, strict=True))
        assert {parameter.device.type for parameter in parameters} == {device.type}
        assert module[1].weight is module[0].weight
        assert module[0].weight.grad.device.type == device.type
        assert all(torch.equal(now.cpu(), value) for now, value in zip(parameters, values, strict=True))
    output, _ = module[2](torch.ones(3, 2, 2, device=gpu))
    output.sum().backward()
    assert module[2].weight_hh_l0.grad is not None
