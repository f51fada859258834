"""Replicas start from the same values and learn from the mean of their gradients, whatever the dtype."""

import hashlib
import warnings

import pytest
import torch
from torch import Tensor, nn

from pipework import Mesh, Pipe
from tests.distributed.together.alike import of_all_ranks, refused, square
from tests.jobs import runs_on

DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
DENSE = {name: dtype for name, dtype in DTYPES.items() if not name.startswith("torch.q")}  # quantized ones are not


class Keeping(nn.Module):
    """Passes on what it gets."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def random_bytes(count: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype)


def forms(dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "usual": random_bytes(6, dtype).view(2, 3),
        "single": random_bytes(1, dtype).view(()),
        "empty": random_bytes(0, dtype).view(0, 3),
        "turned": random_bytes(6, dtype).view(2, 3).t(),
        "with gaps": random_bytes(12, dtype).view(3, 4)[:, 1:3],
        "expanded": random_bytes(2, dtype).view(1, 2).expand(3, 2),
    }


def all_bytes(tensor: Tensor) -> bytes:
    plain = tensor.resolve_conj().resolve_neg()
    same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(plain.itemsize)
    if same_size is not None:
        plain = plain.view(same_size)
    return plain.contiguous().numpy().tobytes()


@runs_on(2, dp=2)
def test_buffers_of_every_dtype_and_form_start_from_the_first_replica(mesh: Mesh) -> None:
    torch.manual_seed(mesh.rank)
    warnings.filterwarnings("ignore", message="B?Complex(Half|32) support")
    module = Keeping()
    for name, dtype in DENSE.items():
        for form, tensor in forms(dtype).items():
            module.register_buffer(f"{name.removeprefix('torch.')} {form}", tensor)
    module.register_buffer("conjugate", torch.randn(3, 2, dtype=torch.complex64).t().conj())
    module.register_buffer("negative", torch.randn(3, dtype=torch.complex64).conj().imag)
    digests = []
    for _ in range(2):
        digests.append({name: hashlib.sha256(all_bytes(each)).hexdigest() for name, each in module.named_buffers()})
        Pipe(nn.Sequential(module), mesh=mesh)
    (first, _), (_, second) = of_all_ranks(digests)
    assert len(first) > 6 * 40
    assert {name for name in first if first[name] != second[name]} == set()


class Times(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=dtype))
        self.single = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        factor = self.weight * self.single
        return x * (torch.view_as_real(factor).sum(-1) if factor.is_complex() else factor).to(x.dtype)


LEARNING = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


@runs_on(2, dp=2)
def test_gradients_of_every_dtype_that_learns_are_averaged_in_it(mesh: Mesh) -> None:
    module = nn.Sequential(*[Times(getattr(torch, name)) for name in LEARNING])
    x = torch.tensor([[1.0, 2.0, 4.0], [0.5, 1.0, 3.0]])[:, None]
    pipe = Pipe(module, mesh=mesh, loss_fn=square)
    pipe(x[mesh.rank], target=torch.zeros(1, 3)).backward()
    averaged = [parameter.grad for parameter in module.parameters()]
    own = []
    for replica in range(2):
        module.zero_grad()
        square(module(x[replica]), torch.zeros(1, 3)).backward()
        own.append([parameter.grad for parameter in module.parameters()])
    for name, mine, *of_replicas in zip(dict(module.named_parameters()), averaged, *own, strict=True):
        assert mine is not None
        assert mine.dtype is of_replicas[0].dtype
        assert torch.equal(mine, of_replicas[0] / 2 + of_replicas[1] / 2), name


@runs_on(2, dp=2)
def test_a_gradient_that_cannot_be_averaged_is_no_lost_connection(mesh: Mesh) -> None:
    frozen, x = Keeping(), torch.ones(4, 2)
    frozen.register_parameter("odd", nn.Parameter(torch.ones(3, 2).to(torch.float8_e4m3fn), requires_grad=False))
    pipe = Pipe(nn.Sequential(frozen, nn.Linear(2, 2)), mesh=mesh, loss_fn=square)
    pipe(x, target=x).backward()
    frozen.odd.requires_grad_()
    # Who comes later is told of the other one's error.
    with refused("the parameter 0.odd, of torch.float8_e4m3fn and shape .3, 2., is trained", TypeError):
        pipe(x, target=x)
    with pytest.raises(TypeError, match="averaged over replicas: keep it in float64"):
        Pipe(nn.Sequential(frozen), mesh=mesh, loss_fn=square)
