"""What goes with layers that are sharded over further dimensions of the mesh, and what is refused there."""

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from pipework import Mesh, Pipe, PipelineError, pop, skippable, stash
from pipework.runtime.random.shards import draw_per_rank
from pipework.testing import reference_step

Run = Callable[..., list[Any]]

WIDTH, CHUNKS = 8, 4
PLAN: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def blocks(mesh: Any = None, count: int = 4, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [Block() for _ in range(count)]
    for layer in layers if mesh is not None else ():
        parallelize_module(layer, mesh, PLAN)
    return nn.Sequential(*layers)


def data(seed: int = 7, rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def close(pipe: Pipe, wanted: dict[str, Tensor]) -> None:
    """Sharded layers add in another order than whole ones."""
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(whole(parameter.grad), wanted[name], rtol=1e-5, atol=1e-6)


def gradients(seeds: list[int]) -> dict[str, Tensor]:
    """The mean of the gradients that the whole model gets from several mini-batches."""
    total: dict[str, Tensor] = {}
    for seed in seeds:
        model = blocks()
        reference_step(model, *data(seed), F.mse_loss, chunks=CHUNKS, key=0)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            total[name] = total.get(name, torch.zeros(())) + parameter.grad / len(seeds)
    return total


# ---- slices of a mesh ------------------------------------------------------------------------------------------------


def slices(mesh: Mesh) -> None:
    """Pipes of neighbouring slices are made at the same time, some ranks having made one more before."""
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "pp"))
    if mesh.rank in (0, 1):
        Pipe(blocks(), CHUNKS, balance=[2, 2], mesh=device_mesh["pp"])
    for _ in range(2):
        pipe = Pipe(blocks(), CHUNKS, balance=[2, 2], schedule="1f1b", loss_fn=F.mse_loss, mesh=device_mesh["pp"])
        x, y = data(device_mesh["tp"].get_local_rank())
        pipe(x, target=y).backward()
        close(pipe, gradients([device_mesh["tp"].get_local_rank()]))


# ---- what goes with tensor parallelism ------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@skippable(stash=["early"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("early", x)
        return x * 2


@skippable(pop=["early"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        early = yield pop("early")
        return x + early


def companions(mesh: Mesh) -> None:
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    x, y = data()
    wanted = gradients([7])

    pipe = Pipe(
        blocks(device_mesh["tp"]), CHUNKS, balance=[2, 2], schedule="1f1b", loss_fn=F.mse_loss, mesh=device_mesh
    )
    pipe(x, target=y).backward()
    close(pipe, wanted)
    norm = pipe.clip_grad_norm_(1e-2)
    true = torch.linalg.vector_norm(torch.stack([each.norm() for each in wanted.values()]))
    torch.testing.assert_close(norm, true)
    close(pipe, {name: each * (1e-2 / (true + 1e-6)) for name, each in wanted.items()})
    with pipe.record() as recording:
        pipe(x, target=y).backward()
    assert {each.action.stage for each in recording.timeline().intervals} == {0, 1}
    with torch.no_grad():
        evaluated = pipe(x, target=y)
    torch.testing.assert_close(evaluated, F.mse_loss(blocks()(x), y))
    pipe.zero_grad()
    output = Pipe(blocks(device_mesh["tp"]), CHUNKS, balance=[2, 2], mesh=device_mesh)(x, outputs="all")
    F.mse_loss(output, y).backward()

    # Tied weights, a skip connection over stages and a deferred batch norm.
    def layers(parallel: bool) -> nn.Sequential:
        torch.manual_seed(0)
        weight, block, norm = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3), Block(), nn.BatchNorm1d(WIDTH)
        if parallel:
            parallelize_module(block, device_mesh["tp"], PLAN)
        return nn.Sequential(Tied(weight), Stash(), block, norm, Pop(), Tied(weight))

    plain = layers(parallel=False)
    pipe = Pipe(
        layers(parallel=True), CHUNKS, "always", True,
        balance=[3, 3], schedule="1f1b", loss_fn=F.mse_loss, mesh=device_mesh,
    )  # fmt: skip
    loss = pipe(x, target=y)
    loss.backward()
    reference = Pipe(plain, CHUNKS, "always", True, balance=[3, 3], schedule="1f1b", loss_fn=F.mse_loss)
    expected = reference(x, target=y)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    named = {name: parameter.grad for name, parameter in reference.named_parameters()}
    tied = "5.weight" if pipe.is_last else "0.weight"
    close(pipe, {**named, tied: named["0.weight"]})  # type: ignore[dict-item]


# ---- ranks of one layer group agree ---------------------------------------------------------------------------------


def disagreements(mesh: Mesh) -> list[str]:
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    place = device_mesh["tp"].get_local_rank()
    told = []

    def made(model: nn.Sequential) -> Pipe:
        return Pipe(model, CHUNKS, balance=[2, 2], schedule="1f1b", loss_fn=F.mse_loss, mesh=device_mesh)

    def fails(call: Callable[[Pipe], object]) -> None:
        pipe = made(blocks(device_mesh["tp"]))
        dist.barrier()  # who still makes the pipe while another one fails is told of that there
        with pytest.raises((ValueError, PipelineError)) as caught:
            call(pipe)
        told.append(str(caught.value))

    def is_refused(model: nn.Sequential) -> None:
        with pytest.raises((ValueError, PipelineError)) as caught:
            made(model)
        told.append(str(caught.value))

    def other_calls(pipe: Pipe) -> None:
        x, y = data()
        if place:
            with torch.no_grad():
                pipe(x, target=y)
        pipe(x, target=y)

    x, y = data()
    fails(lambda pipe: pipe(data(place)[0], target=y))
    fails(lambda pipe: pipe(x, target=data(place)[1]))
    fails(lambda pipe: pipe(*data(7, 8 + place)[:1], target=data(7, 8 + place)[1]))
    fails(other_calls)
    fails(lambda pipe: [pipe[-1].norm.requires_grad_(place == 0), pipe(x, target=y)])  # type: ignore[operator]
    is_refused(blocks(seed=place))
    model = blocks()
    if place:
        parallelize_module(model[0], device_mesh["tp"], PLAN, src_data_rank=None)
    is_refused(model)
    return told


def other_meshes(mesh: Mesh) -> list[str]:
    """The dimensions of one rank are in another order, or have another name."""
    told = []
    for names in (("tp", "pp"), ("pp", "dp")):
        device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names if mesh.rank == 3 else ("pp", "tp"))
        with pytest.raises(ValueError, match="mesh") as caught:
            Pipe(blocks(), CHUNKS, balance=[2, 2], schedule="1f1b", loss_fn=F.mse_loss, mesh=device_mesh)
        told.append(str(caught.value))
        dist.barrier()
    return told


