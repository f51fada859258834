"""One of two RPC workers; run by test_sync_rpc.py. "holder" has the pipe, "reader" only references to outputs."""

import sys
import warnings

import torch
from torch import Tensor, nn
from torch.distributed import autograd, rpc

from pipework.compat.sync import Pipe

held: list[Pipe] = []


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def batch() -> Tensor:
    return torch.arange(8.0, dtype=torch.float64).reshape(4, 2)


# What "holder" is asked to do


def run(x: Tensor) -> rpc.RRef[Tensor]:
    return held[0](x)


def gradients_in(context: int) -> list[Tensor]:
    gathered = autograd.get_gradients(context)
    return [gathered[parameter] for parameter in held[0].parameters()]


def reader() -> None:
    with autograd.context() as context:
        reference = rpc.rpc_sync("holder", run, args=(batch(),))
        assert not reference.is_owner()
        assert reference.owner_name() == "holder"
        autograd.backward(context, [reference.to_here().square().mean()])
        gradients = rpc.rpc_sync("holder", gradients_in, args=(context,))
    model = plain()
    torch.testing.assert_close(reference.to_here(), model(batch()))
    model(batch()).square().mean().backward()
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def main(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "You are using a Backend .* as a ProcessGroup", UserWarning)
    options = rpc.TensorPipeRpcBackendOptions(init_method=rendezvous, rpc_timeout=60)
    rpc.init_rpc(["holder", "reader"][rank], rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        held.append(Pipe(plain(), chunks=2, checkpoint="always"))
        rpc.rpc_sync("reader", reader)
        print("all is well")
    rpc.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
