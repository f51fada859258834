"""One of two RPC workers; run by test_rpc.py. "holder" has the pipe, "reader" only references to outputs."""

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


# What "reader" is asked to do


def read(reference: rpc.RRef[Tensor]) -> Tensor:
    assert not reference.is_owner()
    assert reference.owner_name() == "holder"
    return reference.to_here() * 2


# What "holder" is asked to do


def run(x: Tensor) -> rpc.RRef[Tensor]:
    return held[0](x)


def gradients_in(context: int) -> list[Tensor]:
    gathered = autograd.get_gradients(context)
    return [gathered[parameter] for parameter in held[0].parameters()]


def holder() -> None:
    held.append(Pipe(plain(), chunks=2, checkpoint="always"))
    reference = held[0](batch())
    assert torch.equal(reference.to_here(), reference.local_value())
    doubled = rpc.rpc_sync("reader", read, args=(reference,))
    assert torch.equal(doubled, reference.local_value() * 2)


def reader() -> None:
    reference = rpc.rpc_sync("holder", run, args=(batch(),))
    try:
        reference.local_value()
    except RuntimeError:
        pass
    else:
        raise AssertionError("the value is not here")
    expected = plain()(batch())
    torch.testing.assert_close(reference.to_here(), expected)

    with autograd.context() as context:
        loss = rpc.rpc_sync("holder", run, args=(batch(),)).to_here().square().mean()
        autograd.backward(context, [loss])
        gradients = rpc.rpc_sync("holder", gradients_in, args=(context,))
    model = plain()
    model(batch()).square().mean().backward()
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def main(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "You are using a Backend .* as a ProcessGroup", UserWarning)
    options = rpc.TensorPipeRpcBackendOptions(init_method=rendezvous, rpc_timeout=60)
    rpc.init_rpc(["holder", "reader"][rank], rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        holder()
        rpc.rpc_sync("reader", reader)
        print("all is well")
    rpc.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
