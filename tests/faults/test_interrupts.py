"""Ctrl-C at any moment: the caller gets the KeyboardInterrupt, the pipe goes on working, and nothing hangs."""

import subprocess
import sys

import pytest

SCRIPT = """
import faulthandler, random, signal, sys, time
import torch
from torch import nn
from pipework import Pipe

faulthandler.dump_traceback_later(40, exit=True)
torch.set_num_threads(1)
torch.manual_seed(0)
random.seed(0)
pipe = Pipe(nn.Sequential(*(nn.Linear(4, 4) for _ in range(40))), 4, sys.argv[1], balance=[20, 20], devices=["cpu"] * 2)
parameters, x = list(pipe.parameters()), torch.randn(8, 4)
pipe(x).sum().backward()
expected = [parameter.grad for parameter in parameters]
pipe.zero_grad()
armed, moments = False, []

def interrupt(*_):
    if armed:
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
start = time.monotonic()
for _ in range(5):
    pipe(x).sum().backward()
seconds = (time.monotonic() - start) / 5
while len(moments) < 60:
    pipe.zero_grad()
    loss = None
    armed = True
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-4, seconds))
        loss = pipe(x).sum()
        loss.backward()
        armed = False
    except KeyboardInterrupt:
        armed = False
        torch.set_grad_enabled(True)  # an interrupt inside PyTorch's own no_grad().__exit__ leaves it in force
        moments.append("forward" if loss is None else "backward")
        assert all(a is b for a, b in zip(pipe.parameters(), parameters, strict=True)), moments
        pipe.zero_grad()
        pipe(x).sum().backward()
        assert all(torch.equal(p.grad, gradient) for p, gradient in zip(parameters, expected, strict=True)), moments
assert set(moments) == {"forward", "backward"}, moments
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs signal.setitimer")
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_interrupts_at_random_moments(checkpoint: str) -> None:
    result = subprocess.run([sys.executable, "-c", SCRIPT, checkpoint], timeout=100, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
