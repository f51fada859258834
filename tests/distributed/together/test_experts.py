"""Experts that are spread over dimensions of the mesh, beside the same experts in one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

from pipework import Mesh, Pipe
from tests.distributed.together.alike import of_all_ranks, refused, whole
from tests.distributed.together.sharding import WIDTH, data, mean_gradients, norm_of
from tests.jobs import runs_on

EXPERTS, LAYERS = 2, 2
OVER_EP = {"*.experts.*": "ep"}


class Exchange(torch.autograd.Function):
    """Equal parts of the rows go to all ranks of a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        exchanged = torch.empty_like(x)
        dist.all_to_all_single(exchanged, x.contiguous(), group=group)
        return exchanged

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return Exchange.forward(ctx, gradients[0], ctx.group), None


class Experts(nn.Module):
    """Each rank of a group has an expert of its own, which gets rows of all ranks of the group."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        every = [nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)]
        self.experts = nn.ModuleList(every if group is None else [every[dist.get_rank(group)]])
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.gate(x)
        if self.group is None:
            parts = hidden.tensor_split(EXPERTS)
            return x + torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        computed = self.experts[0](Exchange.apply(hidden, self.group))  # type: ignore[no-untyped-call]
        exchanged: Tensor = Exchange.apply(computed, self.group)  # type: ignore[no-untyped-call]
        return x + exchanged


class StackedExperts(nn.Module):
    """The same with the experts' weights in one DTensor, of which each rank has a part."""

    def __init__(self, plain: Experts, mesh: DeviceMesh) -> None:
        super().__init__()
        self.gate, self.group = plain.gate, mesh.get_group()
        every = [expert for expert in plain.experts if isinstance(expert, nn.Linear)]
        stacked = [torch.stack([getattr(each, name).detach() for each in every]) for name in ("weight", "bias")]
        self.weight, self.bias = (nn.Parameter(distribute_tensor(each, mesh, [Shard(0)])) for each in stacked)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, DTensor)
        assert isinstance(self.bias, DTensor)
        rows = Exchange.apply(self.gate(x), self.group)  # type: ignore[no-untyped-call]
        computed = F.linear(rows, self.weight.to_local()[0], self.bias.to_local()[0])
        exchanged: Tensor = Exchange.apply(computed, self.group)  # type: ignore[no-untyped-call]
        return x + exchanged


def experts(group: Any = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Experts(group) for _ in range(LAYERS)])


def stacked(mesh: DeviceMesh) -> nn.Sequential:
    return nn.Sequential(*[StackedExperts(each, mesh) for each in experts()])  # type: ignore[arg-type]


def check(pipe: Pipe, expert: int) -> None:
    """Two steps, whose gradients add up to twice those of one; then one norm for all ranks."""
    for _ in range(2):
        x, y = data(pipe.data_parallel_rank)
        pipe(x, target=y).backward()
    wanted = {name: 2 * each for name, each in mean_gradients(range(pipe.data_parallel_size), experts, 2).items()}
    for name, parameter in pipe.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        if name.count(".") == 1:  # stacked
            layer, _, kind = name.partition(".")
            assert isinstance(gradient, DTensor)
            torch.testing.assert_close(gradient.to_local()[0], wanted[f"{layer}.experts.{expert}.{kind}"])
        else:
            torch.testing.assert_close(whole(gradient), wanted[name.replace("experts.0", f"experts.{expert}")])
    torch.testing.assert_close(pipe.clip_grad_norm_(1.0), norm_of(wanted))


