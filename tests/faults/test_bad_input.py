"""Row 10 of the fault matrix: every kind of bad input is either right or a clear error, and the pipe goes on
working."""

import pytest
import torch
from torch import nn

from pipework import Pipe


@pytest.fixture
def pipe() -> Pipe:
    return Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), chunks=4, balance=[1, 1], devices=["cpu"] * 2)


@pytest.fixture(autouse=True)
def usable_afterwards(pipe: Pipe) -> object:
    yield
    pipe(torch.randn(8, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in pipe.parameters())


def test_empty_batch(pipe: Pipe) -> None:
    output = pipe(torch.empty(0, 4))
    assert output.shape == (0, 2)
    output.sum().backward()
    assert torch.equal(pipe[0].weight.grad, torch.zeros(4, 4))


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ((torch.empty(4, 4, device="meta"),), NotImplementedError, "meta"),
        ((), TypeError, "inputs do not have any tensors"),
        ((5, True, None), TypeError, "inputs do not have any tensors: got int, bool, NoneType"),
        ((torch.tensor(1.0),), ValueError, "'input' is 0-dimensional"),
        ((torch.zeros(4, 4), torch.zeros(3, 4)), ValueError, r"\(4, 4\).*\(3, 4\)"),
        ((torch.ones(4, 4, dtype=torch.long),), RuntimeError, "dtype"),  # the layer's own error, as the next one
        ((torch.zeros(4, 4), torch.zeros(4, 4)), TypeError, "positional argument"),
    ],
)
def test_inputs_that_do_not_fit(pipe: Pipe, inputs: tuple[object, ...], error: type, message: str) -> None:
    state = torch.get_rng_state()
    with pytest.raises(error, match=message) as caught:
        pipe(*inputs)
    assert hasattr(caught.value, "__notes__") or torch.equal(state, torch.get_rng_state()), "drawn before any layer ran"


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.eye(4).to_sparse(), r"not dense \(layout torch.sparse_coo\)"),
        (torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged), "a nested tensor, and"),
    ],
)
def test_only_dense_tensors_are_split(pipe: Pipe, tensor: torch.Tensor, kind: str) -> None:
    with pytest.raises(ValueError, match=f"'input' is {kind}.* only dense tensors are split .*NoChunk"):
        pipe(tensor)
    with_loss = Pipe(nn.Sequential(*pipe), 4, balance=[2], devices=["cpu"], loss_fn=nn.functional.mse_loss)
    with pytest.raises(ValueError, match=f"a target tensor is {kind}"):
        with_loss(torch.randn(4, 4), target=tensor)


def test_outputs_that_are_nested_differently_in_each_micro_batch() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return x if len(x) == 2 else (x, x)

    with pytest.raises(ValueError, match=r"micro-batch 0 gave tensor and micro-batch 1 gave \(tensor, tensor\)"):
        Pipe(nn.Sequential(Odd()), chunks=2, balance=[1])(torch.ones(3, 1))


def test_a_batch_of_inference_mode_is_pytorchs_own_error(checkpoint: str) -> None:
    with torch.inference_mode():
        x = torch.randn(4, 4)
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2, checkpoint, devices=["cpu"] * 2)
    with pytest.raises(RuntimeError, match=r"Inference tensors cannot be saved for backward.*make a clone"):
        pipe(x).sum().backward()
