"""Layers that FSDP2 shards over the replicas: the bits of whole layers in replicas, and of FSDP2 without a pipe."""

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from pipework import Mesh, Pipe
from pipework.fsdp_private import FSDPStates
from tests.distributed.together.alike import of_all_ranks, other_gradients, refused, whole
from tests.distributed.together.sharding import CHUNKS, WIDTH, Block, blocks, data, mean_gradients
from tests.exactness.test_offload import reserved
from tests.jobs import runs_on


def model(kind: str = "whole", mesh: Any = None, dropout: float = 0.2, **options: Any) -> nn.Sequential:
    """Four blocks: whole, sharded, or some of them and inner modules by themselves; their sizes do not divide."""
    torch.manual_seed(0)
    layers = [Block(7 if number == 1 else 16, dropout) for number in range(4)]
    for number, block in enumerate(layers):
        if kind == "nested" and number % 2:
            fully_shard(block.up, mesh=mesh, **options)
        if kind == "sharded" or (kind == "nested" and number != 2):
            fully_shard(block, mesh=mesh, **options)
    hinted = [block for block in layers if isinstance(block, FSDPModule)]
    for one, other in itertools.pairwise(hinted):  # which is ignored: the other may be on another rank
        one.set_modules_to_forward_prefetch([other])
        other.set_modules_to_backward_prefetch([one])
    return nn.Sequential(*layers)


STAGES = {"gpipe": 2, "1f1b": 2, "zb-h1": 2, "interleaved-1f1b": 4, "looped-bfs": 4, "zb-v": 4}


def pipe_of(layers: nn.Sequential, mesh: Mesh, schedule: str = "1f1b", mode: str = "never", **options: Any) -> Pipe:
    options = {"loss_fn": F.mse_loss, **options}
    stages = STAGES[schedule]
    balance = [len(layers) // stages] * stages
    return Pipe(layers, CHUNKS, mode, balance=balance, schedule=schedule, mesh=mesh, **options)


SLOW = [
    pytest.param(schedule, mode, kind, True, whole_stages, offload, marks=pytest.mark.slow)
    for offload in (False, "activations", 1)
    for schedule in STAGES
    for mode in ("never", "always")
    for kind, whole_stages in (("sharded", None), ("nested", 1))
]


@pytest.mark.parametrize(
    ("schedule", "mode", "kind", "inside", "whole_stages", "offload"),
    [
        ("1f1b", "never", "sharded", True, None, False),
        ("zb-h1", "except_last", "nested", True, 1, False),
        ("looped-bfs", "always", "sharded", False, 1, 1),
        ("zb-v", "never", "sharded", True, 1, "activations"),
        ("interleaved-1f1b", "never", "nested", True, 1, "activations"),
        ("gpipe", "except_last", "sharded", True, None, 1),
        ("looped-bfs", "never", "whole", True, None, "activations"),
        *SLOW,
    ],
)
@runs_on(4, dp=2)
def test_the_bits_of_replicas(
    mesh: Mesh, schedule: str, mode: str, kind: str, inside: bool, whole_stages: int | None, offload: bool | int | str
) -> None:
    """Sharded layers and whole ones in replicas, for some steps of AdamW, with clipping and accumulation.

    Activations of the sharded ones may go to host memory.
    """
    sharing = replace(mesh, whole_stages=whole_stages)
    options: dict[str, Any] = {} if inside else {"loss_fn": None}
    sharded = model(kind, mesh.device_mesh["dp"])
    pipes = [
        pipe_of(model(), sharing, schedule, mode, **options),
        pipe_of(sharded, sharing, schedule, mode, offload=offload, **options),
    ]
    optimizers = [torch.optim.AdamW(pipe.parameters(), lr=0.01) for pipe in pipes]
    fired: list[Tensor] = []
    for parameter in pipes[1].parameters():
        parameter.register_post_accumulate_grad_hook(fired.append)
    for step in range(3):
        losses = []
        for pipe in pipes:
            torch.manual_seed(step)
            for again in range(2 if step == 1 else 1):
                x, y = data(10 * step + mesh.data_parallel_rank + 5 * again)
                loss = pipe(x, target=y) if inside else F.mse_loss(pipe(x, outputs="all"), y)
                loss.backward(retain_graph=step == 2)
                if step == 2:
                    loss.backward()
            losses.append(loss.detach())
        assert torch.equal(*losses)
        assert other_gradients(*pipes) == []
        # It scales nothing, as norms differ in the last bit.
        torch.testing.assert_close(*[pipe.clip_grad_norm_(100.0) for pipe in pipes])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert len(fired) == 5 * len(list(pipes[1].parameters()))
    assert any(of_all_ranks(reserved(pipes[1]))) == bool(offload)
    for pipe in pipes:
        pipe.eval()
    with torch.no_grad():
        assert torch.equal(*[pipe(data(3)[0], outputs="all") for pipe in pipes])


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target)


