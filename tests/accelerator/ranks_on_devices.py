"""A rank of a pipe over processes, each with a simulated device; test_processes.py starts two of them."""

import copy
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

import pipework
from pipework import Mesh, Pipe
from pipework.testing import draw_key, reference_step
from tests.accelerator import simulated
from tests.runtime.random.test_unseen_draws import Extension

LOSS = functional.cross_entropy
CASES = [("gpipe", "never"), ("1f1b", "always"), ("zb-h1", "except_last"), ("interleaved-1f1b", "never")]


def make_model(number: int, device: torch.device) -> nn.Sequential:
    torch.manual_seed(number)
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Dropout(0.2))]
    return nn.Sequential(*layers).to(device)


def draw(seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(16, 8).to(device), torch.randint(8, (16,)).to(device)


def one_pipe(mesh: Mesh, device: torch.device) -> None:
    """Two stages, one on each rank."""
    for number, (schedule, checkpoint) in enumerate(CASES):
        model = make_model(number, device)
        model[7] = Extension()
        plain = copy.deepcopy(model)
        balance = [2] * 4 if schedule == "interleaved-1f1b" else [4] * 2
        pipe = Pipe(model, 4, checkpoint, schedule=schedule, loss_fn=LOSS, mesh=mesh, balance=balance)
        compare(pipe, plain, number, device)
        assert {parameter.device for parameter in pipe.parameters()} == {device}


def compare(pipe: Pipe, plain: nn.Sequential, number: int, device: torch.device) -> None:
    """A step of both."""
    x, y = draw(number, device)
    torch.manual_seed(number)
    expected = reference_step(plain, x, y, LOSS, 4, draw_key())
    torch.manual_seed(number)
    loss = pipe(x, target=y)
    loss.backward()
    assert torch.equal(loss.cpu(), expected.loss.cpu())
    for name, parameter in pipe.named_parameters():
        own = plain.get_parameter(name).grad
        assert isinstance(own, Tensor)
        assert torch.equal(parameter.grad, own)


def two_replicas(mesh: Mesh, device: torch.device) -> None:
    """A whole pipe on each rank, with rows of its own; both learn from the mean of their gradients."""
    for number, (schedule, checkpoint) in enumerate(CASES):
        model = make_model(number, device)
        means: dict[str, Tensor] = {}
        for replica in range(2):
            plain = copy.deepcopy(model)
            x, y = draw(replica, device)
            torch.manual_seed(number)
            reference_step(plain, x, y, LOSS, 4, draw_key())
            for name, parameter in plain.named_parameters():
                own = parameter.grad
                assert isinstance(own, Tensor)
                means[name] = own / 2 if replica == 0 else means[name] + own / 2
        stages = 2 if schedule == "interleaved-1f1b" else 1
        pipe = Pipe(model, 4, checkpoint, schedule=schedule, loss_fn=LOSS, mesh=mesh, balance=[8 // stages] * stages)
        x, y = draw(mesh.data_parallel_rank, device)
        torch.manual_seed(number)
        pipe(x, target=y).backward()
        for name, parameter in pipe.named_parameters():
            assert torch.equal(parameter.grad, means[name]), name


def main() -> None:
    replicas = int(sys.argv[1])
    mesh = pipework.init(dp=replicas)
    simulated.configure(delay_probability=0.1, delay_us=500, seed=mesh.rank)
    device = torch.device("sim", torch.accelerator.current_device_index())
    (one_pipe if replicas == 1 else two_replicas)(mesh, device)
    simulated.synchronize_all()
    assert simulated.races() + simulated.poison_reads() == []
    print(f"rank {mesh.rank}: {len(CASES)} cases are equal", flush=True)


if __name__ == "__main__":
    main()
