"""Two linear layers in a pipeline: the smallest script, and a comparison with the plain module.

    python examples/two_layers.py               # a second; uses every accelerator it finds, else two CPU workers
    python examples/two_layers.py --chunks 4

Unlike torch.distributed.pipeline.sync.Pipe, this `Pipe` needs no RPC, and its output is a tensor, without
`.local_value()`. Needs: pip install ".[train]"  # from a checkout
"""

import argparse
import copy
import sys

import torch
from torch import nn

from pipework import Pipe
from pipework.testing import draw_key, reference_backward

parser = argparse.ArgumentParser(description="Two linear layers in a pipeline.")
parser.add_argument("--chunks", type=int, default=8, metavar="N", help="micro-batches in a mini-batch (%(default)s)")
parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights and the inputs (%(default)s)")


def relative_difference(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference, for each pair divided by its largest expected number."""
    pairs = zip(actual, expected, strict=True)
    return max(((one - other).abs().max() / other.abs().max()).item() for one, other in pairs)


def main(argv: list[str] | None = None) -> int:
    options = parser.parse_args(argv)
    if options.chunks < 1:
        parser.error(f"--chunks is {options.chunks}: at least 1 is needed")
    torch.manual_seed(options.seed)

    # A model is an nn.Sequential. Its layers may be on any device: Pipe moves them to the device of their partition.
    fc1 = nn.Linear(16, 8)
    fc2 = nn.Linear(8, 4)
    model = nn.Sequential(fc1, fc2)
    plain, whole = copy.deepcopy(model), copy.deepcopy(model)  # to compare with

    # One partition for each layer, one device for each partition. Without devices= pipework chooses.
    found = torch.accelerator.device_count()
    devices = [0, found - 1] if found else ["cpu", "cpu"]
    pipe = Pipe(model, chunks=options.chunks, balance=[1, 1], devices=devices)
    print(pipe)

    # The rest of the script would be the same with the model itself.
    x, target = torch.rand(16, 16), torch.rand(16, 4)

    def loss_of(output: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output, target.to(output.device))

    output = pipe(x)
    loss = loss_of(output)
    loss.backward()
    print(f"\noutput    {tuple(output.shape)} on {output.device}")
    print(f"loss      {loss.item():.6f}")
    print(f"names     {', '.join(pipe.state_dict())}")
    print(f"gradient  {tuple(fc1.weight.grad.shape)} of fc1.weight, which is still the parameter that was made above")

    # The same without a pipeline: micro-batch by micro-batch, as in the pipe, and with the undivided batch.
    device = pipe.input_device
    reference = reference_backward(plain.to(device), x.to(device), loss_of, chunks=options.chunks, key=draw_key())
    loss_of(whole(x)).backward()
    of_pipe, of_plain, of_whole = (
        [parameter.grad.cpu() for parameter in each.parameters()] for each in (pipe, plain, whole)
    )
    same_loss = loss.item() == reference.loss.item()
    same_gradients = all(torch.equal(one, other) for one, other in zip(of_pipe, of_plain, strict=True))
    print("\ncompared with the plain module")
    print(f"loss      {'equal, to the last bit' if same_loss else 'DIFFERENT'}")
    print(f"gradients {'equal, to the last bit' if same_gradients else 'DIFFERENT'}")
    print(f"          up to {relative_difference(of_pipe, of_whole):.0e} if the batch is not cut: sums are rounded")
    return 0 if same_loss and same_gradients else 1


if __name__ == "__main__":
    sys.exit(main())
