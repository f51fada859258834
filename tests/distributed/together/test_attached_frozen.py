"""Frozen and quantised weights on two ranks: exact, without needless gradients, and saved by each rank."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipework
from pipework import Mesh
from pipework.distributed.transport.channel import Channel
from tests.model.parts.harness import loss_in
from tests.model.parts.models import Frozen, batch_of
from tests.model.parts.quantised import LINEARS, Quantised

Run = Callable[..., list[Any]]


@contextmanager
def sent() -> Iterator[list[tuple[str, int]]]:
    """The messages of this rank: their kind, and how many tensors they have."""
    found: list[tuple[str, int]] = []
    own = Channel.send

    def send(channel: Channel, address: Any, tensors: Any, structure: Any) -> None:
        found.append((address[0], sum(tensor is not None for tensor in tensors)))
        own(channel, address, tensors, structure)

    Channel.send = send  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Channel.send = own  # type: ignore[method-assign]


def compare(mesh: Mesh, model: nn.Module, batch: dict[str, Any], **options: Any) -> list[tuple[str, int]]:
    """Two steps on two ranks and in one process; what this rank sent in one of them."""
    single = copy.deepcopy(model)
    pipe = pipework.attach(model, batch, chunks=4, mesh=mesh, **options)
    pipework.attach(single, batch, chunks=4, devices=["cpu"] * 2, **options)
    named = dict(single.named_parameters())
    for _ in range(2):
        losses = []
        with sent() as messages:
            loss = loss_in(model(**batch))
            loss.backward()
        losses = [loss.item(), loss_in(single(**batch))]
        losses[1].backward()
        assert losses[0] == losses[1].item()
        for name, parameter in model.named_parameters():
            assert type(parameter) is type(named[name])
            assert (parameter.grad is None) == (named[name].grad is None) == (not parameter.requires_grad), name
            assert parameter.grad is None or torch.equal(parameter.grad, named[name].grad), name
    assert pipe.state_dict().keys() < single.state_dict().keys()
    return messages


def frozen(mesh: Mesh) -> list[tuple[str, int]]:
    for kind in LINEARS.values():
        for schedule in ("1f1b", "zb-h1"):
            messages = compare(mesh, Quantised(kind), batch_of(Quantised), balance=[3, 3], schedule=schedule)
            # The adapters of the first stage need the gradient of what it gave, and of nothing else.
            assert [count for kind_, count in messages if kind_ == "B"] == ([1] * 4 if mesh.rank else [])
    for checkpoint in ("always", "never"):
        messages = compare(mesh, Frozen(), batch_of(Frozen), balance=[2, 3], checkpoint=checkpoint)
    return messages


def adapters(mesh: Mesh, folder: str) -> None:
    import peft
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=4)
    lora = {"r": 2, "init_lora_weights": False}
    warnings.simplefilter("ignore", FutureWarning)  # PEFT calls what transformers is to remove
    model: Any = peft.get_peft_model(
        transformers.LlamaForCausalLM(config),
        peft.LoraConfig(**lora, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]),
    )
    model.add_adapter("other", peft.LoraConfig(**lora, target_modules=["v_proj", "up_proj"]))
    ids = torch.arange(28).reshape(4, 7)
    plain = copy.deepcopy(model)
    pipe = pipework.attach(model, {"input_ids": ids, "labels": ids}, chunks=2, mesh=mesh)
    for name in ("default", "other"):
        model.set_adapter(name)
        model(input_ids=ids, labels=ids).loss.backward()
        has = {each for each, parameter in model.named_parameters() if parameter.grad is not None}
        assert has == {each for each, parameter in model.named_parameters() if parameter.requires_grad}
        assert has
        model.zero_grad()
    pipework.save_pretrained(pipe, folder)
    if mesh.rank == 0:
        plain.save_pretrained(f"{folder}/plain")


@pytest.mark.thorough
def test_frozen_and_quantised_weights(on_ranks: Run) -> None:
    first, second = on_ranks(2, frozen)
    assert [kind for kind, _ in first if kind == "B"] == []
    assert [count for kind, count in second if kind == "B"] == [0] * 4


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_several_adapters_are_saved(on_ranks: Run, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from safetensors.torch import load_file

    on_ranks(2, adapters, patience=120.0, folder=str(tmp_path))
    for place in ("", "other/"):
        saved = load_file(tmp_path / f"{place}adapter_model.safetensors")
        expected = load_file(tmp_path / "plain" / f"{place}adapter_model.safetensors")
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[name], expected[name]) for name in saved)
