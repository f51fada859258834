"""Layers that FSDP2 shards over the replicas: the bits of whole layers in replicas, and of FSDP2 without a pipe."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from pipework import Mesh, Pipe, PipelineError
from pipework.fsdp_private import FSDPStates
from pipework.testing import reference_step

Run = Callable[..., list[Any]]

WIDTH, CHUNKS = 8, 4


class Block(nn.Module):
    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


def model(kind: str = "whole", mesh: Any = None, **options: Any) -> nn.Sequential:
    """Four blocks: whole, sharded, or some of them and inner modules by themselves; their sizes do not divide."""
    torch.manual_seed(0)
    blocks = [Block(7 if number == 1 else 16) for number in range(4)]
    for number, block in enumerate(blocks):
        if kind == "nested" and number % 2:
            fully_shard(block.up, mesh=mesh, **options)
        if kind == "sharded" or (kind == "nested" and number != 2):
            fully_shard(block, mesh=mesh, **options)
    hinted = [block for block in blocks if isinstance(block, FSDPModule)]
    for one, other in itertools.pairwise(hinted):  # which is ignored: the other may be on another rank
        one.set_modules_to_forward_prefetch([other])
        other.set_modules_to_backward_prefetch([one])
    return nn.Sequential(*blocks)


def data(seed: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def whole(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same(one: Tensor | None, other: Tensor | None) -> bool:
    return (one is None) == (other is None) and (one is None or other is None or torch.equal(one, other))


STAGES = {"gpipe": 2, "1f1b": 2, "zb-h1": 2, "interleaved-1f1b": 4, "looped-bfs": 4, "zb-v": 4}


def beside_replicas(mesh: Mesh, cases: list[list[Any]]) -> list[str]:
    """Sharded layers and whole ones in replicas, for some steps of AdamW, with clipping and accumulation."""
    problems = []
    for schedule, mode, kind, inside, whole_stages in cases:
        options: dict[str, Any] = {
            "balance": [4 // STAGES[schedule]] * STAGES[schedule], "schedule": schedule,
            "mesh": replace(mesh, whole_stages=whole_stages),
        }  # fmt: skip
        if inside:
            options["loss_fn"] = F.mse_loss
        pipes = (
            Pipe(model(), CHUNKS, mode, **options),
            Pipe(model(kind, mesh.device_mesh["dp"]), CHUNKS, mode, **options),
        )
        optimizers = [torch.optim.AdamW(pipe.parameters(), lr=0.01) for pipe in pipes]
        fired: list[Tensor] = []
        for parameter in pipes[1].parameters():
            parameter.register_post_accumulate_grad_hook(fired.append)
        for step in range(3):
            losses: list[Tensor] = []
            wanted: dict[str, Tensor | None] = {}
            for pipe, optimizer in zip(pipes, optimizers, strict=True):
                torch.manual_seed(step)
                for again in range(2 if step == 1 else 1):
                    x, y = data(10 * step + mesh.data_parallel_rank + 5 * again)
                    loss = pipe(x, target=y) if inside else F.mse_loss(pipe(x, outputs="all"), y)
                    loss.backward(retain_graph=step == 2)
                    if step == 2:
                        loss.backward()
                losses.append(loss.detach())
                if pipe is pipes[0]:
                    wanted = {name: whole(each.grad) for name, each in pipe.named_parameters()}
                    wanted = {name: None if each is None else each.clone() for name, each in wanted.items()}
                else:
                    problems += [
                        f"{schedule} {mode} {kind} {inside} step {step}: the gradient of {name} differs"
                        for name, each in pipe.named_parameters()
                        if not same(wanted[name], whole(each.grad))
                    ]
                losses.append(pipe.clip_grad_norm_(100.0))  # which scales nothing, as norms differ in the last bit
                optimizer.step()
                optimizer.zero_grad()
            if not torch.equal(losses[0], losses[2]) or not torch.allclose(losses[1], losses[3]):
                problems.append(f"{schedule} {mode} {kind} {inside} step {step}: {losses}")
        if len(fired) != 5 * len(list(pipes[1].parameters())):
            problems.append(f"{schedule} {mode} {kind}: hooks were called {len(fired)} times")
        x, y = data(3)
        for pipe in pipes:
            pipe.eval()
        with torch.no_grad():
            outputs = [pipe(x, outputs="all") for pipe in pipes]
        if not torch.equal(*outputs):
            problems.append(f"{schedule} {mode} {kind}: evaluations differ")
    return problems


# ---- FSDP2 without a pipe -------------------------------------------------------------------------------------------


def beside_fsdp(mesh: Mesh) -> list[str]:
    """In bfloat16, gradients reduced in float32 or in bfloat16: the micro-batches of a pipe, and of a plain loop."""
    problems = []
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    group = device_mesh["dp"]
    for reduced in (torch.float32, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
        plain = model("sharded", group, mp_policy=policy)
        fully_shard(plain, mesh=group, mp_policy=policy)  # the root
        pipe = Pipe(
            model("sharded", group, mp_policy=policy), CHUNKS, "always", balance=[2, 2], schedule="1f1b",
            loss_fn=loss_of, mesh=Mesh.of(device_mesh, whole_stages=1),
        )  # fmt: skip
        for module in (plain, pipe):
            for each in module.modules():
                if isinstance(each, nn.Dropout):
                    each.p = 0.0
        x, y = data(device_mesh["dp"].get_local_rank())
        loss = pipe(x, target=y)
        loss.backward()
        plain.set_requires_gradient_sync(False)  # type: ignore[attr-defined]
        rows = list(zip(x.chunk(CHUNKS), y.chunk(CHUNKS), strict=True))
        for number, (part, target) in enumerate(rows):
            plain.set_requires_gradient_sync(number + 1 == CHUNKS)  # type: ignore[attr-defined]
            (loss_of(plain(part), target) / CHUNKS).backward()
        named = dict(plain.named_parameters())
        problems += [
            f"reduced in {reduced}: the gradient of {name} differs"
            for name, each in pipe.named_parameters()
            if not same(whole(named[name].grad), whole(each.grad))
        ]
    return problems


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target)


# ---- with tensor parallelism ----------------------------------------------------------------------------------------


def three_dimensions(mesh: Mesh, shape: list[int]) -> list[str]:
    """dp x pp x tp: FSDP2 over tensor parallel layers, beside the whole model on each replica's rows."""
    device_mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("dp", "pp", "tp"))
    replica = device_mesh["dp"].get_local_rank()
    layers = nn.Sequential(*[Block() for _ in range(4)])

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        blocks = nn.Sequential(*[Block() for _ in range(4)])
        for block in blocks:
            block.dropout.p = 0.0
        return blocks

    layers = made()
    for block in layers:
        parallelize_module(block, device_mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=device_mesh["dp"])
    stages = shape[1]
    pipe = Pipe(
        layers, CHUNKS, balance=[4 // stages] * stages, schedule="zb-h1" if stages > 1 else "1f1b",
        loss_fn=F.mse_loss, mesh=Mesh.of(device_mesh, whole_stages=1),
    )  # fmt: skip
    plain = made()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (plain, pipe)]
    problems = []
    for step in range(2):
        total: dict[str, Tensor] = {}
        losses = []
        for other in range(shape[0]):
            losses.append(reference_step(plain, *data(10 * step + other), F.mse_loss, chunks=CHUNKS, key=0).loss)
            for name, parameter in plain.named_parameters():
                assert parameter.grad is not None
                total[name] = total.get(name, torch.zeros(())) + parameter.grad / shape[0]
                parameter.grad = None
        x, y = data(10 * step + replica)
        loss = pipe(x, target=y)
        loss.backward()
        torch.testing.assert_close(loss.detach(), losses[replica])
        for name, parameter in plain.named_parameters():
            parameter.grad = total[name]
        for name, parameter in pipe.named_parameters():
            found = whole(parameter.grad)
            if found is None or not torch.allclose(found, total[name], rtol=1e-4, atol=1e-6):
                problems.append(f"{shape} step {step}: the gradient of {name} is wrong")
        torch.testing.assert_close(
            pipe.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1), rtol=1e-4, atol=1e-6
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return problems


