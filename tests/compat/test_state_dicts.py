"""Checkpoints go from the original libraries to pipework and back, whatever the balance and the names."""

import copy
import io
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipework import Pipe
from pipework.compat import convert_state_dict


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "plain": lambda: nn.Sequential(linear(), nn.ReLU(), linear(), nn.BatchNorm1d(4), linear()),
    "nested": lambda: nn.Sequential(
        nn.Sequential(linear(), nn.Tanh()),
        nn.Tanh(),
        nn.Sequential(nn.Sequential(linear(), nn.ReLU()), linear()),
        linear(),
    ),
    "named": lambda: nn.Sequential(
        OrderedDict(
            stem=linear(), act=nn.ReLU(), body=nn.Sequential(linear(), linear()), chunks=linear(), head=linear()
        )
    ),
    "many layers": lambda: nn.Sequential(*itertools.chain(*((linear(), nn.Tanh()) for _ in range(13)))),
}
BALANCES = {"plain": [2, 3], "nested": [1, 2, 1], "named": [2, 1, 2], "many layers": [1] * 13 + [13]}
OTHERS = {"plain": [1, 1, 3], "nested": [4], "named": [4, 1], "many layers": [12, 14]}


def model(name: str, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return MODELS[name]()


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 24).view(6, 4)


def saved(library: Any, name: str, deferred: bool = False) -> tuple[bytes, Tensor]:
    """What `torch.save` writes of a pipe that was trained for a step, and what the pipe evaluates to."""
    pipe = library.pipe(model(name, 1), BALANCES[name], 3, deferred_batch_norm=deferred)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    pipe(inputs()).square().sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(pipe.state_dict(), file)
    return file.getvalue(), evaluated(pipe)


def evaluated(module: nn.Module) -> Tensor:
    with torch.no_grad():
        return module.eval()(inputs())


def loaded(data: bytes) -> dict[str, Any]:
    return torch.load(io.BytesIO(data), weights_only=True)


def taken_back(library: Any, name: str, data: bytes, deferred: bool) -> Tensor:
    """What a pipe of the library evaluates to that has loaded a converted state dict."""
    pipe = library.pipe(model(name, 2), OTHERS[name], 3, deferred_batch_norm=deferred)
    pipe.load_state_dict(convert_state_dict(loaded(data), pipe))
    return evaluated(pipe)


def native(name: str, seed: int = 3, **options: Any) -> Pipe:
    return Pipe(model(name, seed), 3, balance=OTHERS[name], devices=["cpu"] * len(OTHERS[name]), **options)


def from_sync(state_dict: dict[str, Tensor], layers: Sequence[nn.Module], balance: Sequence[int]) -> dict[str, Tensor]:
    """The state dict of a model as `torch.distributed.pipeline.sync` names it: nested sequences are flat."""
    names = iter(state_dict)
    renamed = {}
    for partition, (end, count) in enumerate(zip(itertools.accumulate(balance), balance, strict=True)):
        for index, layer in enumerate(layers[end - count : end]):
            for entry in layer.state_dict():
                renamed[f"partitions.{partition}.{index}.{entry}"] = state_dict[next(names)]
    return renamed


def flat(module: nn.Module) -> list[nn.Module]:
    """One level of nested sequences is opened, as sync does."""
    return [layer for child in module.children() for layer in (child if type(child) is nn.Sequential else (child,))]


def same(module: nn.Module, expected: dict[str, Tensor]) -> None:
    """Whether a module has loaded the tensors of a state dict, in the same order."""
    for (name, tensor), value in zip(module.state_dict().items(), expected.values(), strict=True):
        assert torch.equal(tensor, value), name


# From and to the original libraries


@pytest.mark.parametrize("name_of_model", MODELS)
def test_a_checkpoint_of_the_original_is_loaded(ask: Callable[..., Any], adapter: Any, name_of_model: str) -> None:
    data, expected = ask(saved, name_of_model)
    old = loaded(data)
    same_names = adapter.pipe(model(name_of_model, 2), BALANCES[name_of_model], 3)
    same_names.load_state_dict(old)
    others: list[nn.Module] = [
        model(name_of_model, 3),
        native(name_of_model),
        adapter.pipe(model(name_of_model, 3), OTHERS[name_of_model]),
    ]
    for other in others:
        other.load_state_dict(convert_state_dict(old, other))
    for module in (same_names, *others):
        same(module, old)
    torch.testing.assert_close(evaluated(others[0]), expected)
    assert torch.equal(evaluated(same_names), expected)


