"""Errors that name a layer: what it returned, losses without a graph, and layers that cannot be trained."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipework import Pipe
from pipework.runtime.stage.layer_errors import refuse_non_finite
from pipework.testing import reference_step


class Nothing(nn.Linear):
    def forward(self, x: Tensor) -> None:  # type: ignore[override]
        super().forward(x)


class Wrapped(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return {"x": super().forward(x)}


class Detaching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def pipe_of(*layers: nn.Module, schedule: str = "1f1b", checkpoint: str = "except_last", **options: Any) -> Pipe:
    options = {"loss_fn": functional.mse_loss, **options}
    balance = [1, len(layers) - 1]
    return Pipe(
        nn.Sequential(*layers), 3, checkpoint, balance=balance, devices=["cpu"] * 2, schedule=schedule, **options
    )


LSTM = r"layer '{}' \(LSTM\) returned \(tensor, \(tensor, tensor\)\), which {} was given. .* first item of a tuple"
NOTHING = r"layer '{}' \(Nothing\) returned None, which {} was given. Its forward may lack a return"
WRAPPED = r"layer '{}' \(Wrapped\) returned {{'?x'?: tensor}}, which {} was given. Wrap layer '{}' \(Wrapped\) in a mod"


@pytest.mark.parametrize(
    ("make", "note"),
    [
        (lambda: [linear(), nn.LSTM(4, 4, batch_first=True), linear()], LSTM.format(1, r"layer '2' \(Linear\)")),
        (lambda: [linear(), nn.LSTM(4, 4, batch_first=True)], LSTM.format(1, "loss_fn")),
        (lambda: [Nothing(4, 4), linear()], "the last layer of stage 0 returned None, which layer '1'"),
        (lambda: [linear(), Nothing(4, 4), linear()], NOTHING.format(1, r"layer '2' \(Linear\)")),
        (lambda: [linear(), Nothing(4, 4)], NOTHING.format(1, "loss_fn")),
        (lambda: [linear(), Wrapped(4, 4), linear()], WRAPPED.format(1, r"layer '2' \(Linear\)", 1)),
    ],
)
def test_the_layer_that_returned_it_is_named(make: Callable[[], list[nn.Module]], note: str) -> None:
    x = torch.randn(6, 5, 4)
    with pytest.raises((TypeError, AttributeError)) as error:
        pipe_of(*make())(x, target=x)
    (returned,) = [each for each in error.value.__notes__ if " returned " in each]
    assert re.search(note, returned), returned


# Losses without a graph


def detached(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target).detach()


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(-1) == target.argmax(-1)).float().mean()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("loss_fn", [detached, accuracy])
def test_a_loss_without_a_graph(schedule: str, checkpoint: str, loss_fn: Callable[..., Tensor]) -> None:
    pipe = pipe_of(linear(), linear(), schedule=schedule, checkpoint=checkpoint, loss_fn=loss_fn)
    x = torch.randn(6, 4)
    with pytest.raises(RuntimeError, match=rf"^loss_fn \({loss_fn.__name__}\) returned a loss without a g"):
        pipe(x, target=x)
    with torch.no_grad():
        assert pipe(x, target=x) >= 0
    pipe.eval()
    assert pipe(x, target=x) >= 0


def test_an_output_without_a_graph() -> None:
    x = torch.randn(6, 4)
    with pytest.raises(RuntimeError, match=r"^layer '1' \(Detaching\) returned an output without a graph"):
        pipe_of(linear(), Detaching())(x, target=x)


@pytest.mark.filterwarnings("ignore:loss_fn .masked. is no mean over rows")  # which is true
def test_some_micro_batches_may_have_a_constant_loss() -> None:
    def masked(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target) if target.any() else output.new_zeros(())

    pipe, x, y = pipe_of(linear(), linear(), loss_fn=masked), torch.randn(6, 4), torch.zeros(6, 4)
    y[0] = 1
    pipe(x, target=y).backward()
    assert pipe[0].weight.grad.any()
    weighted = pipe_of(linear(), linear(), loss_fn=detached, loss_weight=torch.count_nonzero)
    with pytest.raises(RuntimeError, match="without a graph"):
        weighted(x, target=y)


# Values that are not finite


def test_finite_values_none_and_integers_pass() -> None:
    refuse_non_finite([None, torch.ones(2), torch.arange(3), torch.ones(1, dtype=torch.complex64)], "x")


# Layers that cannot be trained


def trained(module: nn.Sequential, checkpoint: str = "never") -> Pipe:
    pipe = Pipe(module, 2, checkpoint, balance=[1, 1], devices=["cpu"] * 2)
    pipe(torch.randn(4, 4)).sum().backward()
    return pipe


@pytest.mark.parametrize(
    ("layer", "what"),
    [
        (lambda: torch.jit.script(nn.Linear(4, 4)), r"layer '0' \(RecursiveScriptModule\)"),
        (lambda: torch.jit.trace(nn.Linear(4, 4), torch.ones(2, 4)), r"layer '0' \(TopLevelTracedModule\)"),
        (
            lambda: nn.Sequential(nn.ReLU(), torch.jit.script(nn.Linear(4, 4))),
            r"'1' \(RecursiveScriptModule\) of layer '0' \(Sequential\)",
        ),
    ],
)
def test_a_scripted_layer_cannot_be_trained(layer: object, what: str) -> None:
    module = nn.Sequential(layer(), nn.Linear(4, 4))
    calls: list[object] = []
    module[1].register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(TypeError, match=f"{what} was made by torch.jit .*give the module that was scripted") as caught:
        trained(module)
    assert not calls
    assert not hasattr(caught.value, "__notes__")
    with torch.no_grad():
        x = torch.randn(4, 4)
        torch.testing.assert_close(Pipe(module, 2, balance=[1, 1], devices=["cpu"] * 2)(x), module(x))


def test_a_scripted_layer_without_anything_to_train() -> None:
    frozen = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False))
    for layer in (frozen, torch.jit.script(nn.ReLU())):
        pipe = trained(nn.Sequential(layer, nn.Linear(4, 4)))
        assert pipe[1].weight.grad is not None
    with pytest.raises(TypeError, match="has parameters or buffers"):
        trained(nn.Sequential(frozen, nn.Linear(4, 4)), "always")
    with pytest.raises(ValueError, match="one RecursiveScriptModule is used in 2 partitions, as '0' and '1'"):
        Pipe(nn.Sequential(frozen, frozen), 2, balance=[1, 1], devices=["cpu"] * 2)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_an_embedding_with_max_norm(kind: type[nn.Module], schedule: str) -> None:
    def module() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(kind(10, 4, max_norm=0.5), nn.Linear(4, 4))

    tokens = torch.randint(10, (8,) if kind is nn.Embedding else (8, 3))
    target = torch.randn(8, 4)
    ways = {"balance": [1, 1], "devices": ["cpu"] * 2, "schedule": schedule, "loss_fn": functional.mse_loss}
    plain, piped = module(), module()
    wanted = reference_step(plain, tokens, target, functional.mse_loss, 4, key=0)
    loss = Pipe(piped, 4, "never", **ways)(tokens, target=target)
    loss.backward()
    assert torch.equal(loss.detach(), wanted.loss.detach())
    assert torch.equal(piped[0].weight, plain[0].weight)
    assert torch.equal(piped[0].weight.grad, plain[0].weight.grad)
    refused = Pipe(module(), 4, **ways)
    before = refused[0].weight.detach().clone()
    what = rf"layer '0' \({kind.__name__}\) has max_norm=0.5, so each forward changes its weight in place"
    with pytest.raises(ValueError, match=f"{what}.* checkpoint='never'"):
        refused(tokens, target=target)
    assert torch.equal(refused[0].weight, before)
    refused.eval()
    refused(tokens)
    refused.train()
    refused[0].requires_grad_(False)
    refused(tokens, target=target).backward()
