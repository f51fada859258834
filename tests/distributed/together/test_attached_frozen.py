"""Frozen and quantised weights on two ranks: exact, and without needless gradients."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import pipework
from pipework import Mesh
from pipework.distributed.transport.channel import Channel
from tests.distributed.together.alike import other_gradients
from tests.jobs import runs_on
from tests.model.parts.harness import loss_in
from tests.model.parts.models import Frozen, batch_of
from tests.model.parts.quantised import LINEARS, Quantised

CASES: list[tuple[str, dict[str, Any]]] = [
    *((kind, {"balance": [3, 3], "schedule": schedule}) for kind in LINEARS for schedule in ("1f1b", "zb-h1")),
    *(("frozen", {"balance": [2, 3], "checkpoint": mode}) for mode in ("always", "never")),
]


@pytest.mark.parametrize(("kind", "options"), CASES)
@pytest.mark.thorough
@runs_on(2)
def test_frozen_and_quantised_weights(
    mesh: Mesh, kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps on two ranks and in one process."""
    model: nn.Module = Frozen() if kind == "frozen" else Quantised(LINEARS[kind])
    batch = batch_of(type(model))
    single = copy.deepcopy(model)
    pipe = pipework.attach(model, batch, chunks=4, mesh=mesh, **options)
    pipework.attach(single, batch, chunks=4, devices=["cpu"] * 2, **options)
    own, backwards = Channel.send, []

    def send(channel: Channel, address: Any, tensors: Any, structure: Any) -> None:
        if address[0] == "B":
            backwards.append(sum(tensor is not None for tensor in tensors))
        own(channel, address, tensors, structure)

    monkeypatch.setattr(Channel, "send", send)
    named = dict(single.named_parameters())
    for _ in range(2):
        backwards.clear()
        losses = [loss_in(each(**batch)) for each in (model, single)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        assert other_gradients(model, single) == []
        for name, parameter in model.named_parameters():
            assert type(parameter) is type(named[name])
            assert (parameter.grad is None) == (not parameter.requires_grad), name
        # Adapters of the first stage need the gradient of what it gave, and of nothing else.
        assert backwards == ([0 if kind == "frozen" else 1] * 4 if mesh.rank else [])
    assert pipe.state_dict().keys() < single.state_dict().keys()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::FutureWarning")
@runs_on(2, patience=120.0)
def test_gradients_are_those_of_the_active_adapter(mesh: Mesh) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    warnings.simplefilter("ignore", FutureWarning)  # PEFT calls what transformers is to remove
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=4))
    model = peft.get_peft_model(model, adapter)
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["v_proj", "up_proj"]))
    ids = torch.arange(28).reshape(4, 7)
    pipework.attach(model, {"input_ids": ids, "labels": ids}, chunks=2, mesh=mesh)
    for name in ("default", "other"):
        model.set_adapter(name)
        model(input_ids=ids, labels=ids).loss.backward()
        learning = {each for each, parameter in model.named_parameters() if parameter.requires_grad}
        assert learning
        assert {each for each, parameter in model.named_parameters() if parameter.grad is not None} == learning
        model.zero_grad()
