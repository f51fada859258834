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
from pipework import Mesh

Run = Callable[..., list[Any]]

SIZES: dict[str, Any] = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
SIZES |= {"num_hidden_layers": 4, "max_position_embeddings": 32}
IDS = torch.arange(28).reshape(4, 7)
BATCH = {"input_ids": IDS, "labels": IDS}


def made(name: str) -> Any:
    """A tiny model: Mixtral's experts have other names and shapes in files, T5's embeddings have several names."""
    import transformers

    if name == "mixtral":
        sizes = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 1, "num_local_experts": 2}
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


NAMES = ("llama", "tied llama", "bert", "mixtral", "t5")


def parameters_and_sizes(folder: Path) -> dict[str, int]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor.nbytes for file in files for name, tensor in load_file(file).items()}


def there_and_back(mesh: Mesh, name: str, folder: str) -> list[int]:
    """Reads shards into a model on the meta device, trains a step, and writes it."""
    place = Path(folder)
    with torch.device("meta"):
        model = made(name)
    pipe = pipework.attach(model, BATCH, chunks=2, mesh=mesh)
    read = pipework.load_pretrained(pipe, place / "source")
    assert not read.missing
    source = type(model).from_pretrained(place / "source")
    kept = {key: tensor for key, tensor in source.state_dict().items() if key in pipe.state_dict()}
    for key, tensor in pipe.state_dict().items():
        assert torch.equal(tensor, kept[key]), key
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()(**BATCH).loss.backward()
    optimizer.step()
    pipework.save_pretrained(pipe, place / "out", max_shard_size=5000)
    model.eval()
    with torch.no_grad():
        logits = model(**BATCH).logits
        again = type(model).from_pretrained(place / "out")
        assert torch.equal(logits_of(again.eval()), logits)
        if name == "llama":  # that of an encoder and a decoder calls the encoder by itself
            options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "use_cache": False}
            assert torch.equal(model.generate(IDS[:2], **options), again.generate(IDS[:2], **options))
    for key, tensor in pipe.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    return [read.tensors, read.bytes]


def all_of_them(mesh: Mesh, folder: str) -> dict[str, list[int]]:
    return {name: there_and_back(mesh, name, f"{folder}/{name}") for name in NAMES}


def test_each_rank_reads_and_writes_its_own(on_ranks: Run, tmp_path: Path) -> None:
    for name in NAMES:
        made(name).save_pretrained(tmp_path / name / "source", max_shard_size="5KB")
    read = on_ranks(2, all_of_them, patience=180.0, folder=str(tmp_path))
    for name in NAMES:
        sizes = parameters_and_sizes(tmp_path / name / "source")
        assert len(list((tmp_path / name / "source").glob("*.safetensors"))) > 1
        written = parameters_and_sizes(tmp_path / name / "out")
        assert written == sizes, "the same names, those that are tied once"
        index = json.loads((tmp_path / name / "out" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(sizes.values())
        assert index["weight_map"].keys() == sizes.keys()
        tied = max(sizes.values()) if name in ("tied llama", "bert", "t5") else 0
        total = sum(rank[name][1] for rank in read)
        assert sum(sizes.values()) <= total <= sum(sizes.values()) + 2 * tied
        assert all(rank[name][1] < sum(sizes.values()) for rank in read)


def with_replicas(mesh: Mesh, folder: str) -> list[int]:
    torch.manual_seed(0)
    model = made("tied llama")
    pipe = pipework.attach(model, BATCH, chunks=2, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = slice(None, 2) if pipe.data_parallel_rank == 0 else slice(2, None)
    model(**{name: values[rows] for name, values in BATCH.items()}).loss.backward()
    optimizer.step()
    pipework.save_pretrained(pipe, Path(folder) / "out")
    again = type(model).from_pretrained(Path(folder) / "out")
    for key, tensor in pipe.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    return [pipe.data_parallel_rank, len(pipe.state_dict())]


def test_replicas_save_one_model(on_ranks: Run, tmp_path: Path) -> None:
    found = on_ranks(4, with_replicas, init={"dp": 2}, patience=120.0, folder=str(tmp_path))
    assert [replica for replica, _ in found] == [0, 0, 1, 1]
    torch.manual_seed(0)
    plain = made("tied llama")
    for begin in (0, 2):
        (plain(**{name: values[begin : begin + 2] for name, values in BATCH.items()}).loss / 2).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for key, tensor in type(plain).from_pretrained(tmp_path / "out").state_dict().items():
        torch.testing.assert_close(tensor, plain.state_dict()[key])


def adapted() -> Any:
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT calls what transformers is to remove
        return peft.get_peft_model(made("llama"), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def train_adapters(mesh: Mesh, folder: str) -> dict[str, int]:
    place = Path(folder)
    torch.manual_seed(5)
    model = adapted()
    pipe = pipework.attach(model, BATCH, chunks=2, mesh=mesh)
    pipework.load_pretrained(pipe, place / "source")  # below the adapters
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(**BATCH).loss.backward()
        optimizer.step()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    pipework.save_pretrained(pipe, place / "out")
    model.eval()
    with torch.no_grad():
        torch.save(model(**BATCH).logits, place / f"{mesh.rank}.pt")
    return {"gradients": sum(each.nbytes for each in gradients), "own": sum(p.nbytes for p in model.parameters())}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_are_saved_by_themselves(on_ranks: Run, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    made("llama").save_pretrained(tmp_path / "source")
    ranks = on_ranks(2, train_adapters, patience=120.0, folder=str(tmp_path))
    files = sorted(path.name for path in (tmp_path / "out").iterdir() if path.name != "README.md")
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(tensors) == 4 * 2 * 2
    assert all("lora_" in name for name in tensors)
    assert sum(rank["gradients"] for rank in ranks) == sum(tensor.nbytes for tensor in tensors.values())
    base = type(made("llama")).from_pretrained(tmp_path / "source")
    model: nn.Module = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    logits: list[Tensor] = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    with torch.no_grad():
        assert all(torch.equal(each, logits_of(model)) for each in logits)


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


def resumed(mesh: Mesh, folder: str, *, saves: bool) -> float:
    torch.manual_seed(0 if saves else 1)
    model = made("tied llama")
    pipe = pipework.attach(model, BATCH, chunks=2, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if not saves:
        assert pipework.load_checkpoint(folder, pipe, optimizer) is not None
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(**BATCH).loss
        loss.backward()
        optimizer.step()
        if saves:
            pipework.save_checkpoint(folder, pipe, optimizer, step=1)
            saves = False
    return float(loss.item())


def test_a_checkpoint_of_two_ranks_resumes_on_four_and_on_one(on_ranks: Run, tmp_path: Path) -> None:
    before = on_ranks(2, resumed, patience=120.0, folder=str(tmp_path), saves=True)
    checkpoint = tmp_path / "step-00000001"
    model = made("tied llama")
    pipe = pipework.attach(model, BATCH, chunks=2, devices=["cpu"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    assert pipework.load_checkpoint(checkpoint, pipe, optimizer) is not None
    loss = model(**BATCH).loss
    assert loss.item() == pytest.approx(before[0], rel=1e-5)
    first = on_ranks(4, resumed, patience=120.0, folder=str(tmp_path), saves=False)
    loss.backward()
    optimizer.step()
    assert first == pytest.approx([model(**BATCH).loss.item()] * 4, rel=1e-5)
