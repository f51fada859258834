"""Layers that wait on the meta device, as nothing fills them: a checkpoint does, as if they had been there before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import Pipe, load_checkpoint, save_checkpoint
from tests.saving.harness import assert_same, remembered, snapshot, train


class Scaled(nn.Module):
    """Nothing says how its scale is filled, so that all of it waits."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.scale = nn.Parameter(torch.ones(features))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return nn.functional.dropout(self.linear(x) * self.scale, 0.2, self.training)


class Masked(nn.Module):
    """Has a buffer that no checkpoint has, and draws it."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(features))
        self.register_buffer("mask", torch.empty(features), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.mask.copy_(torch.rand(self.mask.shape) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * self.mask


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), Scaled(8), nn.Tanh(), nn.Dropout(0.1), Scaled(8), nn.Linear(8, 1))


def make(module: nn.Sequential, *balance: int, **options: Any) -> tuple[Pipe, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)  # made before there is memory
    where = options or {"devices": ["cpu"] * len(balance)}
    pipe = Pipe(module, 4, balance=balance or None, schedule="1f1b", loss_fn=nn.functional.mse_loss, **where)
    return pipe, optimizer


def on_meta(make: Callable[..., Any] = layers, *arguments: Any) -> Any:
    with torch.device("meta"):
        return make(*arguments)


def waiting(pipe: nn.Module) -> list[str]:
    return [name for name, tensor in pipe.state_dict().items() if tensor.is_meta]


@pytest.mark.parametrize("balance", [(6,), (2, 4), (1, 2, 3)], ids=str)
def test_they_go_on_as_if_they_had_never_stopped(tmp_path, balance):
    pipe, optimizer = make(layers(), 3, 3)
    train(pipe, optimizer, 2)
    save_checkpoint(tmp_path, pipe, optimizer, step=2)
    expected = train(pipe, optimizer, 2)
    torch.manual_seed(9)
    other, restored = make(on_meta(), *balance)
    assert waiting(other) == [
        f"{n}.{name}" for n in (1, 4) for name in ("scale", "seen", "linear.weight", "linear.bias")
    ]
    parameters = list(other.parameters())
    assert load_checkpoint(tmp_path, other, restored).step == 2
    assert waiting(other) == []
    assert all(a is b for a, b in zip(parameters, other.parameters(), strict=True))
    for actual, wanted in zip(train(other, restored, 2), expected, strict=True):
        assert_same(actual, wanted)
    assert_same(remembered(restored), remembered(optimizer))


def test_nothing_is_initialised_that_the_checkpoint_has(tmp_path, monkeypatch):
    pipe, _ = make(layers(), 6)
    save_checkpoint(tmp_path, pipe, step=1)
    other, _ = make(layers(), 2, 4)
    for number, layer in enumerate(on_meta()):
        setattr(other, str(number), layer)  # the linear ones alone could be filled, and are not yet
    assert len(waiting(other)) == 12
    monkeypatch.setattr(nn.Linear, "reset_parameters", lambda self: pytest.fail("it was initialised"))
    load_checkpoint(tmp_path, other)
    assert_same(snapshot(other), snapshot(pipe))


def test_what_no_checkpoint_has_is_initialised_and_draws_nothing_from_the_callers_generator(tmp_path):
    pipe = Pipe(nn.Sequential(nn.Linear(6, 6), Masked(6)), balance=[1, 1], devices=["cpu", "cpu"])
    save_checkpoint(tmp_path, pipe, step=1)
    state = torch.get_rng_state()
    others = []
    for _ in range(2):
        torch.manual_seed(3)
        others.append(Pipe(on_meta(lambda: nn.Sequential(nn.Linear(6, 6), Masked(6))), balance=[2]))
        assert waiting(others[-1]) == ["1.scale"]
        load_checkpoint(tmp_path, others[-1])
        assert torch.equal(torch.get_rng_state(), state)
        assert_same(snapshot(others[-1]), snapshot(pipe))
    assert others[0][1].mask.min() >= 0.5
    assert torch.equal(*(other[1].mask for other in others))


def test_a_load_that_fails_leaves_them_without_data(tmp_path):
    pipe, optimizer = make(layers(), 6)
    train(pipe, optimizer, 1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)  # whose state is empty, which one that is enabled refuses
    save_checkpoint(tmp_path, pipe, optimizer, step=1, scaler=scaler)
    other, restored = make(on_meta(), 6)
    before = {name: t.clone() for name, t in other.state_dict().items() if not t.is_meta}
    with pytest.raises(RuntimeError, match="source state dict is empty"):
        load_checkpoint(tmp_path, other, restored, scaler=torch.amp.GradScaler("cpu"))
    assert len(waiting(other)) == 8
    assert_same({name: other.state_dict()[name] for name in before}, before)
    assert not restored.state
    other[1].scale.register_post_accumulate_grad_hook(print)
    with pytest.raises(RuntimeError, match="cannot be given memory without losing its hooks"):
        load_checkpoint(tmp_path, other, restored)
    assert len(waiting(other)) == 8
    assert not restored.state


def test_what_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"'1\.scale' cannot be saved.*it lies on the meta device and has no data"):
        save_checkpoint(tmp_path, make(on_meta(), 6)[0], step=1)
    pipe, _ = make(layers(), 6)
    save_checkpoint(tmp_path, pipe, step=1)
    shapes = Pipe(on_meta(), balance=[3, 3], devices=["meta", "meta"])
    with pytest.raises(TypeError, match="lies on the meta device and has no data"):
        load_checkpoint(tmp_path, shapes)
    smaller = on_meta()
    smaller[1].scale = nn.Parameter(torch.empty(4, device="meta"))
    with pytest.raises(ValueError, match=r"1\.scale \(it has \(8,\) float32, the pipe \(4,\) float32\)"):
        load_checkpoint(tmp_path, make(smaller, 6)[0])
