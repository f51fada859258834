"""Adapters of PEFT in models with a pipe: several in one model, modules that are saved with them, and merging."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from pipework import Pipe, attach, load_pretrained, save_pretrained
from tests.integrations.architectures import DECODER, text
from tests.integrations.comparing import differences, joined, next_tokens, plain_backward, without_randomness
from tests.model.parts.harness import micro_batches
from tests.tiers import one_quick

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

# PEFT asks transformers by an older name.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing. is deprecated:FutureWarning")


def adapted(**options: Any) -> Any:
    """A Llama with two adapters."""
    first = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    other = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)), first)
    model.add_adapter("other", other)
    return without_randomness(model).train()


SAMPLE = {name: value[:2] for name, value in text().items()}


def pair(schedule: str = "1f1b", *, offload: int | bool = False, **options: Any) -> tuple[Any, Any, Pipe]:
    model = adapted(**options)
    plain, places = copy.deepcopy(model), {"balance": [3, 4], "devices": ["cpu"] * 2}
    return model, plain, attach(model, SAMPLE, chunks=4, schedule=schedule, offload=offload, **places)


def step(model: Any, plain: Any) -> None:
    for each in (model, plain):
        each.zero_grad()
    loss = model(**text()).loss
    loss.backward()
    assert torch.equal(loss.detach(), plain_backward(plain, text(), next_tokens, 4))
    assert differences(model, plain).names == ()
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        assert parameter.requires_grad or parameter.grad is None, name


def same_logits(model: Any, plain: Any) -> bool:
    with torch.no_grad():
        return torch.equal(model(**text()).logits, joined([plain(**part) for part in micro_batches(text(), 4)]))


@pytest.mark.parametrize(
    "options", one_quick([{}, {"modules_to_save": ["embed_tokens", "lm_head"]}]), ids=["", "modules_to_save"]
)
def test_several_adapters(options: dict[str, Any], tmp_path: Path) -> None:
    model, plain, pipe = pair(**options)
    for name in ("default", "other", "default"):
        for each in (model, plain):
            each.set_adapter(name)
        step(model, plain)
    for each in (model, plain):
        torch.optim.SGD([parameter for parameter in each.parameters() if parameter.requires_grad], lr=0.1).step()
        each.eval()
    assert same_logits(model, plain)
    with model.disable_adapter(), plain.disable_adapter():
        assert same_logits(model, plain)
    save_pretrained(pipe, tmp_path)
    plain.save_pretrained(tmp_path / "plain")
    for place in (".", "other"):
        saved = load_file(tmp_path / place / "adapter_model.safetensors")
        expected = load_file(tmp_path / "plain" / place / "adapter_model.safetensors")
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[name], expected[name]) for name in saved)


def test_an_adapter_that_is_added_after_the_pipe_with_activations_on_the_host() -> None:
    model, plain, pipe = pair("gpipe", offload=1)
    assert "O" in pipe.schedule().kinds
    config = peft.LoraConfig(r=3, target_modules=["k_proj"], init_lora_weights=False)
    for each in (model, plain):
        torch.manual_seed(3)
        each.add_adapter("third", config)
        each.set_adapter("third")
    step(model, plain)


@pytest.mark.thorough
def test_weights_below_adapters_go_into_the_modules_that_are_trained_as_they_are_too(tmp_path: Path) -> None:
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER))
    base.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = adapted(modules_to_save=["lm_head"])
    pipe = attach(model, SAMPLE, chunks=4, balance=[3, 4], devices=["cpu"] * 2)
    assert load_pretrained(pipe, tmp_path).tensors == len(base.state_dict())
    heads = [value for name, value in pipe.state_dict().items() if ".lm_head." in name]
    assert len(heads) == 2
    assert all(torch.equal(each, base.lm_head.weight) for each in heads)


@pytest.mark.thorough
def test_an_adapter_of_another_kind_is_refused(tmp_path: Path) -> None:
    _, plain, pipe = pair()
    plain.save_pretrained(tmp_path)
    assert load_pretrained(pipe, tmp_path).missing == ()
    (tmp_path / "other" / "adapter_model.safetensors").replace(tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"up_proj.lora_A.weight, for which the adapter here has no tensor: make it"):
        load_pretrained(pipe, tmp_path)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Already unmerged")  # of layers that only the other adapter has
def test_merging() -> None:
    model, plain, _ = pair(modules_to_save=["lm_head"])
    step(model, plain)
    for each in (model, plain):
        each.eval()
        each.merge_adapter()
    assert same_logits(model, plain)
    for each in (model, plain):
        each.unmerge_adapter()
    merged: list[nn.Module] = [each.merge_and_unload() for each in (model, plain)]
    assert type(merged[0]) is transformers.LlamaForCausalLM
    for name, value in merged[1].state_dict().items():
        assert torch.equal(merged[0].state_dict()[name], value)
    with pytest.raises(RuntimeError, match="was replaced by another module after the pipe was attached"):
        model(**text())
