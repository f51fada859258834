"""Adapters over 4-bit weights of bitsandbytes, on two workers and two ranks: exact, reloaded, and of predicted size."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipework
from pipework import Mesh, Pipe
from tests.integrations.comparing import differences, next_tokens, plain_backward

pytest.importorskip("bitsandbytes")
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # peft asks transformers for it
]

CHUNKS, WIDTH, INSIDE, LAYERS, STEPS = 4, 64, 128, 4, 3
IDS = torch.arange(8)[:, None] * 5 % 64 + torch.arange(12)
BATCH = {"input_ids": IDS, "labels": IDS.where(IDS % 7 > 0, -100)}


def written(folder: Path) -> Path:
    """A tiny Llama in files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": INSIDE, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=80, eos_token_id=None, bos_token_id=None, **sizes)).save_pretrained(folder)
    return folder


def quantised(folder: Path) -> Any:
    """Loaded in 4 bits, as users load it."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options: dict[str, Any] = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, **options)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


def with_adapters(folder: Path) -> Any:
    """The same at each call; all adapters change what the model computes."""
    from peft import LoraConfig, get_peft_model

    model = quantised(folder)
    torch.manual_seed(1)
    adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(model, adapters).train()


def attached(model: nn.Module, mesh: Mesh | None) -> tuple[Pipe, torch.optim.Optimizer]:
    pipe = pipework.attach(
        model,
        {name: value[:2] for name, value in BATCH.items()},
        chunks=CHUNKS,
        mesh=mesh,
        devices=None if mesh else ["cpu", "cpu"],
        balance=[3, 4],
    )
    return pipe, optimizer_of(model)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)


def trained(model: Any, optimizer: torch.optim.Optimizer) -> float:
    """The loss of a step."""
    optimizer.zero_grad()
    loss = model(**BATCH).loss
    loss.backward()
    optimizer.step()
    return loss.item()


def train_save_and_reload(mesh: Mesh | None, folder: Path) -> None:
    from peft import PeftModel

    model = with_adapters(folder / "source")
    plain = copy.deepcopy(model)
    pipe, optimizer = attached(model, mesh)
    reference, losses, expected = optimizer_of(plain), [], []
    for step in range(STEPS):
        losses.append(trained(model, optimizer))
        reference.zero_grad()
        expected.append(plain_backward(plain, BATCH, next_tokens, CHUNKS).item())
        assert not differences(model, plain).names
        reference.step()
        if step == STEPS - 2:
            pipework.save_checkpoint(folder / "checkpoint", pipe, optimizer, step=step)
            pipework.save_pretrained(pipe, folder / "adapters")
    assert losses == expected
    again = with_adapters(folder / "source")
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.fill_(1) if parameter.requires_grad else None
    pipework.load_checkpoint(folder / "checkpoint", *attached(again, mesh))
    assert again(**BATCH).loss.item() == losses[-1]
    again = PeftModel.from_pretrained(quantised(folder / "source"), folder / "adapters", is_trainable=True).train()
    attached(again, mesh)
    assert again(**BATCH).loss.item() == losses[-1]


def on_a_rank(mesh: Mesh, folder: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        train_save_and_reload(mesh, Path(folder))


def test_two_workers_and_two_ranks(on_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    written(tmp_path / "source")
    train_save_and_reload(None, tmp_path)
    on_ranks(2, on_a_rank, folder=str(tmp_path), patience=180.0)  # writes and reads the same folders


def test_bytes_are_as_predicted(tmp_path: Path) -> None:
    model = with_adapters(written(tmp_path))
    pipe, optimizer = attached(model, None)
    prediction = pipe.predict(**BATCH, optimizer=optimizer, timeout=0)
    trained(model, optimizer)
    with pipe.record() as recorded:
        trained(model, optimizer)
    measured = recorded.timeline()
    peaks = [measured.peak_memory(worker) for worker in (0, 1)]
    assert list(prediction.simulation.peak_memory) == pytest.approx(peaks, rel=0.05)
    for stage, part in zip(prediction.stages, pipe.partitions, strict=True):
        # Beside each weight are its scales, theirs, and two tables. `quant_state` is a text with an offset of 4 bytes.
        sizes = {name: 4 if "quant_state" in name else each.nbytes for name, each in part.state_dict().items()}
        assert stage.weights == sum(sizes.values())
        learned = [each for each in part.parameters() if each.requires_grad]
        assert stage.gradients == sum(each.nbytes for each in learned)
        moments = [each for one in learned for each in optimizer.state[one].values()]
        assert stage.optimizer == pytest.approx(sum(each.nbytes for each in moments), rel=0.01)