def seeds_apart(mesh: Mesh) -> None:
    """The first rank of a layer group draws the key for all, and stops are heard by all."""
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    model = blocks(device_mesh["tp"])
    layers = nn.Sequential(*[layer for block in model for layer in (block, nn.Dropout(0.5))])
    pipe = Pipe(layers, CHUNKS, balance=[4, 4], schedule="1f1b", loss_fn=F.mse_loss, mesh=device_mesh)
    torch.manual_seed(mesh.rank)
    x, y = data()
    losses = [pipe(x, target=y) for _ in range(2)]
    gathered: list[Any] = [None] * 4
    dist.all_gather_object(gathered, [loss.item() for loss in losses])
    assert all(each == gathered[0] for each in gathered)
    if mesh.rank == 1:
        pipe.request_stop()
    for _ in range(20):
        pipe(x, target=y).backward()
        if pipe.stopping:
            break
    assert pipe.stopping


# ---- random numbers -------------------------------------------------------------------------------------------------


MASKS: list[Tensor] = []


class Masked(nn.Module):
    """Gives what a dropout between two sharded layers leaves, with ones in its place."""

    def __init__(self, dropout: nn.Module) -> None:
        super().__init__()
        self.up, self.dropout = nn.Linear(WIDTH, 16), dropout

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        masked = self.dropout(torch.ones_like(hidden))
        MASKS.append((masked.to_local() if isinstance(masked, DTensor) else masked).detach().clone())
        return x + 0 * (masked.full_tensor() if isinstance(masked, DTensor) else masked).sum()


def masks(mesh: Mesh) -> list[list[bool]]:
    """Whether the masks of two ranks are the same: of whole activations, DTensors, and local shards that are named."""
    device_mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    tp = device_mesh["tp"]
    found = []
    for kind in ("whole", "dtensor", "named"):
        torch.manual_seed(0)
        dropout: nn.Module = nn.Dropout(0.5)
        if kind == "named":
            dropout = draw_per_rank(dropout, tp)
        layer = Masked(dropout)
        if kind != "whole":
            parallelize_module(layer, tp, {"up": ColwiseParallel(use_local_output=kind == "named")})
        pipe = Pipe(
            nn.Sequential(layer), 2, "always", balance=[1], schedule="gpipe", loss_fn=F.mse_loss, mesh=device_mesh
        )
        x, y = data()
        torch.manual_seed(3)
        pipe(x.requires_grad_(), target=y).backward()
        first, second, *again = MASKS  # computed, and computed again in the same order
        assert again
        assert all(map(torch.equal, again, (first, second)))
        MASKS.clear()
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, first)
        found.append([torch.equal(*gathered), torch.equal(first, second)])
    return found


# ---- experts over the replicas --------------------------------------------------------------------------------------


# ---- gradients that some ranks lack ---------------------------------------------------------------------------------


