"""A model to which a pipe is attached on several ranks trains as in one process that is cut alike, to the last bit."""

import copy
import ctypes
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import pipework
from pipework import Mesh
from tests.distributed.together.alike import other_gradients, square
from tests.jobs import runs_on

Batch = dict[str, Tensor]
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


class Net(nn.Module):
    """Has a parameter and buffers of its own beside its units, one of which is in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.register_buffer("shift", torch.full((8,), 0.1), persistent=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)
        )
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x) * self.scale + self.shift
        logits = self.head(x) * self.temperature
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class TiedNet(Net):
    """All stages read the position, which is added between two units."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight
        self.position = nn.Parameter(torch.randn(6, 8))

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(ids) + self.position
        for block in self.blocks:
            x = x + block(x) * self.scale + self.shift
        logits = self.head(x) * self.temperature
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class TwiceNet(Net):
    """Its first block is also its last one: both ranks have it, under one name."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(self.blocks[0])


def batch_of(name: str) -> Batch:
    if name in OWN:
        ids = torch.randint(0, 11, (8, 6))
        return {"ids": ids, "labels": ids.roll(1, 1)}
    ids = torch.randint(1, 37, (8, 7))
    mask = torch.ones_like(ids)
    mask[3, 5:] = mask[6, 2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


OWN = {"own": Net, "own, tied": TiedNet, "own, twice": TwiceNet}


def model_of(name: str) -> nn.Module:
    """One of the above, or a tiny one of transformers."""
    if name in OWN:
        return OWN[name]()
    import transformers

    sizes = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": 2, "max_position_embeddings": 32}
    if name == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=1, tie_word_embeddings="tied" in name)
    return transformers.LlamaForCausalLM(config)


def steps(model: nn.Module, batches: list[Batch], optimizer: torch.optim.Optimizer) -> list[float]:
    """The loop of a user, which is the same for one process and for several."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        output = model(**batch)
        loss = output[0] if isinstance(output, tuple) else output["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


CASES = {
    "own": [(2, "1f1b"), (2, "zb-v"), (2, "gpipe"), (4, "1f1b"), (4, "zb-h1")],
    "own, tied": [(2, "1f1b"), (2, "zb-v"), (4, "zb-h1")],
    "own, twice": [(2, "1f1b")],
    "llama": [(2, "zb-v"), (4, "1f1b")],
    "llama, tied": [(2, "1f1b"), (4, "1f1b")],
    "bert": [(2, "1f1b")],
}


@pytest.mark.parametrize(
    ("name", "ranks", "schedule"),
    [
        # Four ranks import transformers for longer than they train; those of the own models train on four.
        pytest.param(name, *case, marks=pytest.mark.slow if "llama" in name and case[0] == 4 else ())
        for name, cases in CASES.items()
        for case in cases
    ],
)
@runs_on(patience=120.0)
def test_it_trains_as_in_one_process(mesh: Mesh, name: str, schedule: str) -> None:
    model, batches = model_of(name), [batch_of(name) for _ in range(3)]
    single, workers = copy.deepcopy(model), len(mesh.ranks)
    units, stages = len(pipework.to_sequential(model, batches[0])), workers * (2 if schedule == "zb-v" else 1)
    ends = [units * end // stages for end in range(stages + 1)]
    options: dict[str, Any] = {"chunks": 4, "schedule": schedule}
    options["balance"] = [end - begin for begin, end in itertools.pairwise(ends)]
    early = torch.optim.AdamW(model.parameters())
    threads = pipework.attach(single, batches[0], devices=["cpu"] * workers, **options)
    pipe = pipework.attach(model, batches[0], mesh=mesh, **options)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, single)]
    named = dict(single.named_parameters(remove_duplicate=False))
    counts = Counter(id(parameter) for part in threads.partitions for parameter in part.parameters())
    tied = {which for which, count in counts.items() if count > 1}
    batches = batches[:1] if tied else batches  # gradients of tied parameters are added in another order
    own = dict(model.named_parameters())
    assert {id(parameter) for parameter in own.values()} == {id(parameter) for parameter in pipe.parameters()}
    assert 0 < len(own) < len(named)
    if "twice" in name:
        assert {each for each in named if id(named[each]) in tied and ".6." not in each} <= own.keys()

    state = torch.get_rng_state()
    expected = steps(single, batches, optimizers[1])
    torch.set_rng_state(state)
    assert steps(model, batches, optimizers[0]) == expected
    others = other_gradients(model, single)
    assert {*others} <= {each for each in own if id(named[each]) in tied}
    for each, parameter in own.items():
        if id(named[each]) in tied:
            torch.testing.assert_close(parameter.grad, named[each].grad)
        else:
            assert torch.equal(parameter, named[each]), each
    with pytest.raises(RuntimeError, match=r"has \d+ parameters of layers that are in other processes \(rank"):
        early.step()

    for each in (model, single):
        each.eval()
    with torch.no_grad():
        inputs = {key: value for key, value in batches[0].items() if key != "labels"}
        for batch in (batches[0], inputs):  # every rank gets what the model returns
            output, wanted = (tree_leaves(each(**batch)) for each in (model, single))
            assert len(output) == len(wanted) > 0
            torch.testing.assert_close(output, wanted, rtol=1e-4 if tied else 0, atol=1e-5 if tied else 0)


