"""Accelerate with an attached pipe in one process, beside a loop without it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipework import attach
from tests.integrations.tiny import batch, llama, loader, trained_by_hand, with_pipe

pytestmark = pytest.mark.thorough


@pytest.fixture
def accelerator() -> Callable[..., Any]:
    """Makes one that knows nothing of earlier ones."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    def make(**options: Any) -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)
        return Accelerator(cpu=True, gradient_accumulation_steps=2, **options)

    return make


def epoch(accelerator: Any, model: nn.Module, optimizer: Any, batches: Any) -> list[float]:
    losses = []
    model.train()
    for each in batches:
        with accelerator.accumulate(model):
            loss = model(**each).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def prepared(accelerator: Any, *, has_pipe: bool = True) -> tuple[Any, ...]:
    model = with_pipe(llama()) if has_pipe else llama()
    return tuple(accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader(9)))


def test_a_loop_and_what_it_saves(tmp_path: Path, accelerator: Callable[..., Any]) -> None:
    expected, reference = trained_by_hand(epochs=2)
    accelerate = accelerator()
    objects = prepared(accelerate)
    losses = epoch(accelerate, *objects)
    accelerate.save_state(str(tmp_path))
    losses += epoch(accelerate, *objects)
    assert losses == expected
    model = objects[0]
    assert accelerate.unwrap_model(model) is model
    state = accelerate.get_state_dict(model)
    assert all(torch.equal(state[name], tensor) for name, tensor in reference.state_dict().items())

    for has_pipe in (True, False):
        accelerate = accelerator()
        again = prepared(accelerate, has_pipe=has_pipe)
        accelerate.load_state(str(tmp_path))
        losses = epoch(accelerate, *again)
        assert losses == expected[3:] if has_pipe else losses == pytest.approx(expected[3:], rel=1e-5)


def test_evaluation_and_mixed_precision(accelerator: Callable[..., Any]) -> None:
    accelerate = accelerator()
    model, _, batches = prepared(accelerate)
    model.eval()
    with torch.no_grad():
        logits = torch.cat([accelerate.gather_for_metrics(model(**each).logits) for each in batches])
        torch.testing.assert_close(logits, llama().eval()(**batch(9)).logits)

    accelerate = accelerator(mixed_precision="bf16")
    objects = prepared(accelerate)
    reference = with_pipe(llama()).train()
    with torch.autocast("cpu", torch.bfloat16):
        expected = [reference(**each).loss.item() for each in loader(4)]
    assert epoch(accelerate, *objects)[:1] == expected
    unwrapped = accelerate.unwrap_model(objects[0], keep_fp32_wrapper=False)
    assert unwrapped(**batch(4)).loss.dtype == torch.float32


def test_a_pipe_is_attached_before_prepare(accelerator: Callable[..., Any]) -> None:
    model = accelerator(mixed_precision="bf16").prepare(llama())
    with pytest.raises(ValueError, match=r"accelerator\.prepare\(\) or by attaching a pipe: cut the model before that"):
        attach(model, batch(2), chunks=2, devices=["cpu", "cpu"])