# ---- what is gathered, and what is refused --------------------------------------------------------------------------


class Unused(nn.Module):
    """One of its weights is used in the second replica alone, the other in none."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.uses = False

    def forward(self, x: Tensor) -> Tensor:
        return self.sometimes(self.always(x)) if self.uses else self.always(x)


def gathers(mesh: Mesh) -> dict[str, Any]:
    device_mesh, found = mesh.device_mesh, {}
    group = device_mesh["dp"]
    counts: list[int] = []
    unshard = FSDPStates.unshard

    def counted(states: FSDPStates) -> None:
        counts.append(1)
        unshard(states)

    def pipe_of(layers: nn.Sequential, whole_stages: int | None = None, **options: Any) -> Pipe:
        stages = options.pop("stages", 4)
        balance = [len(layers) // stages] * stages
        own = replace(mesh, whole_stages=whole_stages)
        return Pipe(layers, CHUNKS, balance=balance, loss_fn=F.mse_loss, mesh=own, **options)

    FSDPStates.unshard = counted  # type: ignore[method-assign]
    for schedule, whole_stages in (("looped-bfs", None), ("looped-bfs", 1), ("interleaved-1f1b", 1)):
        pipe = pipe_of(model("sharded", group), schedule=schedule, whole_stages=whole_stages)
        x, y = data(0)
        pipe(x, target=y).backward()
        counts.clear()
        pipe(x, target=y).backward()
        found[f"{schedule} {whole_stages}"] = len(counts)
        held = [each.untyped_storage().nbytes() for each in storages(pipe)]
        found[f"{schedule} {whole_stages} held"] = max(held)

    layers = nn.Sequential(Unused(), Unused())
    for layer in layers:
        layer.uses = mesh.data_parallel_rank == 1
        fully_shard(layer, mesh=group)
    pipe = pipe_of(layers, schedule="1f1b", stages=2)
    x, y = data(0)
    pipe(x, target=y).backward()
    found["gradients"] = [name for name, each in pipe.named_parameters() if each.grad is not None]
    return found


class Calls(torch.autograd.Function):
    """Calls a function in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[], None]) -> Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.function()
        return gradients[0], None


