"""Ctrl-C at any moment: the caller gets the KeyboardInterrupt, the pipe goes on working, and nothing hangs."""

import sys

import pytest

from tests.programs import RunPython

SCRIPT = """
import faulthandler, random, signal, sys, time
import torch
from torch import nn
from pipework import Pipe

faulthandler.dump_traceback_later(40, exit=True)
torch.set_num_threads(1)
torch.manual_seed(0)
random.seed(0)
checkpoint, schedule = sys.argv[1:]
inside = schedule != "outside"
module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(40)))
pipe = Pipe(module, 4, checkpoint, balance=[10] * 4 if schedule == "interleaved-1f1b" else [20] * 2,
            devices=["cpu"] * 2, schedule=schedule if inside else "gpipe", loss_fn=nn.functional.mse_loss)
parameters, x = list(pipe.parameters()), torch.randn(8, 4)

def loss_of_step():
    return pipe(x, target=x) if inside else pipe(x).sum()

loss_of_step().backward()
expected = [parameter.grad for parameter in parameters]
pipe.zero_grad()
armed, moments = False, []

def interrupt(*_):
    if armed:
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
start = time.monotonic()
for _ in range(5):
    loss_of_step().backward()
seconds = (time.monotonic() - start) / 5
while len(moments) < 60:
    pipe.zero_grad()
    loss = None
    armed = True
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-4, seconds))
        loss = loss_of_step()
        loss.backward()
        armed = False
    except KeyboardInterrupt:
        armed = False
        torch.set_grad_enabled(True)  # an interrupt inside PyTorch's own no_grad().__exit__ leaves it in force
        moments.append("forward" if loss is None else "backward")
        assert all(a is b for a, b in zip(pipe.parameters(), parameters, strict=True)), moments
        pipe.zero_grad()
        loss_of_step().backward()
        assert all(torch.equal(p.grad, gradient) for p, gradient in zip(parameters, expected, strict=True)), moments
assert inside or set(moments) == {"forward", "backward"}, moments
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs signal.setitimer")
@pytest.mark.parametrize(
    ("checkpoint", "schedule"),
    [
        ("never", "outside"),
        ("always", "outside"),
        ("never", "1f1b"),
        ("always", "interleaved-1f1b"),
        pytest.param("always", "1f1b", marks=pytest.mark.slow),
        pytest.param("never", "interleaved-1f1b", marks=pytest.mark.slow),
    ],
)
def test_interrupts_at_random_moments(run_python: RunPython, checkpoint: str, schedule: str) -> None:
    result = run_python(["-c", SCRIPT, checkpoint, schedule])
    assert result.returncode == 0, result.stderr