def pipe_of(module: nn.Sequential, mesh: Mesh, local_parameters: Any = ()) -> Pipe:
    workers = len(mesh.ranks)
    schedule = "zb-h1" if workers > 1 else "1f1b"
    balance = [LAYERS // workers] * workers
    mesh = replace(mesh, local_parameters=local_parameters)
    return Pipe(module, 2, balance=balance, schedule=schedule, loss_fn=F.mse_loss, mesh=mesh)


# ---- over the replicas ----------------------------------------------------------------------------------------------


@pytest.mark.thorough
@runs_on(4, dp=2)
def test_experts_over_the_replicas(mesh: Mesh) -> None:
    dp, expert = mesh.device_mesh["dp"], mesh.data_parallel_rank
    words = r"different values of 0.experts.0.weight, 0.experts.0.bias|1.experts.0.weight"
    with refused(rf"(?s)({words}).*local_parameters=\['\*.experts.\*'\]"):
        pipe_of(experts(dp.get_group()), mesh)
    check(pipe_of(experts(dp.get_group()), mesh, local_parameters=["*.experts.*"]), expert)
    check(pipe_of(stacked(dp), mesh), expert)


# ---- over a dimension of their own ----------------------------------------------------------------------------------


def over_some_replicas(sizes: tuple[int, int, int], names: tuple[str, str, str]) -> Mesh:
    device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    mesh = Mesh.of(device_mesh, replicas=("dp", "ep"))
    expert = device_mesh["ep"].get_local_rank()
    assert (mesh.data_parallel_size, mesh.data_parallel_rank) == (4, 2 * device_mesh["dp"].get_local_rank() + expert)
    check(pipe_of(experts(device_mesh["ep"].get_group()), mesh, local_parameters=OVER_EP), expert)
    check(pipe_of(stacked(device_mesh["ep"]), mesh), expert)
    return mesh


@runs_on(4)
def test_experts_over_a_dimension_with_data_of_its_own(mesh: Mesh) -> None:
    mesh = over_some_replicas((2, 1, 2), ("dp", "pp", "ep"))
    device_mesh, group = mesh.device_mesh, mesh.device_mesh["ep"].get_group()

    module = experts(group)
    for layer in module:  # what is not an expert is sharded over all replicas
        own = {each for name, each in layer.named_parameters() if "experts" in name}
        fully_shard(layer, mesh=device_mesh["dp", "ep"]._flatten(), ignored_params=own)
    check(pipe_of(module, mesh, local_parameters=OVER_EP), device_mesh["ep"].get_local_rank())

    # Experts that were seeded by the rank differ over "dp", too; those of one rank of "ep" must not.
    seeded = experts(group)
    with torch.no_grad():
        seeded[0].experts[0].weight.add_(mesh.data_parallel_rank)  # type: ignore[union-attr, index]
    for words, module, given in (
        ("the replicas have different values of 0.experts.0.weight", seeded, OVER_EP),
        ("has the dimension 'pp': wanted one of the mesh beside 'pp'", experts(group), {"*.experts.*": "pp"}),
        ("does not say over which of 'dp', 'ep'", experts(group), ["*.experts.*"]),
        (r"such as {'\*.experts.\*': 'ep'}: got {'\*.experts.\*': \(\)}", experts(group), {"*.experts.*": ()}),
    ):
        with refused(words, ValueError, TypeError):
            pipe_of(module, mesh, local_parameters=given)
        dist.barrier()
    module = experts(group)
    for layer in module:
        fully_shard(layer, mesh=device_mesh["dp"])
    words = r"shard over all replicas, here fully_shard\(layer, mesh=mesh\['dp', 'ep'\]._flatten\(\)\)"
    with refused(words):
        pipe_of(module, mesh, local_parameters=OVER_EP)(*data(0)[:1], target=data(0)[1])


class Lazy(nn.Module):
    """Experts of which the last one gets no rows, so that its rank has no gradient."""

    def __init__(self, inner: nn.Module, unused: bool) -> None:
        super().__init__()
        self.inner, self.unused = inner, unused

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.inner.gate(x)  # type: ignore[operator]
        return hidden if self.unused else hidden + F.linear(x, self.inner.weight.to_local()[0])  # type: ignore[operator, union-attr]


class Biased(nn.Module):
    """An expert with a buffer of its own, and a name that another layer has for its weight, too."""

    def __init__(self, weight: nn.Parameter, bias: float) -> None:
        super().__init__()
        self.mine = weight
        self.register_buffer("bias", torch.full((), bias))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.mine) + self.bias


@runs_on(4, dp=2)
def test_experts_in_one_stage_only(mesh: Mesh) -> None:
    def module(group: Any = None) -> nn.Sequential:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(group))

    torch.manual_seed(0)
    pipe = pipe_of(module(mesh.device_mesh["dp"].get_group()), mesh, local_parameters=["1.experts.*"])
    x, y = data(mesh.data_parallel_rank)
    pipe(x, target=y).backward()
    torch.testing.assert_close(pipe.clip_grad_norm_(1e9), norm_of(mean_gradients(range(2), module, 2)))
    rows = 1 + mesh.data_parallel_rank
    with refused("the replicas have 1 to 2 micro-batches"):
        pipe(x[:rows], target=y[:rows])


