"""What an installed pipework must do before anything else is worth testing.

Run it with the interpreter that it is installed for, from any folder: `python tests/smoke.py`. It needs no test runner,
so it also tells quickly whether a version of PyTorch will do.
"""

import copy
import importlib.resources
import pathlib
import subprocess
import sys

import torch
from torch import nn

import pipework
from pipework import Pipe, pop, skippable, stash
from pipework.testing import draw_key, reference_backward

torch.set_num_threads(1)


@skippable(stash=["input"])
class Stash(nn.Module):
    def forward(self, x):
        yield stash("input", x)
        return x


@skippable(pop=["input"])
class Pop(nn.Module):
    def forward(self, x):
        return x + (yield pop("input"))


def gradients_are_those_of_the_plain_model():
    plain = nn.Sequential(
        Stash(), nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8), Pop()
    )
    x = torch.randn(10, 8)
    for mode in ("never", "except_last", "always"):
        reference = copy.deepcopy(plain)
        pipe = Pipe(copy.deepcopy(plain), 4, mode, balance=[2, 3, 2], devices=["cpu"] * 3)
        torch.manual_seed(0)
        reference_backward(reference, x, torch.sum, chunks=4, key=draw_key())
        torch.manual_seed(0)
        pipe(x).sum().backward()
        for name, parameter in reference.named_parameters():
            assert torch.equal(parameter.grad, pipe.get_parameter(name).grad), (mode, name)
        for name, buffer in reference.named_buffers():
            assert torch.equal(buffer, pipe.get_buffer(name)), (mode, name)


def a_failure_is_named_and_survived():
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2, balance=[1, 1], devices=["cpu", "cpu"])
    notes = []
    try:
        pipe(torch.randn(4, 5))
    except RuntimeError as error:
        notes = error.__notes__
    assert notes == ["pipework: in layer '0' (Linear)", "pipework: stage 0, micro-batch 0, action F"], notes
    assert pipe(torch.randn(4, 4)).shape == (4, 4)


def the_command_line_draws():
    command = [sys.executable, "-m", "pipework", "draw", "gpipe", "--workers", "2", "--chunks", "3"]
    assert "bubble" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def the_types_are_there():
    assert (importlib.resources.files("pipework") / "py.typed").is_file()


if __name__ == "__main__":
    for check in (
        gradients_are_those_of_the_plain_model,
        a_failure_is_named_and_survived,
        the_command_line_draws,
        the_types_are_there,
    ):
        check()
        print("ok:", check.__name__.replace("_", " "))
    print(f"pipework {pipework.__version__} in {pathlib.Path(pipework.__file__).parent}, torch {torch.__version__}")