@pytest.mark.parametrize("name_of_model", MODELS)
def test_a_checkpoint_is_loaded_by_the_original(ask: Callable[..., Any], adapter: Any, name_of_model: str) -> None:
    for pipe in (native(name_of_model), adapter.pipe(model(name_of_model, 3), BALANCES[name_of_model])):
        file = io.BytesIO()
        torch.save(pipe.state_dict(), file)
        answer = ask(taken_back, name_of_model, file.getvalue(), False)
        torch.testing.assert_close(answer, evaluated(pipe))


def test_deferred_batch_norms_of_the_original_come_and_go(ask: Callable[..., Any], adapter: Any) -> None:
    """There they have collected sums among their buffers."""
    data, expected = ask(saved, "plain", True)
    old = loaded(data)
    assert "partitions.1.3.sum" in old
    same_names = adapter.pipe(model("plain", 2), [2, 3], 3, deferred_batch_norm=True)
    same_names.load_state_dict(old)
    for module in (same_names, native("plain"), native("plain", deferred_batch_norm=True), model("plain", 3)):
        converted = convert_state_dict(old, module)
        assert list(converted) == list(module.state_dict())
        module.load_state_dict(converted)
        torch.testing.assert_close(evaluated(module), expected)
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        torch.testing.assert_close(ask(taken_back, "plain", file.getvalue(), True), expected)


def optimized(library: Any, steps: int) -> tuple[Any, Any, list[Tensor]]:
    """State dicts of a pipe and of its optimizer after some steps, and the parameters one step later."""
    pipe = library.pipe(model("nested", 1), [1, 2, 1], 2)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    for _ in range(steps):
        step(pipe, optimizer)
    states = [{key: value.clone() for key, value in pipe.state_dict().items()}, optimizer_state(optimizer)]
    step(pipe, optimizer)
    return *states, [parameter.detach() for parameter in pipe.parameters()]


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    return loaded(file.getvalue())


def step(pipe: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    pipe(inputs()).square().sum().backward()
    optimizer.step()


def test_state_dicts_of_optimizers_fit_unchanged(ask: Callable[..., Any], adapter: Any) -> None:
    """They number the parameters, whose order is that of the layers."""
    weights, state, expected = ask(optimized, 2)
    for pipe in (
        adapter.pipe(model("nested", 2), [1, 2, 1], 2),
        Pipe(model("nested", 2), 2, balance=[4], devices=["cpu"]),
    ):
        pipe.load_state_dict(convert_state_dict(weights, pipe))
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
        optimizer.load_state_dict(copy.deepcopy(state))
        step(pipe, optimizer)
        assert all(torch.equal(mine, other) for mine, other in zip(pipe.parameters(), expected, strict=True))


# Names of torch.distributed.pipeline.sync


@pytest.mark.parametrize("balance", [[1] * 6, [2, 4], [6]], ids=str)
def test_names_of_sync_become_those_of_the_model(balance: list[int]) -> None:
    module = model("nested", 1)
    layers = flat(module)
    assert len(layers) == 6
    old = from_sync(module.state_dict(), layers, balance)
    for target in (model("nested", 2), native("nested", 2)):
        target.load_state_dict(convert_state_dict(old, target))
        same(target, module.state_dict())


LAYERS = st.sampled_from(
    [
        linear,
        nn.Tanh,
        lambda: nn.BatchNorm1d(4),
        lambda: nn.Sequential(linear(), nn.Tanh()),
        lambda: nn.Sequential(nn.Tanh(), linear(), nn.Sequential(linear(), nn.BatchNorm1d(4))),
    ]
)


@given(kinds=st.lists(LAYERS, min_size=1, max_size=16), data=st.data())
def test_any_model_in_any_partitions_in_any_order(kinds: list[Callable[[], nn.Module]], data: st.DataObject) -> None:
    module = nn.Sequential(*(kind() for kind in kinds))
    layers = flat(module)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(layers) - 1)))) if len(layers) > 1 else []
    old = from_sync(
        module.state_dict(), layers, [end - start for start, end in itertools.pairwise([0, *cuts, len(layers)])]
    )
    old = {name: old[name] for name in data.draw(st.permutations(list(old)))}
    target = nn.Sequential(*(kind() for kind in kinds))
    target.load_state_dict(convert_state_dict(old, target))
    same(target, module.state_dict())


def balances(layers: int) -> list[list[int]]:
    """All of them."""
    return [[first, *rest] for first in range(1, layers) for rest in balances(layers - first)] + [[layers]]


class InPartitions(nn.Module):
    """Has the names of sync."""

    def __init__(self, layers: list[nn.Module], balance: list[int]) -> None:
        super().__init__()
        rest = iter(layers)
        self.partitions = nn.ModuleList(nn.Sequential(*itertools.islice(rest, count)) for count in balance)


