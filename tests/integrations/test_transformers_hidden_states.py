"""Models that read hidden states which hooks of transformers collect, where the model has run by itself before."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from pipework import attach
from tests.integrations.comparing import without_randomness
from tests.integrations.tiny import batch, llama
from tests.model.parts.harness import assert_exact
from tests.tiers import one_quick

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing. is deprecated:FutureWarning")  # of PEFT

SIDE = 32
SIZES: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "image_size": SIDE, "patch_size": 8}
LAYERS: dict[str, Any] = {**SIZES, "intermediate_size": 24, "num_hidden_layers": 4}


def pixels(**others: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(4, 3, SIDE, SIDE), **others}


def segments() -> dict[str, Tensor]:
    return pixels(labels=torch.randint(3, (4, SIDE, SIDE)))


def upernet(backbone: Any) -> nn.Module:
    config = transformers.UperNetConfig(
        backbone_config=backbone, hidden_size=8, num_labels=3, pool_scales=[1, 2], use_auxiliary_head=False
    )
    return transformers.UperNetForSemanticSegmentation(config)


def of_dinov2() -> nn.Module:
    stages = [f"stage{number}" for number in range(1, 5)]
    return upernet(transformers.Dinov2Config(**SIZES, num_hidden_layers=4, mlp_ratio=2, out_features=stages))


def dpt() -> nn.Module:
    neck = {"backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8}
    config = transformers.DPTConfig(**LAYERS, **neck, num_labels=3, is_hybrid=False)
    return transformers.DPTForSemanticSegmentation(config)


def segformer() -> nn.Module:
    sizes = {"hidden_sizes": [8] * 4, "depths": [1] * 4, "num_attention_heads": [1] * 4, "mlp_ratios": [2] * 4}
    config = transformers.SegformerConfig(**sizes, decoder_hidden_size=8, num_labels=3)
    return transformers.SegformerForSemanticSegmentation(config)


def clipseg() -> nn.Module:
    text = {"vocab_size": 64, "max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "num_hidden_layers": 2}
    config = transformers.CLIPSegConfig(
        text_config={**text, **sizes}, vision_config=LAYERS, projection_dim=16, extract_layers=[1, 2, 3], reduce_dim=8,
        decoder_num_attention_heads=2, decoder_intermediate_size=16,
    )  # fmt: skip
    return transformers.CLIPSegForImageSegmentation(config)


def words_and_masks() -> dict[str, Tensor]:
    ids = torch.randint(3, 64, (4, 8))
    ids[:, -1] = 1
    return pixels(input_ids=ids, labels=torch.rand(4, SIDE, SIDE))


def llava() -> nn.Module:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "num_hidden_layers": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**LAYERS),
        text_config=transformers.LlamaConfig(**sizes, vocab_size=64),
        image_token_index=63,
    )
    return transformers.LlavaForConditionalGeneration(config)


def words_and_images() -> dict[str, Tensor]:
    ids = torch.randint(60, (4, 20))
    ids[:, :16] = 63
    return pixels(input_ids=ids, labels=ids)


def wav2vec2() -> nn.Module:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "num_hidden_layers": 3}
    sounds = {"conv_dim": [8, 8], "conv_stride": [5, 4], "conv_kernel": [5, 4], "num_conv_pos_embeddings": 4}
    config = transformers.Wav2Vec2Config(
        **sizes, **sounds, num_conv_pos_embedding_groups=2, use_weighted_layer_sum=True, num_labels=3
    )
    return transformers.Wav2Vec2ForSequenceClassification(config)


def sounds() -> dict[str, Tensor]:
    return {"input_values": torch.randn(4, 400), "labels": torch.arange(4) % 3}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "UperNet of Dinov2": (of_dinov2, segments),
    "DPT": (dpt, segments),
    "Segformer": (segformer, segments),
    "CLIPSeg": (clipseg, words_and_masks),
    "Llava": (llava, words_and_images),
    "Wav2Vec2": (wav2vec2, sounds),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "Llava" else pytest.mark.thorough) for name in MODELS]
)
def test_each_hidden_state_is_collected_once(name: str) -> None:
    make, batch_of = MODELS[name]
    torch.manual_seed(0)
    model, batch = without_randomness(make()).eval(), batch_of()
    with torch.no_grad():
        model(**batch)  # in which transformers installs hooks in models inside
    weight = (lambda labels: (labels[:, 1:] != -100).sum()) if name == "Llava" else len
    assert_exact(model.train(), batch, steps=1, weight=weight)


@pytest.mark.thorough
def test_an_attach_that_fails_leaves_the_model_as_it_was() -> None:
    model, batch = llava().eval(), words_and_images()
    before = [dict(vars(each), hooks=dict(each._forward_hooks)) for each in model.modules()]
    with pytest.raises(ValueError, match="balance"):
        attach(model, batch, chunks=2, balance=[1, 1], devices=["cpu", "cpu"])
    assert [dict(vars(each), hooks=dict(each._forward_hooks)) for each in model.modules()] == before


def test_hidden_states_that_the_config_asks_for_come_back() -> None:
    model, plain = (llama(output_hidden_states=True).eval() for _ in range(2))
    attach(model, batch(2), chunks=2, balance=[2, 3], devices=["cpu", "cpu"])
    with torch.no_grad():
        found, expected = (each(**batch(4)).hidden_states for each in (model, plain))
    torch.testing.assert_close(found, expected)


def saved_and_loaded(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def adapted() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(llama(output_hidden_states=True), config)


@pytest.mark.parametrize("make", [lambda: llama(output_hidden_states=True), adapted], ids=["Llama", "LoRA of Llama"])
@pytest.mark.parametrize(
    "copied",
    one_quick([copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved_and_loaded]),
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_a_copy_has_a_pipe_of_its_own_and_collects_hidden_states(
    make: Callable[[], nn.Module], copied: Callable[[Any], Any]
) -> None:
    torch.manual_seed(0)
    model, rows = make(), batch(8)
    pipe = attach(model, batch(2), chunks=4, balance=[2, 3], devices=["cpu", "cpu"])
    other = copied(model)
    assert "forward" in vars(other)
    assert other.forward._pipe is not pipe
    for each in (model, other):
        each(**rows).loss.backward()
    for one, its in zip(model.parameters(), other.parameters(), strict=True):
        assert one is not its
        assert (one.grad is None and its.grad is None) or torch.equal(one.grad, its.grad)
    model.eval(), other.eval()
    with torch.no_grad():
        expected = model(**rows).hidden_states
        torch.testing.assert_close(other(**rows).hidden_states, expected, rtol=0, atol=0)
        del other.forward
        torch.testing.assert_close(copied(other)(**rows).hidden_states, expected)  # the plain model, with these hooks
