"""Folders of transformers and PEFT on several ranks: each reads and writes the tensors of its own units only."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import pipework
from pipework import Mesh, Pipe
from tests.jobs import runs_on

Run = Callable[..., list[Any]]

SIZES: dict[str, Any] = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
SIZES |= {"num_hidden_layers": 2, "max_position_embeddings": 32}
IDS = torch.arange(28).reshape(4, 7)
BATCH = {"input_ids": IDS, "labels": IDS}


def made(name: str) -> Any:
    """A tiny model: Mixtral's experts have other names and shapes in files, T5's embeddings have several names."""
    import transformers

    if name == "mixtral":
        sizes = {**SIZES, "num_key_value_heads": 1, "num_local_experts": 2}
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
    if name == "t5":
        config = transformers.T5Config(vocab_size=37, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
        config.decoder_start_token_id = 0
        return transformers.T5ForConditionalGeneration(config)
    if name == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=name == "tied llama"))


def logits_of(model: nn.Module) -> Tensor:
    """What a pipe of two micro-batches computes: kernels may sum in another order for all rows at once."""
    halves = ({name: values[rows] for name, values in BATCH.items()} for rows in (slice(2), slice(2, 4)))
    return torch.cat([model(**half).logits for half in halves])


def parameters_and_sizes(folder: Path) -> dict[str, int]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor.nbytes for file in files for name, tensor in load_file(file).items()}


def train_a_step(model: Any, rows: slice = slice(None)) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()(**{name: values[rows] for name, values in BATCH.items()}).loss.backward()
    optimizer.step()


def same_values(pipe: Pipe, model: nn.Module) -> None:
    values = model.state_dict()
    assert all(torch.equal(tensor, values[key]) for key, tensor in pipe.state_dict().items() if key in values)


def there_and_back(mesh: Mesh, name: str, folder: str) -> int:
    """Reads shards into a model on the meta device, trains a step, and writes it; how many bytes were read."""
    place = Path(folder)
    with torch.device("meta"):
        model = made(name)
    pipe = pipework.attach(model, BATCH, chunks=2, mesh=mesh)
    read = pipework.load_pretrained(pipe, place / "source")
    assert not read.missing
    same_values(pipe, type(model).from_pretrained(place / "source"))
    train_a_step(model)
    pipework.save_pretrained(pipe, place / "out", max_shard_size=5000)
    model.eval()
    again = type(model).from_pretrained(place / "out").eval()
    same_values(pipe, again)
    with torch.no_grad():
        assert torch.equal(logits_of(again), model(**BATCH).logits)
        if name == "llama":  # that of an encoder and a decoder calls the encoder by itself
            options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "use_cache": False}
            assert torch.equal(model.generate(IDS[:2], **options), again.generate(IDS[:2], **options))
    return read.bytes


@pytest.mark.parametrize("name", ["llama", "tied llama", "bert", "mixtral", "t5"])
def test_each_rank_reads_and_writes_its_own(on_ranks: Run, tmp_path: Path, name: str) -> None:
    made(name).save_pretrained(tmp_path / "source", max_shard_size="5KB")
    read = on_ranks(2, there_and_back, patience=180.0, folder=str(tmp_path), name=name)
    sizes = parameters_and_sizes(tmp_path / "source")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 1
    assert parameters_and_sizes(tmp_path / "out") == sizes, "the same names, those that are tied once"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert index["weight_map"].keys() == sizes.keys()
    tied = max(sizes.values()) if name in ("tied llama", "bert", "t5") else 0
    assert sum(sizes.values()) <= sum(read) <= sum(sizes.values()) + 2 * tied
    assert max(read) < sum(sizes.values())


@runs_on(4, dp=2, patience=120.0)
def test_replicas_save_one_model(mesh: Mesh, folder: str) -> None:
    model, plain = made("tied llama"), made("tied llama")
    plain.load_state_dict(model.state_dict())
    pipe = pipework.attach(model, BATCH, chunks=2, mesh=mesh)
    train_a_step(model, slice(None, 2) if pipe.data_parallel_rank == 0 else slice(2, None))
    pipework.save_pretrained(pipe, Path(folder) / "out")
    again = type(model).from_pretrained(Path(folder) / "out")
    same_values(pipe, again)
    train_a_step(plain)
    for key, tensor in again.state_dict().items():
        torch.testing.assert_close(tensor, plain.state_dict()[key])


# By name: the model, whether it has got four words more, and the options of its adapter.
ADAPTERS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "attention": ("llama", False, {"target_modules": ["q_proj", "v_proj"]}),
    "more words": ("llama", True, {"target_modules": ["q_proj"]}),
    "more words, adapted": ("llama", True, {"target_modules": ["q_proj", "embed_tokens"]}),
    "more words, tied": ("tied llama", True, {"target_modules": ["q_proj"]}),
    "both embeddings": ("llama", False, {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "by a pattern": ("llama", False, {"target_modules": ".*embed_tokens|.*q_proj"}),
    "trained whole": ("llama", False, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "some rows": ("llama", False, {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]}),
    "magnitudes": ("llama", False, {"target_modules": ["q_proj", "down_proj"], "use_dora": True, "use_rslora": True}),
    "biases": ("bert", False, {"target_modules": ["query", "dense"], "bias": "lora_only"}),
}  # fmt: skip
EMBEDDINGS: dict[str, Any] = {"attention": True, "more words": False}  # what is given; "auto" otherwise


def variant(name: str, folder: Path) -> Any:
    import peft

    kind, is_larger, options = ADAPTERS[name]
    model = type(made(kind)).from_pretrained(folder / kind)
    torch.manual_seed(1)
    if is_larger:
        model.resize_token_embeddings(41)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **options))
    if name == "attention":
        model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["up_proj"], init_lora_weights=False))
    return model


def save_variants(mesh: Mesh, folder: str) -> dict[str, list[str]]:
    """What each rank reads again, by variant."""
    warnings.simplefilter("ignore")  # PEFT tells which embeddings it writes
    found = {}
    for name in ADAPTERS:
        place = Path(folder) / name
        pipe = pipework.attach(variant(name, Path(folder)), BATCH, chunks=2, mesh=mesh)
        pipework.save_pretrained(pipe, place / "ranks", save_embedding_layers=EMBEDDINGS.get(name, "auto"))
        saved = {key: tensor.clone() for key, tensor in pipe.state_dict().items()}
        for tensor in pipe.state_dict().values():
            tensor.fill_(7)
        read = pipework.load_pretrained(pipe, place / "plain")
        assert not read.missing
        found[name] = [key for key, tensor in pipe.state_dict().items() if (tensor != 7).any()]
        assert len(found[name]) == read.tensors
        assert all(torch.equal(pipe.state_dict()[key], saved[key]) for key in found[name]), name
    return found


def of_config(path: Path) -> dict[str, Any]:
    """Lists that PEFT makes of sets have any order."""
    values = json.loads(path.read_text())
    return {key: sorted(value) if isinstance(value, list) else value for key, value in values.items()}


@pytest.mark.filterwarnings("ignore")
def test_adapters_are_those_that_peft_writes_for_the_whole_model(on_ranks: Run, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    for kind in ("llama", "tied llama", "bert"):
        made(kind).save_pretrained(tmp_path / kind)
    for name in ADAPTERS:
        variant(name, tmp_path).save_pretrained(
            tmp_path / name / "plain", save_embedding_layers=EMBEDDINGS.get(name, "auto")
        )
    read = on_ranks(2, save_variants, patience=180.0, folder=str(tmp_path))
    for name in ADAPTERS:
        ranks, plain = tmp_path / name / "ranks", tmp_path / name / "plain"
        files = sorted(str(path.relative_to(plain)) for path in plain.rglob("*"))
        assert files == sorted(str(path.relative_to(ranks)) for path in ranks.rglob("*")), name
        keys = set()
        for place in (".", "second") if name == "attention" else (".",):
            found, expected = (load_file(each / place / "adapter_model.safetensors") for each in (ranks, plain))
            assert found.keys() == expected.keys(), (name, place)
            assert all(torch.equal(found[key], expected[key]) for key in expected), (name, place)
            assert of_config(ranks / place / "adapter_config.json") == of_config(plain / place / "adapter_config.json")
            keys |= expected.keys()
        assert len(keys) == sum(len(each[name]) for each in read), name
        assert (ranks / "README.md").read_text() == (plain / "README.md").read_text()
