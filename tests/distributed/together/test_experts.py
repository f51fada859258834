"""Experts that are spread over dimensions of the mesh, beside the same experts in one process."""

from collections.abc import Callable
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

from pipework import Mesh, Pipe, PipelineError
from pipework.testing import reference_step

Run = Callable[..., list[Any]]

WIDTH, EXPERTS, LAYERS = 8, 2, 2


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


def data(replica: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(replica)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def experts(group: Any = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Experts(group) for _ in range(LAYERS)])


def mean_gradients(replicas: int) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for replica in range(replicas):
        plain = experts()
        reference_step(plain, *data(replica), F.mse_loss, chunks=2, key=0)
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            total[name] = total.get(name, torch.zeros(())) + parameter.grad / replicas
    return total


def check(pipe: Pipe, expert: int, *, whole: Callable[[Tensor], Tensor] | None = None) -> None:
    """Two steps, whose gradients add up to twice those of one; then one norm for all ranks."""
    for _ in range(2):
        x, y = data(pipe.data_parallel_rank)
        pipe(x, target=y).backward()
    wanted = {name: 2 * gradient for name, gradient in mean_gradients(pipe.data_parallel_size).items()}
    for name, parameter in pipe.named_parameters():
        assert parameter.grad is not None
        gradient = parameter.grad
        if name.endswith((".weight", ".bias")) and name.count(".") == 1:  # stacked
            layer, _, kind = name.partition(".")
            assert isinstance(gradient, DTensor)
            torch.testing.assert_close(gradient.to_local()[0], wanted[f"{layer}.experts.{expert}.{kind}"])
        else:
            found = gradient if whole is None else whole(gradient)
            torch.testing.assert_close(found, wanted[name.replace("experts.0", f"experts.{expert}")])
    true = torch.linalg.vector_norm(torch.stack([each.norm() for each in wanted.values()]))
    torch.testing.assert_close(pipe.clip_grad_norm_(1.0), true)


