"""One of two replicas; run by test_two_replicas.py. Prints a verdict for each case named on the command line."""

import contextlib
import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipework import Pipe


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for case in sys.argv[1:]:
        checkpoint, option = case.split(":")
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        options = {option: True} if option in ("find_unused_parameters", "static_graph") else {}
        pipe = Pipe(copy.deepcopy(plain), 2, checkpoint, balance=[2, 3], devices=["cpu", "cpu"])
        replica = DistributedDataParallel(pipe, **options)
        for _ in range(3):
            batch = torch.randn(2, 8, 4, dtype=torch.float64)
            plain.zero_grad()
            replica.zero_grad()
            micro_steps = batch if option == "no_sync" else batch[:1]
            for step, x in enumerate(micro_steps):
                plain(x).square().mean().backward()
                last = step == len(micro_steps) - 1
                with contextlib.nullcontext() if last else replica.no_sync():
                    replica(x[rank * 4 : rank * 4 + 4]).square().mean().backward()
            for expected, actual in zip(plain.parameters(), pipe.parameters(), strict=True):
                torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-12, atol=1e-15)
        if rank == 0:
            print(f"{case}=equal", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
