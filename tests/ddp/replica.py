"""One of two replicas; run by test_two_replicas.py. Prints a verdict for each case named on the command line."""

import contextlib
import copy
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from pipework import Pipe

OF_REPLICA = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")


def pipe_of(plain: nn.Sequential, schedule: str, checkpoint: str) -> Pipe:
    workers = 2 if schedule in ("interleaved-1f1b", "zb-v") else 4
    name = "gpipe" if schedule == "outside" else schedule
    module, devices = copy.deepcopy(plain), ["cpu"] * workers
    return Pipe(module, 2, checkpoint, balance=[1, 1, 1, 2], devices=devices, schedule=name, loss_fn=F.mse_loss)


def loss_of(replica: nn.Module, x: Tensor, y: Tensor, schedule: str, option: str) -> Tensor:
    if schedule == "outside":
        return F.mse_loss(replica(x), y)
    if option == "return_output":
        loss, output = replica(x, target=y, return_output=True)
        assert output.shape == y.shape
        return loss
    return replica(x, target=y)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    own = slice(rank * 4, rank * 4 + 4)
    fired: list[int] = []
    for case in sys.argv[1:]:
        schedule, checkpoint, option = case.split(":")
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        pipe = pipe_of(plain, schedule, checkpoint)
        replica = DistributedDataParallel(pipe, **({option: True} if option in OF_REPLICA else {}))
        for number, parameter in enumerate(pipe.parameters()):
            parameter.register_hook(lambda gradient, n=number: fired.append(n))
        for _ in range(3):
            batch = torch.randn(2, 8, 4, dtype=torch.float64)
            plain.zero_grad()
            replica.zero_grad()
            fired.clear()
            micro_steps = batch if option == "no_sync" else batch[:1]
            for step, x in enumerate(micro_steps):
                y = x[:, :2].sin()
                F.mse_loss(plain(x), y).backward()
                last = step == len(micro_steps) - 1
                with contextlib.nullcontext() if last else replica.no_sync():
                    loss_of(replica, x[own], y[own], schedule, option).backward()
            for expected, actual in zip(plain.parameters(), pipe.parameters(), strict=True):
                torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-12, atol=1e-15)
            assert sorted(fired) == sorted([*range(6)] * len(micro_steps)), fired
        if rank == 0:
            print(f"{case}=equal", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
