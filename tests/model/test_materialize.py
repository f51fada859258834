"""Layers that are built on the meta device: what they are filled with, and what is said of those that cannot be."""

import copy
import math
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import Pipe
from pipework.model.materialize import MetaMemory, materialize_partitions, move_module, on_meta
from pipework.runtime.random.streams import draw_key

CPU = torch.device("cpu")


def on_meta_device(make: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return make()


class Scaled(nn.Module):
    """Owns a parameter that nothing fills."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


class Masked(nn.Module):
    """Owns a buffer that is no part of the state dict, and fills it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.mask.copy_(torch.arange(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


class Both(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Scaled(), Masked())


class Narrow(nn.Module):
    """Fills its child's weight in its own way, as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.linear.weight, 0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def layers() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 8, bias=False),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.5))),
        nn.PReLU(),
        nn.Linear(8, 4),
    )


def materialize(*named: nn.Module, first: int = 0, key: int = 1) -> dict[str, str]:
    """Initialises layers on the CPU; returns those that cannot be, and what they lack."""
    return materialize_partitions([nn.Sequential(*named)], [CPU], [first], key)


def same(left: nn.Module, right: nn.Module) -> bool:
    one, two = left.state_dict(), right.state_dict()
    return list(one) == list(two) and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("balance", [[1] * 6, [2, 4], [6]])
def test_values_depend_on_the_seed_and_not_on_the_partitions(balance: list[int]) -> None:
    pipes = []
    for seed, cut in ((1, balance), (1, [3, 3]), (2, balance)):
        torch.manual_seed(seed)
        module = on_meta_device(layers)
        pipes.append(Pipe(module, 2, balance=cut, devices=["cpu"] * len(cut)))
    assert same(pipes[0], pipes[1])
    assert not same(pipes[0], pipes[2])


def test_the_callers_generator_gives_one_key_if_there_is_anything_to_fill() -> None:
    torch.manual_seed(3)
    Pipe(layers(), balance=[6])
    torch.manual_seed(3)
    Pipe(on_meta_device(layers), balance=[6])
    drawn = torch.get_rng_state()
    torch.manual_seed(3)
    draw_key()
    assert torch.equal(drawn, torch.get_rng_state())
    Pipe(layers(), balance=[6])
    state = torch.get_rng_state()
    made = layers()
    torch.set_rng_state(state)
    assert same(layers(), made), "layers with values draw nothing"


@pytest.mark.parametrize("context", [lambda: torch.device("meta"), torch.inference_mode, torch.no_grad])
def test_the_callers_context_does_not_interfere(context: Callable[[], Any]) -> None:
    with context():
        pipe = Pipe(on_meta_device(layers), balance=[3, 3], devices=["cpu"] * 2)
    assert {tensor.device for tensor in pipe.state_dict().values()} == {CPU}
    pipe(torch.randn(4, 4)).sum().backward()
    assert pipe[0].weight.grad is not None


def statistics(tensor: Tensor) -> tuple[float, float]:
    values = tensor.detach().double().flatten()
    return float(values.mean()), float(values.std()) if values.numel() > 1 else 0.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(64, 48),
        lambda: nn.Embedding(64, 32, padding_idx=3),
        lambda: nn.Conv2d(16, 32, 3, bias=False),
        lambda: nn.BatchNorm2d(16),
        lambda: nn.InstanceNorm1d(16, affine=True, track_running_stats=True),
        lambda: nn.PReLU(8),
        lambda: nn.LSTM(32, 32, 2, bidirectional=True, proj_size=16),
        lambda: nn.MultiheadAttention(32, 4, add_bias_kv=True),
        lambda: nn.Transformer(32, 4, 1, 1, 64, batch_first=True),
        lambda: nn.AdaptiveLogSoftmaxWithLoss(32, 64, [16]),
        lambda: nn.Sequential(nn.Linear(32, 32), nn.ModuleList([nn.Linear(32, 32)])),
        Narrow,
        Masked,
    ],
    ids=lambda make: type(make()).__name__,
)
def test_modules_are_filled_as_their_constructors_do(make: Callable[[], nn.Module]) -> None:
    built, filled = make(), on_meta_device(make)
    assert materialize(filled) == {}
    expected = {**dict(built.named_parameters()), **dict(built.named_buffers())}
    actual = {**dict(filled.named_parameters()), **dict(filled.named_buffers())}
    assert list(actual) == list(expected)
    for name, tensor in actual.items():
        (mean, std), (wanted_mean, wanted_std) = statistics(tensor), statistics(expected[name])
        assert (tensor.device, tensor.dtype, tensor.stride()) == (CPU, expected[name].dtype, expected[name].stride())
        assert tensor.requires_grad == expected[name].requires_grad
        if not wanted_std or not tensor.is_floating_point():
            assert torch.equal(tensor, expected[name]), name
        else:
            few = 6 / math.sqrt(tensor.numel())  # that many standard errors
            assert abs(mean - wanted_mean) <= few * wanted_std, name
            assert abs(std - wanted_std) <= few * wanted_std, name


def test_what_refers_to_parameters_and_what_users_note_on_them_stays() -> None:
    lstm = on_meta_device(lambda: nn.LSTM(4, 4))
    lstm.weight_hh_l0.no_decay = True
    lstm.bias_hh_l0.requires_grad_(False)
    pipe = Pipe(nn.Sequential(lstm), balance=[1])
    assert lstm._flat_weight_refs[0]() is lstm.weight_ih_l0
    pipe(torch.randn(3, 2, 4))[0].sum().backward()
    assert lstm.weight_ih_l0.grad is not None
    assert (lstm.weight_hh_l0.no_decay, lstm.bias_hh_l0.requires_grad) == (True, False)


def test_a_module_that_is_two_layers_is_filled_once_with_the_values_of_the_first() -> None:
    shared, alone = on_meta_device(lambda: (nn.Linear(3, 3), nn.Linear(3, 3)))
    materialize(shared, nn.ReLU(), shared)
    materialize(alone)
    assert same(shared, alone)


@pytest.mark.parametrize("inside", [False, True])
def test_tied_parameters_stay_tied_with_the_values_of_the_first(inside: bool) -> None:
    def tied() -> nn.Sequential:
        embedding, head = nn.Embedding(64, 32), nn.Linear(32, 64)
        head.weight = embedding.weight
        return nn.Sequential(nn.Sequential(embedding, head)) if inside else nn.Sequential(embedding, nn.ReLU(), head)

    module = on_meta_device(tied)
    Pipe(module, balance=[1] if inside else [2, 1], devices=["cpu"] * (1 if inside else 2))
    embedding, head = (module[0][0], module[0][1]) if inside else (module[0], module[2])
    assert embedding.weight is head.weight
    assert 0.9 < float(embedding.weight.detach().std()) < 1.1  # that of a linear layer would be 0.1
    assert float(head.bias.detach().abs().max()) < 0.2


def test_what_has_values_keeps_them() -> None:
    module = on_meta_device(
        lambda: nn.Sequential(nn.Embedding(8, 4), nn.Sequential(Narrow(), nn.Linear(4, 8)), Narrow())
    )
    module[0] = nn.Embedding(8, 4)
    module[1][1].weight = module[0].weight
    module[2].linear.weight = nn.Parameter(torch.full((4, 4), 3.0))
    expected = module[0].weight.clone()
    Pipe(module, balance=[1, 2], devices=["cpu"] * 2)
    assert module[1][1].weight is module[0].weight
    assert torch.equal(module[0].weight, expected)
    assert module[1][0].linear.weight.eq(0.25).all()
    assert module[2].linear.weight.eq(3).all()


class ByHand(nn.Module):
    """Says what its reset does; owns a parameter, and a buffer of each kind of numbers."""

    def __init__(self, reset: Callable[[Any], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int32))
        self.register_buffer("flags", torch.zeros(2, dtype=torch.bool), persistent=False)
        self.reset_parameters = lambda: reset(self)


def fill(module: ByHand) -> None:
    module.weight.data.uniform_()  # past autograd
    module.count.zero_()
    module.flags.data.fill_(False)


def replace(module: ByHand) -> None:
    module.weight = nn.Parameter(torch.ones(4))
    module.count = torch.arange(2, dtype=torch.int32)
    module.register_buffer("flags", torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize("reset", [fill, replace])
def test_ways_to_fill(reset: Callable[[Any], object]) -> None:
    layer = on_meta_device(lambda: ByHand(reset))
    weight = layer.weight
    assert materialize(layer) == {}
    assert layer.weight is weight
    assert not weight.isnan().any()
    expected = ([0, 0], [False] * 2) if reset is fill else ([0, 1], [True] * 3)
    assert (layer.count.tolist(), layer.flags.tolist()) == expected


class Attribute(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.table = torch.arange(2)


@pytest.mark.parametrize(
    ("make", "left"),
    [
        (Scaled, ["scale: parameter of Scaled"]),
        (
            lambda: nn.Sequential(ByHand(lambda self: (self.weight[:3].zero_(), self.flags.zero_()))),
            ["0.weight: parameter of ByHand", "0.count: buffer of ByHand"],
        ),
        (Attribute, ["table: attribute of Attribute"]),
        (lambda: nn.ParameterList([torch.ones(2)]), ["0: parameter of ParameterList"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_layers_that_cannot_be_filled_stay_and_say_what_is_left(make: Callable[[], nn.Module], left: list[str]) -> None:
    layer = on_meta_device(make)
    tensors = [*layer.parameters(), *layer.buffers()]
    good = on_meta_device(lambda: nn.Linear(2, 2))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    assert materialize(layer, good) == {"0": "\n".join(left)}
    assert all(a is b for a, b in zip(tensors, [*layer.parameters(), *layer.buffers()], strict=True))
    assert all(tensor.is_meta for tensor in tensors)
    assert not on_meta(good)
    assert torch.equal(state, torch.get_rng_state())


def test_a_parent_may_fill_what_its_children_do_not() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList([torch.ones(2), torch.ones(3)])

        def _reset_parameters(self) -> None:
            for scale in self.scales:
                nn.init.ones_(scale)

    layer = on_meta_device(Parent)
    assert materialize(layer) == {}
    assert [scale.tolist() for scale in layer.scales] == [[1, 1], [1, 1, 1]]


def test_a_reset_that_fails_leaves_the_layer_as_it_was() -> None:
    def fail(module: ByHand) -> None:
        module.weight.zero_()
        raise ZeroDivisionError("by itself")

    module = nn.Sequential(on_meta_device(lambda: ByHand(fail)))
    with pytest.raises(ZeroDivisionError) as caught:
        Pipe(module, balance=[1])
    assert caught.value.__notes__ == ["while layer '0', which was built on the meta device, was initialised"]
    assert module[0].weight.is_meta


def test_what_holds_on_to_a_parameter_must_come_later() -> None:
    layer = on_meta_device(lambda: nn.Linear(2, 2))
    reference = weakref.ref(layer.bias)
    with pytest.raises(RuntimeError, match=r"'bias' lies on the meta device .* holds on to it .* after the pipe"):
        Pipe(nn.Sequential(layer), balance=[1])
    assert reference() is layer.bias
    assert layer.weight.is_meta
    for register in (layer.weight.register_hook, layer.weight.register_post_accumulate_grad_hook):
        handle = register(lambda *_: None)
        with pytest.raises(RuntimeError, match=r"'weight' lies .* without losing its hooks: register them after"):
            MetaMemory(layer, CPU)
        handle.remove()


# ---- A pipe with layers that have no data ----------------------------------------------------------------------------


def half_filled() -> Pipe:
    return Pipe(on_meta_device(lambda: nn.Sequential(nn.Linear(4, 4), Both())), 2, balance=[1, 1], devices=["cpu"] * 2)


def test_a_pipe_without_data_says_so_before_any_work() -> None:
    pipe = half_filled()
    pipe[0].register_forward_hook(lambda *_: pytest.fail("the first layer has run"))
    message = (
        "layers that were built on the meta device have no data and could not be initialised.\n"
        "layer '1':\n"
        "    0.scale: parameter of Scaled\n"
        "Give each of these classes a reset_parameters() that fills all that it owns"
    )
    for run in (pipe, pipe.predict, copy.deepcopy(pipe), pickle.loads(pickle.dumps(half_filled()))):
        with pytest.raises(RuntimeError, match=f"^{re.escape(message)}"):
            run(torch.ones(4, 4))
    assert "partition" in repr(pipe)


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_fills_them_and_what_it_does_not_have_is_initialised(assign: bool) -> None:
    expected = nn.Sequential(nn.Linear(4, 4), Both())
    pipe = half_filled()
    parameters = list(pipe.parameters())
    assert str(pipe.load_state_dict(expected.state_dict(), assign=assign)) == "<All keys matched successfully>"
    x = torch.randn(4, 4)
    torch.testing.assert_close(pipe(x), expected(x))
    if not assign:
        assert all(a is b for a, b in zip(parameters, pipe.parameters(), strict=True))
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        pipe(x).sum().backward()
        optimizer.step()
        assert not torch.equal(pipe[1][0].scale, expected[1][0].scale)


def test_a_state_dict_may_leave_out_what_is_initialised_and_fills_nothing_if_it_does_not_fit() -> None:
    pipe = half_filled()
    state = {**nn.Sequential(nn.Linear(4, 4), Both()).state_dict(), "1.0.linear.weight": torch.ones(5, 5)}
    with pytest.raises(RuntimeError, match="size mismatch"):
        pipe.load_state_dict(state)
    assert all(tensor.is_meta for tensor in pipe[1].parameters())
    pipe.load_state_dict({"1.0.linear.bias": torch.ones(4)}, strict=False)
    assert (pipe[1][0].linear.bias.is_meta, pipe[1][0].linear.weight.is_meta) == (False, True)
    with pytest.raises(RuntimeError, match=r"0.scale: parameter of Scaled"):
        pipe(torch.ones(4, 4))
    pipe.load_state_dict({"1.0.scale": torch.full((4,), 2.0)}, strict=False)
    assert pipe[1][0].scale.tolist() == [2.0] * 4
    assert pipe(torch.ones(4, 4)).isfinite().all()


def test_a_layer_may_be_replaced_by_one_on_meta() -> None:
    pipe = Pipe(layers(), 2, balance=[3, 3], devices=["cpu"] * 2)
    pipe(torch.ones(4, 4))
    setattr(pipe, "5", on_meta_device(lambda: nn.Linear(8, 3)))
    assert pipe(torch.ones(4, 4)).shape == (4, 3)
    setattr(pipe, "5", on_meta_device(Both))
    with pytest.raises(RuntimeError, match="layer '5':"):
        pipe(torch.ones(4, 4))


@pytest.mark.gpu
def test_values_do_not_depend_on_the_device() -> None:
    pipes = []
    for devices in (["cpu", "cpu"], [0, "cpu"]):
        torch.manual_seed(1)
        pipes.append(Pipe(on_meta_device(layers), balance=[3, 3], devices=devices))
    assert pipes[1][0].weight.device.type != "cpu"
    assert same(pipes[0], nn.Sequential(*pipes[1]).cpu())


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