def pipe_of(module: nn.Sequential, mesh: Mesh, local_parameters: Any = ()) -> Pipe:
    workers = len(mesh.ranks)
    schedule = "zb-h1" if workers > 1 else "1f1b"
    balance = [LAYERS // workers] * workers
    mesh = replace(mesh, local_parameters=local_parameters)
    return Pipe(module, 2, balance=balance, schedule=schedule, loss_fn=F.mse_loss, mesh=mesh)


# ---- over the replicas ----------------------------------------------------------------------------------------------


def over_replicas(mesh: Mesh) -> str:
    group, expert = mesh.device_mesh["dp"].get_group(), mesh.data_parallel_rank
    with pytest.raises((ValueError, PipelineError)) as caught:
        pipe_of(experts(group), mesh)
    check(pipe_of(experts(group), mesh, local_parameters=["*.experts.*"]), expert)
    stacked = nn.Sequential(*[StackedExperts(each, mesh.device_mesh["dp"]) for each in experts()])  # type: ignore[arg-type]
    check(pipe_of(stacked, mesh), expert)
    return str(caught.value)


def test_experts_over_the_replicas(on_ranks: Run) -> None:
    for text in on_ranks(4, over_replicas, init={"dp": 2}):
        assert "different values of 0.experts.0.weight, 0.experts.0.bias" in text or "1.experts.0.weight" in text
        assert "local_parameters=['*.experts.*']" in text


# ---- over a dimension of their own ----------------------------------------------------------------------------------


def over_some_replicas(sizes: tuple[int, int, int], names: tuple[str, str, str]) -> Mesh:
    device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    mesh = Mesh.of(device_mesh, replicas=("dp", "ep"))
    expert = device_mesh["ep"].get_local_rank()
    assert (mesh.data_parallel_size, mesh.data_parallel_rank) == (4, 2 * device_mesh["dp"].get_local_rank() + expert)
    group = device_mesh["ep"].get_group()
    check(pipe_of(experts(group), mesh, local_parameters={"*.experts.*": "ep"}), expert)
    stacked = nn.Sequential(*[StackedExperts(each, device_mesh["ep"]) for each in experts()])  # type: ignore[arg-type]
    check(pipe_of(stacked, mesh), expert)
    return mesh


def a_dimension_of_experts(_: Mesh) -> list[str]:
    mesh = over_some_replicas((2, 1, 2), ("dp", "pp", "ep"))
    device_mesh, group = mesh.device_mesh, mesh.device_mesh["ep"].get_group()
    expert = device_mesh["ep"].get_local_rank()

    module = experts(group)
    for layer in module:  # what is not an expert is sharded over all replicas
        own = {each for name, each in layer.named_parameters() if "experts" in name}
        fully_shard(layer, mesh=device_mesh["dp", "ep"]._flatten(), ignored_params=own)

    def whole(gradient: Tensor) -> Tensor:
        return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient

    check(pipe_of(module, mesh, local_parameters={"*.experts.*": "ep"}), expert, whole=whole)

    # Experts that were seeded by the rank differ over "dp", too; those of one rank of "ep" must not.
    module = experts(group)
    with torch.no_grad():
        module[0].experts[0].weight.add_(mesh.data_parallel_rank)  # type: ignore[union-attr, index]
    told = []
    for given in (module, dict.fromkeys(["*.experts.*"], "pp"), ["*.experts.*"], {"*.experts.*": ()}):
        is_module = isinstance(given, nn.Sequential)
        pattern = {"*.experts.*": "ep"} if is_module else given
        with pytest.raises((ValueError, TypeError, PipelineError)) as caught:
            pipe_of(module if is_module else experts(group), mesh, local_parameters=pattern)
        told.append(str(caught.value))
        dist.barrier()
    module = experts(group)
    for layer in module:
        fully_shard(layer, mesh=device_mesh["dp"])
    with pytest.raises((ValueError, PipelineError), match=r"_flatten\(\)") as caught:
        pipe_of(module, mesh, local_parameters={"*.experts.*": "ep"})(*data(0)[:1], target=data(0)[1])
    told.append(str(caught.value))
    return told


def test_experts_over_a_dimension_with_data_of_its_own(on_ranks: Run) -> None:
    for seeds, unknown, unsaid, empty, sharded in on_ranks(4, a_dimension_of_experts):
        assert "the replicas have different values of 0.experts.0.weight" in seeds
        assert "local_parameters has the dimension 'pp': wanted one of the mesh beside 'pp'" in unknown
        assert "does not say over which of 'dp', 'ep'" in unsaid
        assert "such as {'*.experts.*': 'ep'}: got {'*.experts.*': ()}" in empty
        assert "shard over all replicas, here fully_shard(layer, mesh=mesh['dp', 'ep']._flatten())" in sharded


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


def odd_experts(mesh: Mesh) -> list[str]:
    """Two replicas of two workers."""
    replica, dp = mesh.data_parallel_rank, mesh.device_mesh["dp"]
    told = []

    # Experts in one stage only, beside one that has none.
    torch.manual_seed(0)
    pipe = pipe_of(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(dp.get_group())), mesh, local_parameters=["1.experts.*"]
    )
    total: dict[str, Tensor] = {}
    for seed in range(2):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(None))
        reference_step(plain, *data(seed), F.mse_loss, chunks=2, key=0)
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            total[name] = total.get(name, torch.zeros(())) + parameter.grad / 2
    x, y = data(replica)
    pipe(x, target=y).backward()
    true = torch.linalg.vector_norm(torch.stack([each.norm() for each in total.values()]))
    torch.testing.assert_close(pipe.clip_grad_norm_(1e9), true)

    # As many micro-batches on each.
    with pytest.raises((ValueError, PipelineError)) as caught:
        pipe(x[: 1 + replica], target=y[: 1 + replica])
    told.append(str(caught.value))
    dist.barrier()

    # A part of a DTensor without a gradient.
    layers = nn.Sequential(*[Lazy(StackedExperts(each, dp), unused=replica == 1) for each in experts()])  # type: ignore[arg-type]
    pipe = pipe_of(layers, mesh)
    pipe(x, target=y).backward()
    weights = [each for name, each in pipe.named_parameters() if name.endswith("weight") and "gate" not in name]
    for weight in weights:
        assert isinstance(weight.grad, DTensor)
        assert weight.grad.to_local().any() == (replica == 0)
    assert pipe.clip_grad_norm_(1.0) > 0

    # A buffer of an expert, and one name of a tied parameter.
    torch.manual_seed(replica)
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    tied = nn.Sequential(*[Biased(weight, float(replica)) for _ in range(2)])
    pipe = pipe_of(tied, mesh, local_parameters=["1.mine", "*.bias"])
    assert pipe[0].bias == replica
    torch.testing.assert_close(pipe[0].mine, weight)
    pipe(x, target=y).backward()
    gathered: list[Any] = [None] * 4
    dist.all_gather_object(gathered, [pipe[0].mine.grad, pipe.clip_grad_norm_(1e9)])
    assert not torch.equal(gathered[0][0], gathered[2][0])
    norms = torch.stack([gathered[0][0].norm(), gathered[2][0].norm()])
    torch.testing.assert_close(gathered[0][1], torch.linalg.vector_norm(norms))

    # What FSDP shards is of all replicas.
    module = experts(dp.get_group())
    for layer in module:
        fully_shard(layer, mesh=dp)
    with pytest.raises((ValueError, PipelineError)) as caught:
        pipe_of(module, mesh, local_parameters=["*.experts.*"])
    told.append(str(caught.value))
    return told