@runs_on(4, dp=2)
def test_a_part_without_a_gradient_a_buffer_and_a_tied_name(mesh: Mesh) -> None:
    replica, dp = mesh.data_parallel_rank, mesh.device_mesh["dp"]
    x, y = data(replica)
    pipe = pipe_of(nn.Sequential(*[Lazy(each, unused=replica == 1) for each in stacked(dp)]), mesh)
    pipe(x, target=y).backward()
    for weight in (each for name, each in pipe.named_parameters() if name.endswith("weight") and "gate" not in name):
        assert isinstance(weight.grad, DTensor)
        assert weight.grad.to_local().any() == (replica == 0)
    assert pipe.clip_grad_norm_(1.0) > 0

    torch.manual_seed(replica)
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    tied = nn.Sequential(*[Biased(weight, float(replica)) for _ in range(2)])
    pipe = pipe_of(tied, mesh, local_parameters=["1.mine", "*.bias"])
    assert pipe[0].bias == replica
    torch.testing.assert_close(pipe[0].mine, weight)
    pipe(x, target=y).backward()
    (first, norm), _, (second, _), _ = of_all_ranks([pipe[0].mine.grad, pipe.clip_grad_norm_(1e9)])
    assert not torch.equal(first, second)
    torch.testing.assert_close(norm, torch.linalg.vector_norm(torch.stack([first.norm(), second.norm()])))

    # What FSDP shards is of all replicas.
    module = experts(dp.get_group())
    for layer in module:
        fully_shard(layer, mesh=dp)
    with refused("leave it out of fully_shard by ignored_params="):
        pipe_of(module, mesh, local_parameters=["*.experts.*"])


@runs_on(4)
def test_experts_over_ranks_that_the_mesh_does_not_know(mesh: Mesh) -> None:
    """A DTensor over some of the replicas, of which the pipe's mesh knows nothing; and a frozen expert."""
    ranks, own = (
        init_device_mesh("cpu", sizes, mesh_dim_names=names)
        for sizes, names in (((4, 1), ("dp", "pp")), ((2, 2), ("edp", "ep")))
    )
    with pytest.raises(ValueError, match=r"0.weight is sharded over some of the replicas \(Shard\(dim=0\) over ep\)"):
        pipe_of(stacked(own["ep"]), Mesh.of(ranks))
    device_mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "pp", "ep"))
    mesh, module = Mesh.of(device_mesh, replicas=("dp", "ep")), experts(device_mesh["ep"].get_group())
    if device_mesh["ep"].get_local_rank() == 1:
        module[0].experts.requires_grad_(False)  # type: ignore[union-attr]
    pipe = pipe_of(module, mesh, local_parameters=OVER_EP)
    x, y = data(pipe.data_parallel_rank)
    pipe(x, target=y).backward()
    assert pipe.clip_grad_norm_(1.0) > 0


@pytest.mark.slow
@runs_on(8)
def test_three_dimensions_with_experts(mesh: Mesh) -> None:
    over_some_replicas((2, 2, 2), ("dp", "pp", "ep"))
    over_some_replicas((2, 2, 2), ("ep", "dp", "pp"))


# ---- over ranks that have the same data -----------------------------------------------------------------------------


@runs_on(4)
def test_shards_that_a_layer_cuts_by_hand_over_ranks_with_the_same_data(mesh: Mesh) -> None:
    """Each expert gets its part of the rows from all ranks, so that its gradient is as many times as large."""
    device_mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "pp", "tp"))
    mesh, tp = Mesh.of(device_mesh), device_mesh["tp"]
    module = experts(tp.get_group())
    for name, parameter in module.named_parameters():
        if "experts" in name:
            parameter.register_hook(lambda gradient: gradient / EXPERTS)
    check(pipe_of(module, mesh, local_parameters={"*.experts.*": "tp"}), tp.get_local_rank())
    for unknown in (("dp", "ep"), {"dp", "tp"}):
        with pytest.raises(ValueError, match="given other data"):
            Mesh.of(device_mesh, replicas=unknown)  # type: ignore[arg-type]
