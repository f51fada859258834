r"""Skip connections: a layer stashes a tensor, a later layer pops it, and the layers in between are not changed.

    python examples/skip_connections.py         # a second

In a pipeline the tensor goes straight from the layer that stashes it to the layer that pops it, past other partitions:

    partition 0          partition 1          partition 2
    Layer1  -----------> Layer2  -----------> Layer3
       \----------------- "1to3" ---------------/

Needs: pip install ".[train]"  # from a checkout
"""

import argparse
import copy
import sys
import textwrap
from collections.abc import Generator

import torch
from torch import Tensor, nn

from pipework import Pipe, pop, skippable, stash
from pipework.skip import Namespace, verify_skippables
from pipework.testing import draw_key, reference_backward

parser = argparse.ArgumentParser(description="Skip connections in a pipeline.")
parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights and the inputs (%(default)s)")


# A layer with skip connections declares their names. Its forward yields a stash or a pop for each of them.
@skippable(stash=["1to3"])
class Layer1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("1to3", x)
        return self.linear(x).relu()


class Layer2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


@skippable(pop=["1to3"])
class Layer3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        skip_1to3 = yield pop("1to3")
        return self.linear(x) + skip_1to3


def block() -> list[nn.Module]:
    """The three layers in a namespace of their own, so that a model can have several such blocks."""
    own = Namespace()
    return [Layer1().isolate(own), Layer2(), Layer3().isolate(own)]


def compare(model: nn.Sequential) -> bool:
    """Whether a pipe of the model has the same output and gradients as the model itself."""
    plain, x = copy.deepcopy(model), torch.rand(16, 8)
    print(f"without Pipe  {tuple(plain(x).shape)}: the layers work unchanged")

    found = torch.accelerator.device_count()
    devices = [place * found // len(model) if found else "cpu" for place in range(len(model))]
    pipe = Pipe(model, chunks=4, balance=[1] * len(model), devices=devices)
    output = pipe(x)
    output.square().mean().backward()
    print(f"with Pipe     {tuple(output.shape)} from {len(pipe.partitions)} partitions")

    # Without a pipeline, but micro-batch by micro-batch, so that sums are rounded in the same way.
    device = pipe.input_device
    reference = reference_backward(
        plain.to(device), x.to(device), lambda output: output.square().mean(), chunks=4, key=draw_key()
    )
    equal = torch.equal(output.cpu(), reference.output.cpu()) and all(
        torch.equal(one.grad.cpu(), other.grad.cpu())
        for one, other in zip(pipe.parameters(), plain.parameters(), strict=True)
    )
    print(f"              output and gradients {'equal, to the last bit' if equal else 'DIFFERENT'}\n")
    return equal


def complain(drawing: str, model: nn.Sequential) -> bool:
    """Prints the error about a model. `Pipe` raises the same one before the training begins."""
    print(drawing)
    try:
        verify_skippables(model)
    except TypeError as error:
        print(textwrap.indent(f"{error}\n", "    "))
        return True
    print("    nothing to complain about\n")
    return False


def main(argv: list[str] | None = None) -> int:
    torch.manual_seed(parser.parse_args(argv).seed)

    print("== a skip connection from layer 1 to layer 3")
    right = compare(nn.Sequential(Layer1(), Layer2(), Layer3()))
    print("== two such blocks, each in its own namespace")
    right &= compare(nn.Sequential(*block(), *block()))

    print("== wrong arrangements, as verify_skippables and Pipe see them")
    wrong = {
        "Layer1 Layer2           what is stashed is never popped": [Layer1(), Layer2()],
        "Layer2 Layer3           what is popped was never stashed": [Layer2(), Layer3()],
        "Layer3 Layer2 Layer1    it is stashed too late": [Layer3(), Layer2(), Layer1()],
        "Layer1 Layer1 Layer3    it is stashed twice": [Layer1(), Layer1(), Layer3()],
    }
    complaints = [complain(drawing, nn.Sequential(*layers)) for drawing, layers in wrong.items()]

    print("== what is stashed once can be popped several times")
    fine = not complain("Layer1 Layer3 Layer3", nn.Sequential(Layer1(), Layer3(), Layer3()))
    return 0 if right and all(complaints) and fine else 1


if __name__ == "__main__":
    sys.exit(main())