def test_odd_experts(on_ranks: Run) -> None:
    for counts, sharded in on_ranks(4, odd_experts, init={"dp": 2}):
        assert "the replicas have 1 to 2 micro-batches" in counts
        assert "leave it out of fully_shard by ignored_params=" in sharded


def parts_of_the_replicas(_: Mesh) -> str:
    """A DTensor over some of the replicas, of which the pipe's mesh knows nothing; and a frozen expert."""
    ranks, own = (
        init_device_mesh("cpu", sizes, mesh_dim_names=names)
        for sizes, names in (((4, 1), ("dp", "pp")), ((2, 2), ("edp", "ep")))
    )
    stacked = nn.Sequential(*[StackedExperts(each, own["ep"]) for each in experts()])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="some of the replicas") as caught:
        pipe_of(stacked, Mesh.of(ranks))
    device_mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "pp", "ep"))
    mesh, module = Mesh.of(device_mesh, replicas=("dp", "ep")), experts(device_mesh["ep"].get_group())
    if device_mesh["ep"].get_local_rank() == 1:
        module[0].experts.requires_grad_(False)  # type: ignore[union-attr]
    pipe = pipe_of(module, mesh, local_parameters={"*.experts.*": "ep"})
    x, y = data(pipe.data_parallel_rank)
    pipe(x, target=y).backward()
    assert pipe.clip_grad_norm_(1.0) > 0
    return str(caught.value)


def test_experts_over_ranks_that_the_mesh_does_not_know(on_ranks: Run) -> None:
    for text in on_ranks(4, parts_of_the_replicas):
        assert "0.weight is sharded over some of the replicas (Shard(dim=0) over ep)" in text


def with_a_pipe(_: Mesh) -> None:
    over_some_replicas((2, 2, 2), ("dp", "pp", "ep"))
    over_some_replicas((2, 2, 2), ("ep", "dp", "pp"))


@pytest.mark.slow
def test_three_dimensions_with_experts(on_ranks: Run) -> None:
    on_ranks(8, with_a_pipe)


# ---- over ranks that have the same data -----------------------------------------------------------------------------


class Halves(nn.Module):
    """Every rank has all rows, and its expert computes a part of them."""

    def __init__(self, group: Any, plain: nn.Module) -> None:
        super().__init__()
        assert isinstance(plain, Experts)
        self.gate, self.group = plain.gate, group
        self.experts = nn.ModuleList([plain.experts[dist.get_rank(group)]])

    def forward(self, x: Tensor) -> Tensor:
        part = Part.apply(self.gate(x), self.group)  # type: ignore[no-untyped-call]
        computed: Tensor = Whole.apply(self.experts[0](part), self.group)  # type: ignore[no-untyped-call]
        return x + computed


def gathered(part: Tensor, group: Any) -> Tensor:
    every = [torch.empty_like(part) for _ in range(EXPERTS)]
    dist.all_gather(every, part.contiguous(), group=group)
    return torch.cat(every)


class Part(torch.autograd.Function):
    """The rows of this rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.tensor_split(EXPERTS)[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gathered(gradients[0], ctx.group), None


class Whole(torch.autograd.Function):
    """The rows of all ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gathered(part, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].tensor_split(EXPERTS)[dist.get_rank(ctx.group)].clone(), None


def hand_cut(_: Mesh) -> None:
    """Shards that a layer cuts by hand over a dimension whose ranks have the same data."""
    device_mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "pp", "tp"))
    mesh, group = Mesh.of(device_mesh), device_mesh["tp"].get_group()
    check(
        pipe_of(
            nn.Sequential(*[Halves(group, each) for each in experts()]), mesh, local_parameters={"*.experts.*": "tp"}
        ),
        device_mesh["tp"].get_local_rank(),
    )
    for unknown in (("dp", "ep"), {"dp", "tp"}):
        with pytest.raises(ValueError, match="given other data"):
            Mesh.of(device_mesh, replicas=unknown)  # type: ignore[arg-type]


def test_shards_cut_by_hand_beside_replicas(on_ranks: Run) -> None:
    on_ranks(4, hand_cut)
