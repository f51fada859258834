"""Steps whose workers launch kernels that run later."""

import pytest
import torch
from torch import Tensor, nn

from pipework import Pipe

pytestmark = pytest.mark.gpu

WIDTH = 64


def accelerators() -> list[torch.device]:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return [torch.device(found.type, index) for index in range(torch.accelerator.device_count())]


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise KeyboardInterrupt("here")


class Fails(nn.Module):
    """Fails in its third call, or in its backward."""

    def __init__(self, where: str, error: type[BaseException]) -> None:
        super().__init__()
        self.where, self.error, self.calls = where, error, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.where == "backward":
            return _Failing.apply(x)
        if self.calls == 3:
            raise self.error("here")
        return x


@pytest.mark.parametrize("placed", ["one device", "two devices", "cpu last", "cpu first"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_after_a_failure_the_caller_may_write_to_inputs_and_parameters(
    error: type[BaseException], where: str, placed: str
) -> None:
    every = accelerators()
    first, cpu = every[0], torch.device("cpu")
    devices = {
        "one device": [first, first],
        "two devices": [first, every[-1]],
        "cpu last": [first, cpu],
        "cpu first": [cpu, first],
    }[placed]
    # The identity hands the caller's memory on, so that copies between devices read it.
    layers = [nn.Identity(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Fails(where, error), nn.Linear(WIDTH, 1)]
    pipe = Pipe(nn.Sequential(*layers), 4, "never", balance=[1, 4], devices=devices)
    given = torch.ones(16, WIDTH, device=devices[0])
    with pytest.raises((RuntimeError, KeyboardInterrupt), match="here"):
        pipe(given).sum().backward()
    given.fill_(2.0)
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.fill_(0.5)
    assert bool((given == 2.0).all())
    assert all(bool((parameter == 0.5).all()) for parameter in pipe.parameters())
    if placed != "cpu first":
        expected = torch.full((WIDTH,), float(given[0].sum()) * 0.5)
        torch.testing.assert_close(pipe[1](given.to(devices[1]))[0].cpu() - 0.5, expected)