class Called(nn.Module):
    def __init__(self, block: nn.Module, function: Callable[[], None]) -> None:
        super().__init__()
        self.block, self.function = block, function

    def forward(self, x: Tensor) -> Tensor:
        called: Tensor = Calls.apply(x, self.function)  # type: ignore[no-untyped-call]
        output: Tensor = self.block(called)
        return output


def differences(mesh: Mesh) -> list[str]:
    """Replicas that train other parameters of one size, and that have other numbers of micro-batches."""
    told = []

    def fails(pipe: Pipe, rows: int = 8) -> None:
        x, y = data(0, rows)
        dist.barrier()
        with pytest.raises((ValueError, PipelineError)) as caught:
            pipe(x, target=y).backward()
        told.append(str(caught.value))
        dist.barrier()

    replica = mesh.data_parallel_rank
    frozen = model("sharded", mesh.device_mesh["dp"])
    for block in frozen:
        (block.norm.bias if replica else block.norm.weight).requires_grad_(False)  # type: ignore[union-attr,operator]
    fails(Pipe(frozen, CHUNKS, balance=[2, 2], schedule="1f1b", loss_fn=F.mse_loss, mesh=mesh))
    pipe = Pipe(
        model("sharded", mesh.device_mesh["dp"]), CHUNKS, balance=[1] * 4, schedule="interleaved-1f1b",
        loss_fn=F.mse_loss, mesh=replace(mesh, whole_stages=1),
    )  # fmt: skip
    fails(pipe, rows=2 if replica else 8)
    return told


def first_in_inference_mode(mesh: Mesh) -> None:
    """Whole parameters, which are made in the first call, are trained in the next one."""
    pipe = Pipe(
        model("sharded", mesh.device_mesh["dp"]), CHUNKS, balance=[2, 2], schedule="1f1b", loss_fn=F.mse_loss, mesh=mesh
    )
    x, y = data(0)
    with torch.inference_mode():
        pipe(x, target=y)
    pipe(x, target=y).backward()
    assert all(parameter.grad is not None for parameter in pipe.parameters())


def storages(pipe: Pipe) -> list[Tensor]:
    """The whole parameters of a pipe, which have no memory between its calls."""
    return [
        each.whole
        for stage in pipe.partitions
        for each in FSDPStates([layer for layer in stage if isinstance(layer, FSDPModule)]).parameters
    ]