@pytest.mark.usefixtures("rpc")
@pytest.mark.parametrize("name_of_model", MODELS)
def test_the_sync_adapter_takes_and_gives(name_of_model: str) -> None:
    from pipework.compat import sync

    module = model(name_of_model, 1)
    pipe = sync.Pipe(model(name_of_model, 2))
    pipe.load_state_dict(convert_state_dict(module.state_dict(), pipe))
    same(pipe, module.state_dict())
    back = native(name_of_model, 3)
    back.load_state_dict(convert_state_dict(pipe.state_dict(), back))
    same(back, module.state_dict())


@pytest.mark.parametrize("wrapped", ["", "module."])
def test_names_below_distributed_data_parallel(wrapped: str) -> None:
    module = model("plain", 1)
    old = {wrapped + name: value for name, value in from_sync(module.state_dict(), list(module), [2, 3]).items()}
    target = native("plain", 2)
    target.load_state_dict(convert_state_dict(old, target))
    same(target, module.state_dict())


# Entries in another order


@pytest.mark.parametrize("order", [sorted, lambda names: sorted(names, reverse=True)], ids=["sorted", "reversed"])
@pytest.mark.parametrize("name_of_model", MODELS)
def test_names_that_are_known_may_stand_in_any_order(
    adapter: Any, name_of_model: str, order: Callable[[Any], list[str]]
) -> None:
    state = adapter.pipe(model(name_of_model, 1), BALANCES[name_of_model]).state_dict()
    target = native(name_of_model, 2)
    target.load_state_dict(convert_state_dict({name: state[name] for name in order(state)}, target))
    same(target, state)


@pytest.mark.parametrize("balance", [[1] * 26, [12, 14], [26]], ids=str)
def test_indices_may_stand_in_any_order(balance: list[int]) -> None:
    """Sorted by name, partition 10 is before partition 2, and bias before weight."""
    module = model("many layers", 1)
    old = from_sync(module.state_dict(), list(module), balance)
    old = {name: old[name] for name in sorted(old)}
    target = native("many layers", 2)
    target.load_state_dict(convert_state_dict(old, target))
    same(target, module.state_dict())


def numbers() -> list[int]:
    return [number for number in range(12) for _ in ("weight", "bias")]


def test_files_of_safetensors(adapter: Any, tmp_path: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state = adapter.pipe(model("many layers", 1), BALANCES["many layers"]).state_dict()
    safetensors.save_file(state, tmp_path / "old.safetensors")
    old = safetensors.load_file(tmp_path / "old.safetensors")
    assert list(old) != list(state)
    target = native("many layers", 2)
    target.load_state_dict(convert_state_dict(old, target))
    same(target, state)


def test_an_order_that_is_lost_is_not_guessed() -> None:
    """Other names, and a file that was sorted: nothing tells which layer was the first."""
    old = nn.Sequential(OrderedDict(second=linear(), first=linear())).state_dict()
    target = nn.Sequential(linear(), linear())
    assert list(convert_state_dict(old, target)) == list(target.state_dict())
    with pytest.raises(ValueError, match=r"not in the order of the layers .* called otherwise in Sequential"):
        convert_state_dict({name: old[name] for name in sorted(old)}, target)


# What does not fit


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (nn.Sequential(linear()), r"the state dict has 1 layers with entries, and Pipe has 2$"),
        (nn.Sequential(linear(), linear(), linear()), r"the state dict has 3 layers with entries, and Pipe has 2$"),
        (nn.Sequential(), r"the state dict has 0 layers with entries, and Pipe has 2$"),
        (
            nn.Sequential(linear(), nn.Linear(4, 4, bias=False)),
            r"^layer 1 has the entries 'weight' in the state dict, and 'weight', 'bias' in Pipe$",
        ),
        (nn.Sequential(nn.BatchNorm1d(4), linear()), r"^layer 0 has the entries 'weight', 'bias', 'running_mean', "),
    ],
)
def test_what_does_not_fit_is_named(given: nn.Sequential, message: str) -> None:
    target = Pipe(nn.Sequential(linear(), nn.ReLU(), linear()), balance=[1, 2], devices=["cpu"] * 2)
    for names in (given.state_dict(), {f"partitions.0.{name}": value for name, value in given.state_dict().items()}):
        with pytest.raises(ValueError, match=message):
            convert_state_dict(names, target)


@pytest.mark.parametrize("given", [{"model": {"0.weight": torch.ones(1)}, "epoch": 3}, {"state": {}}])
def test_what_is_no_state_dict_of_a_model_is_said_to_be_none(given: dict[str, Any]) -> None:
    told = ", ".join(map(repr, given))
    with pytest.raises(ValueError, match=f"no state dict of a model; it has the keys {told}: give the entry"):
        convert_state_dict(given, nn.Sequential(nn.Linear(1, 1)))
