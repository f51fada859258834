"""What optimizers keep, from a step on the meta device, against what real ones keep."""

from typing import Any

import pytest
import torch
from torch import nn

from pipework.planning.prediction.optimizer_bytes import optimizer_bytes

CPU = torch.device("cpu")


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16).requires_grad_(False))


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adam, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.Adagrad, {}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_the_state_is_that_of_a_real_step(kind: Any, options: dict[str, Any]) -> None:
    module = layers()
    optimizer = kind([{"params": module[0].parameters(), "lr": 0.5}, {"params": module[1].parameters()}], **options)
    stages = [[*module[0].parameters()], [*module[1].parameters(), *module[2].parameters()]]
    predicted = optimizer_bytes(optimizer, stages, CPU)
    if kind is not torch.optim.Adagrad:  # which makes its state when it is made
        assert not optimizer.state
    module(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    real = [
        sum(
            tensor.nbytes
            for parameter in stage
            for name, tensor in optimizer.state[parameter].items()
            if isinstance(tensor, torch.Tensor) and name != "step"
        )
        for stage in stages
    ]
    assert list(predicted.states) == real
    assert optimizer_bytes(optimizer, stages, CPU) == predicted


def test_a_number_and_none() -> None:
    module = layers()
    stages = [module[0].parameters(), module[2].parameters()]
    assert optimizer_bytes(None, [[*stage] for stage in stages], CPU) == ((0, 0), 0)
    assert optimizer_bytes(1.5, [module[0].parameters(), module[2].parameters()], CPU) == ((1.5 * 4 * 17 * 32, 0), 0)


def test_parameters_that_the_optimizer_has_not_count_nothing() -> None:
    module = layers()
    optimizer = torch.optim.Adam(module[0].parameters())
    assert optimizer_bytes(optimizer, [module[1].parameters()], CPU) == ((0,), 0)


def test_an_optimizer_that_cannot_be_tried_is_refused_with_what_to_do() -> None:
    class Own(torch.optim.SGD):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module.parameters())

    module = layers()
    with pytest.raises(TypeError, match="optimizer=Adafactor"):  # reads numbers of its state
        optimizer_bytes(torch.optim.Adafactor(module.parameters()), [module.parameters()], CPU)
    with pytest.raises(TypeError, match=r"optimizer=Own: it could not be tried .* give a number instead"):
        optimizer_bytes(Own(module), [module.parameters()], CPU)
