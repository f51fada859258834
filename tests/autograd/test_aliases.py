import contextlib
import threading
from typing import Any

import torch
from torch import nn

from pipework.autograd.aliases import Aliases


def test_aliases_stand_in_the_slots_and_leave_them() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    parameters = list(module.parameters())
    aliases = Aliases(module)
    with aliases.standing_in():
        inside = list(module.parameters())
        assert all(a is not b for a, b in zip(inside, parameters, strict=True))
        assert all(a.data_ptr() == b.data_ptr() for a, b in zip(inside, parameters, strict=True))
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    assert all(a is b for a, b in zip(aliases.parameters, parameters, strict=True))
    with torch.no_grad():
        module[0].weight.fill_(5)  # an optimizer's step is seen through the alias
    assert torch.equal(aliases.leaves[0], torch.full((2, 2), 5.0))
    assert aliases.leaves[0]._version == module[0].weight._version


def test_gradients_gather_in_the_aliases_and_are_taken_once() -> None:
    linear = nn.Linear(2, 2, bias=False)
    aliases = Aliases([linear])
    with aliases.standing_in():
        for _ in range(2):
            linear(torch.ones(1, 2)).sum().backward()
    assert linear.weight.grad is None
    (gradient,) = aliases.take_gradients()
    assert torch.equal(gradient, torch.full((2, 2), 2.0))
    assert aliases.take_gradients() == [None]


def test_frozen_parameters_stay_and_tied_ones_have_one_alias() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    first.bias.requires_grad_(False)
    aliases = Aliases([first, second])
    assert [id(p) for p in aliases.parameters] == [id(second.weight), id(second.bias)]
    with aliases.standing_in():
        assert first.weight is second.weight
        assert isinstance(first.bias, nn.Parameter)


def test_a_parameter_that_a_layer_replaces_is_not_put_back() -> None:
    linear = nn.Linear(2, 2)
    with Aliases([linear]).standing_in():
        linear.weight = new = nn.Parameter(torch.zeros(2, 2))
    assert linear.weight is new


def test_of_two_pipes_that_take_a_layer_at_once_one_is_refused() -> None:
    both, ends, refused = threading.Barrier(2), threading.Barrier(2, timeout=20), []

    class Met(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            found = super().get(name, default)
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.1)  # where they may, both find the parameter
            return found

    linear = nn.Linear(2, 2, bias=False)
    linear.__dict__["_parameters"] = Met(linear._parameters)

    def run() -> None:
        aliases = Aliases([linear])
        try:
            with aliases.standing_in():
                ends.wait()
        except RuntimeError as error:
            refused.append(str(error))
            ends.wait()

    threads = [threading.Thread(target=run, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(refused) == 1
    assert "another pipe is running a layer" in refused[0]
    assert isinstance(linear.weight, nn.Parameter)