def refusals(mesh: Mesh) -> list[str]:
    device_mesh = mesh.device_mesh
    told = []

    def refused(layers: nn.Sequential, **options: Any) -> None:
        with pytest.raises((TypeError, ValueError, PipelineError)) as caught:
            Pipe(layers, CHUNKS, schedule="1f1b", loss_fn=F.mse_loss, **options)(*data(0)[:1], target=data(0)[1])
        told.append(str(caught.value))

    refused(model("sharded"), mesh=mesh, balance=[2, 2])  # over all ranks
    refused(model("sharded", device_mesh["dp"]), balance=[4], devices=["cpu"])  # no mesh
    sharded = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "other"))
    refused(model("sharded", sharded["other"]), mesh=sharded, balance=[2, 2])
    refused(model("sharded", device_mesh["dp"]), mesh=device_mesh["pp"], balance=[2, 2])  # a slice
    whole = model("sharded", device_mesh["dp"])
    fully_shard(whole, mesh=device_mesh["dp"])
    refused(whole, mesh=mesh, balance=[2, 2])
    refused(
        model("sharded", device_mesh["dp"], offload_policy=CPUOffloadPolicy(pin_memory=False)),
        mesh=mesh,
        balance=[2, 2],
    )
    grouped = model()
    fully_shard([grouped[0], grouped[1]], mesh=device_mesh["dp"])
    refused(grouped, mesh=mesh, balance=[2, 2])
    hybrid = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "dp", "pp"))
    refused(model("sharded", hybrid["replicate", "dp"]), mesh=hybrid, balance=[2, 2])
    return told


SAMPLE = [
    ("1f1b", "never", "sharded", True, None),
    ("zb-h1", "except_last", "nested", True, 1),
    ("looped-bfs", "always", "sharded", False, 1),
    ("zb-v", "never", "sharded", True, 1),
]


def test_the_bits_of_replicas(on_ranks: Run) -> None:
    for problems in on_ranks(4, beside_replicas, init={"dp": 2}, cases=SAMPLE):
        assert not problems


@pytest.mark.slow
@pytest.mark.parametrize("schedule", STAGES)
def test_every_schedule_and_mode(on_ranks: Run, schedule: str) -> None:
    cases = [
        (schedule, mode, kind, True, whole_stages)
        for mode in ("never", "always")
        for kind, whole_stages in (("sharded", None), ("nested", 1))
    ]
    for problems in on_ranks(4, beside_replicas, init={"dp": 2}, cases=cases, patience=200.0):
        assert not problems


def test_the_bits_of_fsdp_without_a_pipe(on_ranks: Run) -> None:
    for problems in on_ranks(4, beside_fsdp):
        assert not problems


@pytest.mark.parametrize("shape", [[2, 1, 2], [2, 2, 1], pytest.param([2, 2, 2], marks=pytest.mark.slow)])
def test_with_tensor_parallelism(on_ranks: Run, shape: list[int]) -> None:
    for problems in on_ranks(math.prod(shape), three_dimensions, shape=shape, patience=120.0):
        assert not problems


def test_what_is_gathered(on_ranks: Run) -> None:
    for rank, found in enumerate(on_ranks(4, gathers, init={"dp": 2})):
        assert found["looped-bfs None"] == 2  # each of two stages once
        assert found["looped-bfs 1"] == 3  # the last one goes backward at once
        assert found["interleaved-1f1b 1"] > 3
        assert [found[name] for name in found if name.endswith("held")] == [0, 0, 0]
        layer = rank % 2
        names = [f"{layer}.{name}.{what}" for name in ("always", "sometimes") for what in ("weight", "bias")]
        assert sorted(found["gradients"]) == sorted(names)


def test_replicas_that_differ(on_ranks: Run) -> None:
    for trained, counts in on_ranks(4, differences, init={"dp": 2}):
        assert "the replicas train different parameters: " in trained
        assert "norm.weight, " in trained
        assert "the replicas have 2 to 4 micro-batches, and whole_stages, or layers with local_parameters" in counts


def test_the_first_call_may_be_in_inference_mode(on_ranks: Run) -> None:
    on_ranks(4, first_in_inference_mode, init={"dp": 2})


def test_what_is_refused(on_ranks: Run) -> None:
    for everywhere, threads, other, sliced, whole, offloaded, grouped, hybrid in on_ranks(4, refusals, init={"dp": 2}):
        assert "is sharded over ranks 0, 1, 2, 3, and ranks " in everywhere
        assert "its workers are threads" in threads
        assert "not over the replicas of the pipe" in other
        assert "Give Pipe the whole mesh with all dimensions" in sliced
        assert "leave fully_shard(model) out, and shard each layer" in whole
        assert "fully_shard was called with CPUOffloadPolicy, which layers of a pipe cannot have" in offloaded
        assert "fully_shard was called with several layers at once" in grouped
        assert "fully_shard was called with HSDP (a mesh of two dimensions), which" in hybrid
