from collections.abc import Callable

import pytest
import torch
from torch import nn

from pipework import Pipe, PipeWarning, torch_private
from pipework.model.layers import Layers

CPU = torch.device("cpu")


def layers(*here: int) -> Layers:
    first = nn.Sequential()
    first.add_module("chunks", nn.Linear(2, 2))
    first.add_module("b", nn.ReLU())
    second = nn.Sequential()
    second.add_module("c", nn.Linear(2, 2))
    return Layers([first, second], [CPU, CPU], here or [0, 1])


def test_layers_keep_their_names_even_those_of_attributes() -> None:
    container = layers()
    assert list(container.state_dict()) == ["chunks.weight", "chunks.bias", "c.weight", "c.bias"]
    assert len(container) == 3
    assert container[-1] is container.partitions[1][0]
    assert container.stages == [0, 1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # parts of PyTorch that torch.compile imports
def test_compile_compiles_the_layers() -> None:
    container = layers()
    container.compile(backend="eager")
    assert [*map(torch_private.is_compiled, (container, *container))] == [False, True, True, True]


def test_a_layer_is_replaced_by_its_position() -> None:
    container, layer = layers(), nn.Tanh()
    container[-2] = layer
    assert container.b is container.partitions[0][1] is layer
    with pytest.raises(TypeError, match="by a module only, got int"):
        container[0] = 3
    with pytest.raises(IndexError):
        container[3] = layer


def test_a_partition_that_was_given_another_layer_is_refused() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2, devices=["cpu", "cpu"])
    first = pipe[0]
    pipe.partitions[0][0] = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=r"layers \['0'\] of pipe\.partitions are not those of the pipe"):
        pipe(torch.ones(2, 2))
    pipe.partitions[0][0] = first
    pipe(torch.ones(2, 2))
    del pipe.partitions[1][0]
    with pytest.raises(RuntimeError, match=r"layers \['1'\] of pipe\.partitions are not those of the pipe"):
        pipe(torch.ones(2, 2))


def test_the_state_dict_may_have_layers_of_other_processes() -> None:
    assert layers(0).load_state_dict(layers().state_dict()).missing_keys == []


@pytest.mark.parametrize(
    "move", [lambda each: each.to("cpu"), lambda each: each.cuda(), lambda each: each.to(torch.ones(1))]
)
def test_moves_are_refused_and_dtypes_are_not(move: object) -> None:
    container = layers()
    with pytest.raises(TypeError, match="should manage device placement"):
        move(container)
    assert container.to(torch.float64)[0].weight.dtype == torch.float64


@pytest.mark.parametrize(
    ("add", "what"),
    [
        (lambda pipe: pipe.register_parameter("scale", nn.Parameter(torch.ones(1))), "parameter 'scale' cannot be"),
        (lambda pipe: setattr(pipe, "scale", nn.Parameter(torch.ones(1))), "parameter 'scale' cannot be registered"),
        (lambda pipe: pipe.register_buffer("scale", torch.ones(1)), "buffer 'scale' cannot be registered in a pipe"),
        (lambda pipe: setattr(pipe, "scale", nn.Buffer(torch.ones(1))), "buffer 'scale' cannot be registered"),
        (lambda pipe: pipe.add_module("scale", nn.Linear(2, 2)), "'scale' is not among the layers"),
        (lambda pipe: pipe.register_module("scale", nn.Linear(2, 2)), "'scale' is not among the layers"),
        (lambda pipe: setattr(pipe, "scale", nn.Linear(2, 2)), "'scale' is not among the layers"),
    ],
)
def test_a_pipe_gets_no_parameters_buffers_or_modules_of_its_own(add: Callable[[Pipe], object], what: str) -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), 2, balance=[1, 1], devices=["cpu"] * 2)
    with pytest.raises(AttributeError, match=what):
        add(pipe)
    pipe.scale = torch.ones(1)  # any other attribute is the user's own
    assert list(pipe.state_dict()) == ["0.weight", "0.bias"]
    pipe[0].register_buffer("scale", torch.ones(1))
    assert "0.scale" in pipe.state_dict()


def test_hooks_of_a_partition_are_not_called_and_a_warning_says_so() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), 2, balance=[1, 1], devices=["cpu"] * 2)
    pipe.partitions[1].register_forward_hook(lambda *arguments: pytest.fail("called"))
    message = r"partitions\[1\] has hooks, which are not called, .* partitions\[1\]\[-1\]"
    with pytest.warns(PipeWarning, match=message) as caught:
        pipe(torch.ones(4, 2)).sum().backward()
    assert [each.filename for each in caught] == [__file__]
    pipe(torch.ones(4, 2)).sum().backward()  # it is told once