@pytest.mark.parametrize("reduced", ["float32", "bfloat16"])
@runs_on(4)
def test_the_bits_of_fsdp_without_a_pipe(mesh: Mesh, reduced: str) -> None:
    """In bfloat16, gradients reduced in float32 or in bfloat16: the micro-batches of a pipe, and of a plain loop."""
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, reduced))
    plain, layers = (model("sharded", device_mesh["dp"], 0.0, mp_policy=policy) for _ in range(2))
    fully_shard(plain, mesh=device_mesh["dp"], mp_policy=policy)  # the root
    pipe = pipe_of(layers, Mesh.of(device_mesh, whole_stages=1), mode="always", loss_fn=loss_of)
    x, y = data(device_mesh["dp"].get_local_rank())
    pipe(x, target=y).backward()
    rows = list(zip(x.chunk(CHUNKS), y.chunk(CHUNKS), strict=True))
    for number, (part, target) in enumerate(rows):
        plain.set_requires_gradient_sync(number + 1 == CHUNKS)  # type: ignore[attr-defined]
        (loss_of(plain(part), target) / CHUNKS).backward()
    assert other_gradients(pipe, plain) == []


@pytest.mark.parametrize(
    ("ranks", "shape"), [(4, [2, 1, 2]), (4, [2, 2, 1]), pytest.param(8, [2, 2, 2], marks=pytest.mark.slow)]
)
@runs_on()
def test_with_tensor_parallelism(mesh: Mesh, shape: list[int]) -> None:
    """dp x pp x tp: FSDP2 over tensor parallel layers, beside the whole model on each replica's rows."""
    device_mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("dp", "pp", "tp"))
    layers, plain = blocks(device_mesh["tp"]), blocks()
    for block in layers:
        fully_shard(block, mesh=device_mesh["dp"])
    schedule = {"schedule": "zb-h1" if shape[1] > 1 else "1f1b"}
    pipe = Pipe(layers, CHUNKS, **schedule, loss_fn=F.mse_loss, mesh=Mesh.of(device_mesh, whole_stages=1))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (plain, pipe)]
    for step in range(2):
        total = mean_gradients([10 * step + replica for replica in range(shape[0])], lambda: copy.deepcopy(plain))
        x, y = data(10 * step + device_mesh["dp"].get_local_rank())
        loss = pipe(x, target=y)
        loss.backward()
        torch.testing.assert_close(loss.detach(), F.mse_loss(plain(x), y).detach())
        for name, parameter in plain.named_parameters():
            parameter.grad = total[name].clone()
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(whole(parameter.grad), total[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(
            pipe.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1), rtol=1e-4, atol=1e-6
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


# ---- what is gathered, and what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "whole_stages", "counts"),
    [
        ("looped-bfs", None, [2]),  # each of two stages once
        ("looped-bfs", 1, [3]),  # the last one goes backward at once
        ("interleaved-1f1b", 1, [*range(4, 99)]),
    ],
)
@runs_on(4, dp=2)
def test_what_is_gathered(
    mesh: Mesh, schedule: str, whole_stages: int | None, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    unshard, found = FSDPStates.unshard, []

    def counted(states: FSDPStates) -> None:
        found.append(1)
        unshard(states)

    monkeypatch.setattr(FSDPStates, "unshard", counted)
    pipe = pipe_of(model("sharded", mesh.device_mesh["dp"]), replace(mesh, whole_stages=whole_stages), schedule)
    x, y = data(0)
    pipe(x, target=y).backward()
    found.clear()
    pipe(x, target=y).backward()
    assert len(found) in counts
    for stage in pipe.partitions:  # between calls, whole parameters have no memory
        for each in FSDPStates([layer for layer in stage if isinstance(layer, FSDPModule)]).parameters:
            assert each.whole.untyped_storage().nbytes() == 0


class Unused(nn.Module):
    """One of its weights is used in the second replica alone, the other in none."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.uses = False

    def forward(self, x: Tensor) -> Tensor:
        return self.sometimes(self.always(x)) if self.uses else self.always(x)


@runs_on(4, dp=2)
def test_which_parameters_get_a_gradient(mesh: Mesh) -> None:
    layers = nn.Sequential(Unused(), Unused())
    for layer in layers:
        layer.uses = mesh.data_parallel_rank == 1
        fully_shard(layer, mesh=mesh.device_mesh["dp"])
    pipe = pipe_of(layers, mesh)
    x, y = data(0)
    pipe(x, target=y).backward()
    names = {name for name, each in pipe.named_parameters() if each.grad is not None}
    wanted = [f"{name}.{what}" for name in ("always", "sometimes") for what in ("weight", "bias")]
    assert names == {f"{mesh.rank % 2}.{name}" for name in wanted}


@runs_on(4, dp=2)
def test_replicas_that_differ(mesh: Mesh) -> None:
    """They train other parameters of one size, or have other numbers of micro-batches."""
    replica = mesh.data_parallel_rank
    frozen = model("sharded", mesh.device_mesh["dp"])
    for block in frozen:
        (block.norm.bias if replica else block.norm.weight).requires_grad_(False)  # type: ignore[union-attr,operator]
    counts = "the replicas have 2 to 4 micro-batches, and whole_stages, or layers with local_parameters"
    for words, layers, options, rows in (
        ("the replicas train different parameters: .*norm.weight, ", frozen, {}, 8),
        (
            counts,
            model("sharded", mesh.device_mesh["dp"]),
            {"schedule": "interleaved-1f1b", "whole_stages": 1},
            2 if replica else 8,
        ),
    ):
        own = replace(mesh, whole_stages=options.pop("whole_stages", None))
        pipe = pipe_of(layers, own, **options)
        x, y = data(0, rows)
        dist.barrier()
        with refused(words):
            pipe(x, target=y).backward()
        dist.barrier()


@runs_on(4, dp=2)
def test_the_first_call_may_be_in_inference_mode(mesh: Mesh) -> None:
    """Whole parameters, which are made in the first call, are trained in the next one."""
    pipe = pipe_of(model("sharded", mesh.device_mesh["dp"]), mesh)
    x, y = data(0)
    with torch.inference_mode():
        pipe(x, target=y)
    pipe(x, target=y).backward()
    assert all(parameter.grad is not None for parameter in pipe.parameters())


@runs_on(4, dp=2)
def test_what_is_refused(mesh: Mesh) -> None:
    dp, pp = mesh.device_mesh["dp"], mesh.device_mesh["pp"]
    sharded = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "other"))
    root, grouped = model("sharded", dp), model()
    fully_shard(root, mesh=dp)
    fully_shard([grouped[0], grouped[1]], mesh=dp)
    hybrid = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "dp", "pp"))
    offloaded = model("sharded", dp, offload_policy=CPUOffloadPolicy(pin_memory=False))
    cases: list[tuple[str, nn.Sequential, Any]] = [
        ("is sharded over ranks 0, 1, 2, 3, and ranks ", model("sharded"), mesh),
        ("its workers are threads", model("sharded", dp), None),
        ("not over the replicas of the pipe", model("sharded", sharded["other"]), sharded),
        ("Give Pipe the whole mesh with all dimensions", model("sharded", dp), pp),
        (r"leave fully_shard\(model\) out, and shard each layer", root, mesh),
        ("fully_shard was called with CPUOffloadPolicy, which layers of a pipe cannot have", offloaded, mesh),
        ("fully_shard was called with several layers at once", grouped, mesh),
        (r"with HSDP \(a mesh of two dimensions\), which", model("sharded", hybrid["replicate", "dp"]), hybrid),
    ]
    x, y = data(0)
    for words, layers, given in cases:
        workers = {"devices": ["cpu"]} if given is None else {"mesh": given}
        with refused(words, ValueError, TypeError):
            Pipe(layers, CHUNKS, schedule="1f1b", loss_fn=F.mse_loss, **workers)(x, target=y)
