"""Settings of the calling thread that did not reach the workers of other pipelines."""

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipework.testing import draw_key, reference_backward
from tests.conftest import WAYS
from tests.ranks import held

CHECKPOINT_MODES = ("never", "except_last", "always")


def coarse() -> contextlib.AbstractContextManager[None]:
    """Saves what backward needs in half the bytes, which changes gradients visibly."""

    def pack(tensor: Tensor) -> Tensor:
        return tensor.to(torch.bfloat16) if tensor.dtype == torch.float32 else tensor

    return saved_tensors_hooks(pack, lambda packed: packed.float() if packed.dtype == torch.bfloat16 else packed)


def autocast() -> contextlib.AbstractContextManager[None]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def uncached() -> contextlib.AbstractContextManager[None]:
    return torch.autocast("cpu", dtype=torch.float16, cache_enabled=False)


@pytest.mark.parametrize("balance", [[6], [2, 4], [1, 2, 2, 1]], ids=str)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("setting", [autocast, uncached, coarse])
@pytest.mark.parametrize("backward_inside", [True, False])
def test_13_autocast_and_saved_tensor_hooks(
    backward_inside: bool,
    setting: Callable[[], contextlib.AbstractContextManager[None]],
    checkpoint: str,
    balance: list[int],
) -> None:
    """Both belong to a thread. Workers computed in full precision and saved tensors as if nothing had been set, or only
    the last partition obeyed. A recomputation outside of the context is bound to what was set in the forward.
    """
    plain = nn.Sequential(
        nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 8), nn.Linear(8, 3)
    )
    untouched = copy.deepcopy(plain)
    pipe = WAYS["outside"].pipe(plain, 3, checkpoint, balance=balance)
    x = torch.randn(7, 8)

    def loss_of(output: Tensor) -> Tensor:
        return output.float().square().sum()

    torch.manual_seed(1)
    key = draw_key()
    with setting():
        reference = reference_backward(plain, x, loss_of, 3, key)
    reference_backward(untouched, x, loss_of, 3, key)
    torch.manual_seed(1)
    with setting():
        output = pipe(x)
        loss = loss_of(output)
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    assert output.dtype == reference.output.dtype
    assert torch.equal(output, reference.output)
    same, others = (zip(pipe.parameters(), held(each, pipe).parameters(), strict=True) for each in (plain, untouched))
    assert all(torch.equal(a.grad, b.grad) for a, b in same)
    differs = [not torch.equal(a.grad, b.grad) for a, b in others]
    assert differs == [] or differs[0], "the setting makes no difference, so this test would see none"