def entropy(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@runs_on(2)
def test_a_model_that_computes_no_loss(mesh: Mesh, schedule: str) -> float:
    model, batch = Net(), batch_of("own")
    loss_fn = entropy if schedule == "1f1b" else None
    ids, options = batch["ids"], {"chunks": 4, "balance": [4, 4], "schedule": schedule, "loss_fn": loss_fn}
    named = {} if loss_fn is None else {"target": batch["labels"]}
    single, state, losses = copy.deepcopy(model), torch.get_rng_state(), []
    pipework.attach(single, (ids,), devices=["cpu"] * 2, **options)
    pipe = pipework.attach(model, (ids,), mesh=mesh, **options)
    for each in (single, model):
        torch.set_rng_state(state)  # of dropout
        result = each(ids, **named)  # on every rank
        losses.append(result if named else entropy(result, batch["labels"]))
        losses[-1].backward()
    assert torch.equal(*losses)
    assert not other_gradients(model, single)
    assert pipe.verify(ids, **named)
    return losses[-1].item()


class Large(nn.Module):
    """Blocks of 4 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(16))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return x if labels is None else nn.functional.mse_loss(x, labels)


def memory(key: str) -> int:
    """A number of the kernel about this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


@runs_on(2, fresh=True)
def test_each_rank_fills_its_own_units_of_a_model_on_the_meta_device(mesh: Mesh) -> list[float]:
    with torch.device("meta"):
        model = Large()
    batch = {"x": torch.randn(2, 1024), "labels": torch.randn(2, 1024)}
    pipework.to_sequential(model, batch)  # imports what is needed
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    # glibc would keep freed blocks in its heap, as many as happens, and count them: now they go back to the kernel.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20) == 1
    before = memory("VmRSS")
    pipe = pipework.attach(model, batch, chunks=2, mesh=mesh)
    peak = memory("VmHWM") - before
    own = sum(parameter.nbytes for parameter in pipe.parameters())
    assert own == sum(parameter.nbytes for parameter in model.parameters()) == 2**22 * 16 // len(mesh.ranks)
    assert own <= peak + 2**20
    assert peak < own + 2**22 * 3  # a unit or two beside what stays
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Large()
    batch = {"x": torch.randn(2, 1024), "labels": torch.randn(2, 1024)}
    pipework.attach(model, batch, chunks=2, devices=["cpu"] * 3)
    assert model(**batch).item() == losses[0]
    return losses


@runs_on(2)
def test_what_a_rank_without_all_units_refuses(mesh: Mesh) -> None:
    model, batch = Net(), batch_of("own")
    pipe = pipework.attach(model, batch, chunks=2, balance=[4, 4], mesh=mesh)
    gone, other = [("blocks.3", 1), ("blocks.2", 0)][mesh.rank]
    text = rf"layer '{gone}' \(Sequential\) has no values in this process: rank {other} trains it"
    saves = r"pipework\.save_checkpoint saves those of all"
    for words, refused in (
        (text, lambda: model.get_submodule(gone)(torch.ones(2, 8))),
        (text, lambda: model.get_submodule(gone).state_dict()),
        (saves, model.state_dict),
        (saves, lambda: copy.deepcopy(model)),
        (r"Cannot copy out of meta tensor", lambda: model.to("cpu")),
        (r"Load a state dict into the model before the pipe is made", lambda: model.load_state_dict(pipe.state_dict())),
        (
            r"layers that are in other processes \(rank .*: blocks\.",
            lambda: torch.optim.SGD(model.blocks.parameters(), lr=0.1).step(),
        ),
    ):
        with pytest.raises(RuntimeError, match=words):
            refused()
    names = {"scale", "embed.weight"} if mesh.rank == 0 else {"head.weight", "temperature", "scale"}
    assert names <= pipe.state_dict().keys()
    assert model.temperature.is_meta == (mesh.rank == 0)
    assert model.scale is pipe[0].get_submodule("model").scale
    with pytest.raises(ValueError, match="a pipe is attached to this Net already"):
        pipework.attach(model, batch, mesh=mesh)
    del model.__dict__["forward"]
    with pytest.raises(ValueError, match=r"gave up its values when a pipe was made of this model before: rank \d has"):
        pipework.attach(model, batch, balance=[5, 3], mesh=mesh)


@runs_on(2, patience=120.0)
def test_what_a_model_of_transformers_refuses_without_all_units(mesh: Mesh, folder: str) -> None:
    model, batch = model_of("llama"), batch_of("llama")
    pipework.attach(model, batch, chunks=2, mesh=mesh)
    model.eval()
    with pytest.raises(RuntimeError, match=r"has no values in this process: .*pipework\.save_pretrained"):
        model.generate(batch["input_ids"], max_new_tokens=2)
    with pytest.raises(RuntimeError, match=r"pipework\.save_pretrained writes a model of transformers"):
        model.save_pretrained(Path(folder) / str(mesh.rank))


@runs_on(2)
def test_one_thread_where_each_process_has_one_worker(mesh: Mesh) -> float:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    pipe = pipework.Pipe(model, 4, schedule="1f1b", loss_fn=square, mesh=mesh, debug="one_thread")
    x = torch.linspace(-1, 1, 32).view(8, 4)
    loss = pipe(x, target=x)
    loss.backward()
    return loss.item()


@runs_on(2)
def test_a_checkpoint_with_tied_parameters_goes_from_one_process_to_two_and_back(mesh: Mesh, folder: str) -> None:
    batch = batch_of("own, tied")

    def made(**workers: Any) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
        model = model_of("own, tied")
        pipe = pipework.attach(model, batch, chunks=2, **workers)
        return model, pipe, torch.optim.AdamW(model.parameters(), lr=0.01)

    def same(model: nn.Module, other: nn.Module, same: Any) -> None:
        every = dict(other.named_parameters(remove_duplicate=False))
        for name, parameter in model.named_parameters():
            same(parameter, every[name])

    def equal(one: Tensor, other: Tensor) -> None:
        assert torch.equal(one, other)

    # The cut is given: measured times would find another one in each process, which sums in another order.
    single, whole, optimizer = made(devices=["cpu"] * 3, balance=[3, 3, 2])
    steps(single, [batch], optimizer)
    if mesh.rank == 0:
        pipework.save_checkpoint(Path(folder) / "one", whole, optimizer, step=1)
    model, pipe, own_optimizer = made(mesh=mesh)
    assert pipework.load_checkpoint(Path(folder) / "one", pipe, own_optimizer) is not None
    again, threads, last_optimizer = made(devices=["cpu"])
    for before, after, optimizers in (
        (single, model, (optimizer, own_optimizer)),
        (model, again, (own_optimizer, last_optimizer)),
    ):
        if after is again:
            pipework.save_checkpoint(Path(folder) / "two", pipe, own_optimizer, step=2)
            assert pipework.load_checkpoint(Path(folder) / "two", threads, last_optimizer) is not None
        few, many = (after, before) if after is model else (before, after)
        same(few, many, equal)
        state = torch.get_rng_state()  # of dropout
        expected = steps(before, [batch], optimizers[0])
        torch.set_rng_state(state)
        assert steps(after, [batch], optimizers[1]) == pytest.approx(expected, rel=1e-5)
        same(few, many, torch.testing.assert_close)
