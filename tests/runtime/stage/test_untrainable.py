"""Layers that a pipe cannot train are refused by name before the first action; what works with them goes on working."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipework import Pipe
from pipework.testing import reference_step


def trained(module: nn.Sequential, checkpoint: str = "never", balance: tuple[int, ...] = (1, 1)) -> Pipe:
    pipe = Pipe(module, 2, checkpoint, balance=balance, devices=["cpu"] * len(balance))
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


def test_a_scripted_layer_in_two_partitions() -> None:
    shared = torch.jit.script(nn.Tanh())
    trained(nn.Sequential(shared, nn.Linear(4, 4), shared), balance=(3,))
    with pytest.raises(
        TypeError, match=r"layer '0' \(RecursiveScriptModule\) was made by torch.jit and is used in two"
    ):
        trained(nn.Sequential(shared, nn.Linear(4, 4), shared), balance=(2, 1))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_an_embedding_with_max_norm(kind: type[nn.Module], schedule: str) -> None:
    def module() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(kind(10, 4, max_norm=0.5), nn.Linear(4, 4))

    tokens = torch.randint(10, (8,) if kind is nn.Embedding else (8, 3))
    target = torch.randn(8, 4)
    ways = {"balance": [1, 1], "devices": ["cpu"] * 2, "schedule": schedule, "loss_fn": F.mse_loss}
    plain, piped = module(), module()
    wanted = reference_step(plain, tokens, target, F.mse_loss, 4, key=0)
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
