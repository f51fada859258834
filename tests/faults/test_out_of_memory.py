"""Row 13 of the fault matrix: memory runs out in one stage; the error says how much each holds, the next step works."""

import re
import sys
from typing import Any

import pytest
import torch
from torch import nn

from pipework import Pipe
from tests.programs import RunPython


class Greedy(nn.Module):
    """A linear layer that runs out of memory in its forward or its backward, on one micro-batch."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("table", torch.zeros(256))
        self.error = error
        self.where: tuple[str, int] | None = None
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        micro_batch, self.seen = self.seen, self.seen + 1
        self.maybe_fail("F", micro_batch)
        y = self.linear(x)
        y.register_hook(lambda gradient: self.maybe_fail("B", micro_batch))
        return y

    def maybe_fail(self, action: str, micro_batch: int) -> None:
        if self.where == (action, micro_batch):
            raise self.error


def greedy_pipe(way: Any, error: BaseException) -> Pipe:
    module = nn.Sequential(nn.Linear(16, 16, bias=False), Greedy(error), nn.Linear(16, 16), nn.Linear(16, 16))
    return way.pipe(module, 3, "never", balance=[1, 1, 1, 1])


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    torch.cuda.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("action", ["F", "B"])
@pytest.mark.timeout(20)
def test_the_error_says_where_and_what_each_stage_holds(way: Any, action: str, error: BaseException) -> None:
    pipe = greedy_pipe(way, type(error)(*error.args))
    batch = torch.randn(6, 16), torch.randn(6)
    way.loss(pipe, *batch).backward()
    expected = [parameter.grad for parameter in pipe.parameters()]
    pipe[2].zero_grad()
    pipe[3].zero_grad()
    greedy = pipe[1]
    greedy.seen, greedy.where = 0, (action, 1)
    with pytest.raises(type(error)) as caught:
        way.loss(pipe, *batch).backward()
    assert caught.value is greedy.error
    notes = caught.value.__notes__
    assert f"pipework: stage 1, micro-batch 1, action {way.named(action)}" in notes
    (table,) = [note for note in notes if "memory of the stages" in note]
    columns = [re.split(r"  +", line.strip()) for line in table.splitlines()[1:6]]
    assert columns[0] == ["stage", "device", "weights", "gradients", "buffers", "micro-batches"]
    assert f"out of memory in stage 1, micro-batch 1, action {way.named(action)}" in table
    # Weights take 1 KiB each, biases 64 bytes. Only the stages behind have certainly gone backward before the second.
    assert [row[2] for row in columns[1:]] == ["1 KiB", "1.06 KiB", "1.06 KiB", "1.06 KiB"]
    assert [row[4] for row in columns[1:]] == ["0 B", "1 KiB", "0 B", "0 B"]
    # With 1F1B, the first micro-batches may be on their way back while the next goes forward.
    assert columns[1][3] in ("1 KiB", "2 KiB")
    # In halves, the gradients of weights may come later.
    whole = action == "B" and way.named("B") == "B"
    assert columns[4][3] in (("1.06 KiB",) if whole else ("0 B", "1.06 KiB") if way.inside else ("0 B",))
    greedy.where = None
    pipe.zero_grad()
    way.loss(pipe, *batch).backward()
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(pipe.parameters(), expected, strict=True))


REAL = """
import resource, sys
import torch
from torch import nn
from pipework import Pipe

torch.set_num_threads(1)
torch.manual_seed(0)

class Expands(nn.Module):
    factor = 1

    def forward(self, x):
        return (x.repeat(1, self.factor) * 2)[:, :64] + 1  # the product is what does not fit

pipe = Pipe(nn.Sequential(nn.Linear(64, 64), Expands(), nn.Linear(64, 64)), 4, sys.argv[1], balance=[1, 2],
            devices=["cpu"] * 2)
x = torch.randn(64, 64)
pipe(x).sum().backward()
expected = [parameter.grad for parameter in pipe.parameters()]
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 3 * 2**27, resource.RLIM_INFINITY))
for _ in range(3):
    pipe.zero_grad()
    pipe[1].factor = 2**16  # 256 MiB for a micro-batch, twice
    try:
        pipe(x)
    except RuntimeError as error:
        print(str(error).splitlines()[0])
        print(*error.__notes__, sep=chr(10))
    else:
        raise SystemExit("it fitted")
    pipe[1].factor = 1
    pipe(x).sum().backward()
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(pipe.parameters(), expected, strict=True))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS and /proc")
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.thorough
def test_a_cpu_whose_memory_ends(run_python: RunPython, checkpoint: str) -> None:
    result = run_python(["-c", REAL, checkpoint])
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("DefaultCPUAllocator: can't allocate memory") == 3
    assert len(re.findall(r"out of memory in stage 1, .* action F; memory of the stages", result.stdout)) == 3
    assert result.stdout.count("pipe.predict says before a step what each device will hold") == 3
