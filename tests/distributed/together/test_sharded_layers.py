"""What goes with layers that are sharded over further dimensions of the mesh, and what is refused there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F

from pipework import Mesh, Pipe
from pipework.distributed.transport import groups
from pipework.runtime.random.shards import draw_per_rank
from tests.distributed.together.alike import Tied, of_all_ranks, refused
from tests.distributed.together.sharding import CHUNKS, PLAN, WIDTH, Block, blocks, close, data, mean_gradients, norm_of
from tests.helpers import Pop, Stash
from tests.jobs import runs_on


def mesh_of(*sizes: int, names: tuple[str, ...] = ("pp", "tp")) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def pipe_of(layers: nn.Sequential, mesh: Any, **options: Any) -> Pipe:
    return Pipe(layers, CHUNKS, schedule="1f1b", loss_fn=F.mse_loss, mesh=mesh, **options)


@pytest.mark.thorough
@runs_on(4)
def test_pipes_of_neighbouring_slices_do_not_meet(mesh: Mesh) -> None:
    """They are made at the same time, some ranks having made one more before."""
    device_mesh = mesh_of(2, 2, names=("tp", "pp"))
    if mesh.rank in (0, 1):
        Pipe(blocks(), CHUNKS, mesh=device_mesh["pp"])
    for _ in range(2):
        pipe = pipe_of(blocks(), device_mesh["pp"])
        x, y = data(device_mesh["tp"].get_local_rank())
        pipe(x, target=y).backward()
        close(pipe, mean_gradients([device_mesh["tp"].get_local_rank()]))


# ---- what goes with tensor parallelism ------------------------------------------------------------------------------


@runs_on(4)
def test_clipping_recording_and_evaluating_with_tensor_parallelism(mesh: Mesh) -> None:
    device_mesh = mesh_of(2, 2)
    x, y = data()
    wanted = mean_gradients([7])
    pipe = pipe_of(blocks(device_mesh["tp"]), device_mesh)
    pipe(x, target=y).backward()
    close(pipe, wanted)
    torch.testing.assert_close(pipe.clip_grad_norm_(1e-2), norm_of(wanted))
    close(pipe, {name: each * (1e-2 / (norm_of(wanted) + 1e-6)) for name, each in wanted.items()})
    with pipe.record() as recording:
        pipe(x, target=y).backward()
    assert {each.action.stage for each in recording.timeline().intervals} == {0, 1}
    with torch.no_grad():
        torch.testing.assert_close(pipe(x, target=y), F.mse_loss(blocks()(x), y))
    output = Pipe(blocks(device_mesh["tp"]), CHUNKS, mesh=device_mesh)(x, outputs="all")
    F.mse_loss(output, y).backward()


@runs_on(4)
def test_tied_weights_skips_and_batch_norms_beside_tensor_parallelism(mesh: Mesh) -> None:
    device_mesh = mesh_of(2, 2)
    x, y = data()

    def layers(parallel: bool) -> nn.Sequential:
        torch.manual_seed(0)
        weight, block, norm = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3), Block(), nn.BatchNorm1d(WIDTH)
        if parallel:
            parallelize_module(block, device_mesh["tp"], PLAN)
        return nn.Sequential(Tied(weight), Stash(), block, norm, Pop(), Tied(weight))

    options: dict[str, Any] = {"balance": [3, 3], "checkpoint": "always", "deferred_batch_norm": True}
    pipes = pipe_of(layers(parallel=True), device_mesh, **options), pipe_of(layers(parallel=False), None, **options)
    losses = [pipe(x, target=y) for pipe in pipes]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    named = {name: parameter.grad for name, parameter in pipes[1].named_parameters()}
    tied = "5.weight" if pipes[0].is_last else "0.weight"
    close(pipes[0], {**named, tied: named["0.weight"]})  # type: ignore[dict-item]


# ---- ranks of one layer group agree ---------------------------------------------------------------------------------


@runs_on(4)
def test_the_ranks_of_a_layer_group_agree(mesh: Mesh) -> None:
    device_mesh = mesh_of(2, 2)
    place = device_mesh["tp"].get_local_rank()
    x, y = data()

    def other_calls(pipe: Pipe) -> None:
        with torch.set_grad_enabled(not place):
            pipe(x, target=y)
        pipe(x, target=y)

    # Two groups find out at once, and each rank is told of one of them.
    calls: dict[str, Callable[[Pipe], object]] = {
        "rank 1 was given other inputs than rank 0 in call 1 of the pipe. All ranks of a pipe, and all": lambda pipe: (
            pipe(data(place)[0], target=y)
        ),
        "rank 3 was given other targets than rank 2 in call 1 of the pipe": lambda pipe: pipe(x, target=data(place)[1]),
        "rows is|was given other targets": lambda pipe: pipe(*data(7, 8 + place)[:1], target=data(7, 8 + place)[1]),
        "grad is|training is": other_calls,
        "'clip_grad_norm_'": lambda pipe: pipe(x, target=y) if place else pipe.clip_grad_norm_(1.0),
        "trained": lambda pipe: [pipe[-1].norm.requires_grad_(place == 0), pipe(x, target=y)],  # type: ignore[operator]
    }
    for words, call in calls.items():
        pipe = pipe_of(blocks(device_mesh["tp"]), device_mesh)
        dist.barrier()  # who still makes the pipe while another one fails is told of that there
        with refused(words):
            call(pipe)
    model = blocks()
    if place:
        parallelize_module(model[0], device_mesh["tp"], PLAN, src_data_rank=None)
    for words, layers in (
        ("have different values of ", blocks(seed=place)),
        (r'Replicate\(\) over tp" on rank 1, 3', model),
    ):
        with refused(words):
            pipe_of(layers, device_mesh)


@runs_on(4)
def test_ranks_with_other_meshes(mesh: Mesh) -> None:
    """The dimensions of one rank are in another order, or have another name."""
    for names, words in (
        (("tp", "pp"), 'mesh, first difference at dimensions.0: "pp" on rank 0, 1, 2; "tp" on rank 3'),
        (("pp", "dp"), 'mesh, first difference at dimensions.1: "tp" on rank 0, 1, 2; "dp" on rank 3'),
    ):
        device_mesh = mesh_of(2, 2, names=names if mesh.rank == 3 else ("pp", "tp"))
        with pytest.raises(ValueError, match=words):
            pipe_of(blocks(), device_mesh)
        dist.barrier()


@runs_on(4)
def test_one_key_and_one_stop_for_a_layer_group(mesh: Mesh) -> list[float]:
    """The first rank of a layer group draws the key for all, and stops are heard by all."""
    device_mesh = mesh_of(2, 2)
    model = blocks(device_mesh["tp"])
    pipe = pipe_of(nn.Sequential(*[layer for block in model for layer in (block, nn.Dropout(0.5))]), device_mesh)
    torch.manual_seed(mesh.rank)
    x, y = data()
    losses = [pipe(x, target=y).item() for _ in range(2)]
    if mesh.rank == 1:
        pipe.request_stop()
    for _ in range(20):
        pipe(x, target=y).backward()
        if pipe.stopping:
            break
    assert pipe.stopping
    return losses


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


@pytest.mark.parametrize(
    ("kind", "same_on_ranks", "same_in_micro_batches"),
    [("whole", True, False), ("dtensor", False, False), ("named", False, False)],
)
@runs_on(2)
def test_masks_of_sharded_and_of_whole_activations(
    mesh: Mesh, kind: str, same_on_ranks: bool, same_in_micro_batches: bool
) -> None:
    """Of whole activations, DTensors, and local shards that are named."""
    device_mesh = mesh_of(1, 2)
    torch.manual_seed(0)
    dropout: nn.Module = nn.Dropout(0.5)
    layer = Masked(draw_per_rank(dropout, device_mesh["tp"]) if kind == "named" else dropout)
    if kind != "whole":
        parallelize_module(layer, device_mesh["tp"], {"up": ColwiseParallel(use_local_output=kind == "named")})
    pipe = Pipe(nn.Sequential(layer), 2, "always", schedule="gpipe", loss_fn=F.mse_loss, mesh=device_mesh)
    x, y = data()
    torch.manual_seed(3)
    pipe(x.requires_grad_(), target=y).backward()
    first, second, *again = MASKS  # computed, and computed again in the same order
    assert again
    assert all(map(torch.equal, again, (first, second)))
    MASKS.clear()
    assert torch.equal(*of_all_ranks(first)) == same_on_ranks
    assert torch.equal(first, second) == same_in_micro_batches


# ---- what is refused ------------------------------------------------------------------------------------------------


@runs_on(4)
def test_a_gradient_that_a_rank_of_a_layer_group_lacks_is_named(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """On all ranks, before any of them waits in a collective of the layers, so that the pipe goes on afterwards."""
    device_mesh = mesh_of(2, 2)
    pipe = pipe_of(blocks(device_mesh["tp"]), device_mesh)
    x, y = data()
    pipe(x, target=y).backward()
    if mesh.rank == 3:
        weight = pipe[0].up.weight  # of the layer 2
        gradient, weight.grad = weight.grad, None
    begin = groups.begin_gather

    def begin_and_hear(group: Any, values: Any) -> Callable[[], Tensor]:
        wait = begin(group, values)

        def finish() -> Tensor:
            """Rank 0 leaves if it hears of a failure, as it would if that came a moment earlier."""
            rows = wait()
            if (failure := pipe._backend.monitor.wait_for_failure(0.5)) is not None:  # type: ignore[attr-defined]
                raise groups.LostConnectionError(failure.rank)
            return rows

        return finish

    words = "of the ranks 2, 3, which compute the same layers together, only 3 has no gradient of 2.up.weight, so it"
    with monkeypatch.context() as patch:
        patch.setattr(groups, "begin_gather", begin if mesh.rank else begin_and_hear)
        with pytest.raises(ValueError, match=words):
            pipe.clip_grad_norm_(1.0)
    if mesh.rank == 3:
        weight.grad = gradient
    torch.testing.assert_close(pipe.clip_grad_norm_(1.0), norm_of(mean_gradients([7])))


@runs_on(2)
def test_workers_that_are_threads_are_refused(mesh: Mesh) -> None:
    device_mesh = mesh_of(2, names=("tp",))
    model = blocks(device_mesh["tp"])
    x, y = data()
    options: dict[str, Any] = {"devices": ["cpu", "cpu"], "schedule": "1f1b", "loss_fn": F.mse_loss}
    words = r"(?s)(?=.*let each worker)(?=.*Shard\(dim=0\) over tp).*this pipe has 2 workers that are threads"
    with pytest.raises(ValueError, match=words):
        Pipe(model, CHUNKS, **options)(x, target=y)
    pipe = Pipe(blocks(), CHUNKS, **options)
    pipe(x, target=y)
    parallelize_module(pipe[1], device_mesh["tp"], PLAN)  # afterwards
    with pytest.raises(ValueError, match="let each worker"):
        pipe(x, target=y)
    pipe = Pipe(model, CHUNKS, **options, debug="one_thread")
    pipe(x, target=y).backward()
    close(pipe, mean_gradients([7]))
