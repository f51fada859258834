"""Models of transformers that were built on the meta device are filled by their own rules, wherever the cut is."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from pipework import attach
from tests.tiers import one_quick

SIZES: dict[str, Any] = {"vocab_size": 37, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
SIZES |= {"num_hidden_layers": 3, "max_position_embeddings": 32, "initializer_range": 0.3}
IDS = torch.arange(24).reshape(4, 6)
BATCH = {"input_ids": IDS, "labels": IDS}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=37, n_embd=32, n_layer=3, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=1)
    ),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=37, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, decoder_start_token_id=0)
    ),
}


def spread(tensor: Tensor) -> float:
    return 0.0 if tensor.numel() < 2 else tensor.float().std().item()


@pytest.mark.parametrize("name", one_quick(MODELS))
def test_values_have_the_distribution_of_the_model(name: str) -> None:
    plain = MODELS[name]()
    states = []
    for stages in (1, 2):
        torch.manual_seed(0)
        with torch.device("meta"):
            model: nn.Module = MODELS[name]()
        pipe = attach(model, BATCH, chunks=2, devices=["cpu"] * stages)
        assert model.state_dict().keys() == pipe.state_dict().keys() == plain.state_dict().keys()
        model.eval()
        assert torch.isfinite(model(**BATCH).loss)
        states.append(model.state_dict())
        buffers = dict(model.named_buffers())
        for key, tensor in plain.named_buffers():  # rotary frequencies and the like, which no state dict has
            assert torch.equal(buffers[key], tensor), key
    for key, tensor in plain.state_dict().items():
        assert torch.equal(states[0][key], states[1][key]), key
        share = 0.3 if tensor.numel() > 500 else 0.8
        assert spread(states[0][key]) == pytest.approx(spread(tensor), rel=share, abs=1e-6), key


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT calls what transformers is to remove
def test_adapters_of_peft_begin_with_zeros() -> None:
    peft = pytest.importorskip("peft")
    with torch.device("meta"):
        model = peft.get_peft_model(MODELS["llama"](), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    attach(model, BATCH, chunks=2, devices=["cpu"] * 2)
    for name, tensor in model.state_dict().items():
        if "lora_" in name:
            assert tensor.any() == ("lora_A" in name), name