def a_missing_gradient(mesh: Mesh) -> str:
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    pipe = Pipe(blocks(device_mesh["tp"]), CHUNKS, balance=[2, 2], loss_fn=F.mse_loss, mesh=device_mesh)
    x, y = data()
    pipe(x, target=y).backward()
    if mesh.rank == 3:
        pipe[0].up.weight.grad = None  # the layer 2
    with pytest.raises((ValueError, PipelineError)) as caught:
        pipe.clip_grad_norm_(1.0)
    return str(caught.value)


# ---- several threads ------------------------------------------------------------------------------------------------


class Waiting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entered, self.may_go_on = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.entered.set()
        assert self.may_go_on.wait(30)
        return x


def two_pipes(_: Mesh) -> str:
    device_mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    waiting = Waiting()
    pipes = [
        Pipe(nn.Sequential(*blocks(device_mesh["tp"]), layer), CHUNKS, loss_fn=F.mse_loss, mesh=device_mesh)
        for layer in (waiting, nn.Identity())
    ]
    x, y = data()
    with ThreadPoolExecutor(1) as other:
        first = other.submit(lambda: pipes[0](x, target=y).backward())
        assert waiting.entered.wait(30)
        with pytest.raises((RuntimeError, PipelineError)) as caught:
            pipes[1](x, target=y)
        waiting.may_go_on.set()
        first.result()
    close(pipes[0], gradients([7]))
    return str(caught.value)


# ---- the tests ------------------------------------------------------------------------------------------------------


def test_pipes_of_neighbouring_slices_do_not_meet(on_ranks: Run) -> None:
    on_ranks(4, slices)


def test_what_goes_with_tensor_parallelism(on_ranks: Run) -> None:
    on_ranks(4, companions)


def test_the_ranks_of_a_layer_group_agree(on_ranks: Run) -> None:
    every = on_ranks(4, disagreements)
    inputs, targets, rows, calls, trained, seeds, plans = zip(*every, strict=True)
    wanted = (
        (
            inputs,
            "rank 1 was given other inputs than rank 0 in call 1 of the pipe. All ranks of a pipe, and all",
        ),
        (targets, "rank 3 was given other targets than rank 2 in call 1 of the pipe"),
        (seeds, "have different values of "),
        (plans, 'Replicate() over tp" on rank 1, 3'),
    )
    for texts, part in wanted:
        for text in texts:
            assert part in text
    # Two groups find out at once, and each rank is told of one of them.
    for texts, part in (
        (rows, "rows is|was given other targets"),
        (calls, "grad is|training is"),
        (trained, "trained"),
    ):
        for text in texts:
            assert re.search(part, text)


def test_ranks_with_other_meshes(on_ranks: Run) -> None:
    for order, name in on_ranks(4, other_meshes):
        assert 'mesh, first difference at dimensions.0: "pp" on rank 0, 1, 2; "tp" on rank 3' in order
        assert 'mesh, first difference at dimensions.1: "tp" on rank 0, 1, 2; "dp" on rank 3' in name


def test_one_key_and_one_stop_for_a_layer_group(on_ranks: Run) -> None:
    on_ranks(4, seeds_apart)


def test_masks_of_sharded_and_of_whole_activations(on_ranks: Run) -> None:
    for found in on_ranks(2, masks):
        assert found == [[True, False], [False, False], [False, False]]


def threads(mesh: Mesh) -> str:
    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = blocks(device_mesh["tp"])
    x, y = data()
    with pytest.raises(ValueError, match="let each worker") as caught:
        Pipe(model, CHUNKS, balance=[2, 2], devices=["cpu", "cpu"], loss_fn=F.mse_loss)(x, target=y)
    pipe = Pipe(blocks(), CHUNKS, balance=[2, 2], devices=["cpu", "cpu"], schedule="1f1b", loss_fn=F.mse_loss)
    pipe(x, target=y)
    parallelize_module(pipe[1], device_mesh["tp"], PLAN)  # afterwards
    with pytest.raises(ValueError, match="let each worker"):
        pipe(x, target=y)
    pipe = Pipe(
        model, CHUNKS, balance=[2, 2], devices=["cpu", "cpu"], schedule="1f1b", loss_fn=F.mse_loss, debug="one_thread"
    )
    pipe(x, target=y).backward()
    close(pipe, gradients([7]))
    return str(caught.value)


def test_workers_that_are_threads_are_refused(on_ranks: Run) -> None:
    for text in on_ranks(2, threads):
        assert "Shard(dim=0) over tp" in text
        assert "this pipe has 2 workers that are threads" in text


def test_pipes_over_one_mesh_are_called_one_after_the_other(on_ranks: Run) -> None:
    for text in on_ranks(2, two_pipes):  # also if it was so on another rank
        assert "another thread of this process calls another pipe over the same mesh" in text


def test_a_gradient_that_a_rank_of_a_layer_group_lacks_is_named(on_ranks: Run) -> None:
    for text in on_ranks(4, a_missing_gradient):
        assert "some of the ranks that compute the same layers together have no gradient of 2.up.weight, and" in text
