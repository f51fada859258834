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


def written(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def loaded(data: bytes) -> dict[str, Any]:
    return torch.load(io.BytesIO(data), weights_only=True)


def saved(library: Any, name: str, deferred: bool = False) -> tuple[bytes, Tensor]:
    """What `torch.save` writes of a pipe that was trained for a step, and what the pipe evaluates to."""
    pipe = library.pipe(model(name, 1), BALANCES[name], 3, deferred_batch_norm=deferred)
    step(pipe, torch.optim.SGD(pipe.parameters(), lr=0.1))
    return written(pipe.state_dict()), evaluated(pipe)


def step(pipe: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    pipe(inputs()).square().sum().backward()
    optimizer.step()


def evaluated(module: nn.Module) -> Tensor:
    with torch.no_grad():
        return module.eval()(inputs())


def taken_back(library: Any, name: str, data: bytes) -> Tensor:
    """What a pipe of the library evaluates to that has loaded a converted state dict."""
    pipe = library.pipe(model(name, 2), OTHERS[name], 3)
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


def converted(old: dict[str, Any], target: Any) -> Any:
    """The target, which has loaded an old state dict."""
    target.load_state_dict(convert_state_dict(old, target))
    return target


def same(module: nn.Module, expected: dict[str, Tensor]) -> None:
    """Whether a module has loaded the tensors of a state dict, in the same order."""
    for (name, tensor), value in zip(module.state_dict().items(), expected.values(), strict=True):
        assert torch.equal(tensor, value), name


# From and to the original libraries


@pytest.mark.thorough
@pytest.mark.parametrize("name_of_model", MODELS)
def test_checkpoints_of_the_original_and_for_it(ask: Callable[..., Any], adapter: Any, name_of_model: str) -> None:
    data, expected = ask(saved, name_of_model)
    old = loaded(data)
    same_names = adapter.pipe(model(name_of_model, 2), BALANCES[name_of_model], 3)
    same_names.load_state_dict(old)
    others = [
        model(name_of_model, 3),
        native(name_of_model),
        adapter.pipe(model(name_of_model, 3), OTHERS[name_of_model]),
    ]
    for module in (same_names, *(converted(old, other) for other in others)):
        same(module, old)
    torch.testing.assert_close(evaluated(others[0]), expected)
    assert torch.equal(evaluated(same_names), expected)
    for pipe in (native(name_of_model), adapter.pipe(model(name_of_model, 3), BALANCES[name_of_model])):
        answer = ask(taken_back, name_of_model, written(pipe.state_dict()))
        torch.testing.assert_close(answer, evaluated(pipe))


def test_sums_of_deferred_batch_norms_of_the_original_are_left_out(ask: Callable[..., Any], adapter: Any) -> None:
    data, expected = ask(saved, "plain", True)
    old = loaded(data)
    assert "partitions.1.3.sum" in old
    adapter.pipe(model("plain", 2), [2, 3], 3, deferred_batch_norm=True).load_state_dict(old)
    for module in (native("plain"), native("plain", deferred_batch_norm=True), model("plain", 3)):
        torch.testing.assert_close(evaluated(converted(old, module)), expected)


def optimized(library: Any, steps: int) -> tuple[Any, Any, list[Tensor]]:
    """State dicts of a pipe and of its optimizer after some steps, and the parameters one step later."""
    pipe = library.pipe(model("nested", 1), [1, 2, 1], 2)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    for _ in range(steps):
        step(pipe, optimizer)
    states = [{key: value.clone() for key, value in pipe.state_dict().items()}, loaded(written(optimizer.state_dict()))]
    step(pipe, optimizer)
    return *states, [parameter.detach() for parameter in pipe.parameters()]


def test_state_dicts_of_optimizers_fit_unchanged(ask: Callable[..., Any], adapter: Any) -> None:
    """They number the parameters, whose order is that of the layers."""
    weights, state, expected = ask(optimized, 2)
    for pipe in (
        adapter.pipe(model("nested", 2), [1, 2, 1], 2),
        Pipe(model("nested", 2), 2, balance=[4], devices=["cpu"]),
    ):
        converted(weights, pipe)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
        optimizer.load_state_dict(copy.deepcopy(state))
        step(pipe, optimizer)
        assert all(torch.equal(mine, other) for mine, other in zip(pipe.parameters(), expected, strict=True))


# Names of torch.distributed.pipeline.sync


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
    prefix = data.draw(st.sampled_from(["", "module."]))  # of `DistributedDataParallel`
    old = {prefix + name: old[name] for name in data.draw(st.permutations(list(old)))}
    same(converted(old, nn.Sequential(*(kind() for kind in kinds))), module.state_dict())


@pytest.mark.usefixtures("rpc")
@pytest.mark.parametrize("name_of_model", MODELS)
def test_the_sync_adapter_takes_and_gives(name_of_model: str) -> None:
    from pipework.compat import sync

    state = model(name_of_model, 1).state_dict()
    pipe = converted(state, sync.Pipe(model(name_of_model, 2)))
    same(pipe, state)
    same(converted(pipe.state_dict(), native(name_of_model)), state)


@pytest.mark.parametrize("name_of_model", MODELS)
def test_files_are_sorted_by_name(adapter: Any, name_of_model: str) -> None:
    state = adapter.pipe(model(name_of_model, 1), BALANCES[name_of_model]).state_dict()
    old = {name: state[name] for name in sorted(state)}
    assert list(old) != list(state)
    same(converted(old, native(name_of_model)), state)


# What does not fit


def test_an_order_that_is_lost_is_not_guessed() -> None:
    """Other names, and a file that was sorted: nothing tells which layer was the first."""
    old = nn.Sequential(OrderedDict(second=linear(), first=linear())).state_dict()
    target = nn.Sequential(linear(), linear())
    assert list(convert_state_dict(old, target)) == list(target.state_dict())
    with pytest.raises(ValueError, match=r"not in the order of the layers, and Sequential calls them otherwise"):
        convert_state_dict({name: old[name] for name in sorted(old)}, target)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([linear()], "^layer 1 has the entries none in the state dict, and 'weight', 'bias' in Pipe$"),
        (
            [linear(), linear(), linear()],
            "^layer 2 has the entries 'weight', 'bias' in the state dict, and none in Pipe$",
        ),
        (
            [linear(), nn.Linear(4, 4, bias=False)],
            "^layer 1 has the entries 'weight' in the state dict, and 'weight', 'b",
        ),
        ([nn.BatchNorm1d(4), linear()], "^layer 0 has the entries 'weight', 'bias', 'running_mean', "),
    ],
)
def test_what_does_not_fit_is_named(given: list[nn.Module], message: str) -> None:
    target = Pipe(nn.Sequential(linear(), nn.ReLU(), linear()), balance=[1, 2], devices=["cpu"] * 2)
    state = nn.Sequential(*given).state_dict()
    for names in (state, {f"partitions.0.{name}": value for name, value in state.items()}):
        with pytest.raises(ValueError, match=message):
            convert_state_dict(names, target)


@pytest.mark.parametrize("given", [{"model": {"0.weight": torch.ones(1)}, "epoch": 3}, {"state": {}}])
def test_what_is_no_state_dict_of_a_model_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="layer 0 has the entries '' in the state dict, and 'weight', 'bias' in"):
        convert_state_dict(given, nn.Sequential(nn.Linear(1, 1)))
