"""The code that users of `torch.distributed.pipeline.sync` have in hand, and of articles about a `Pipe`, runs.

It is the code of these documents; only devices, the backend and the port are what this machine has.
"""

import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pipework.compat import install

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no distributed")


def here(code: str) -> str:
    """The code for this machine; with two GPUs it stays as it is, but for the port."""
    code = textwrap.dedent(code).replace("'29500'", "'0'")  # any port that is free
    if torch.cuda.device_count() < 2:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        for call in (".cuda(0)", ".cuda(1)", ".cuda()", '.to("cuda:0")', '.to("cuda:1")'):
            code = code.replace(call, f'.to("{device}")')
        code = code.replace("devices=[0, 1]", f'devices=["{device}", "{device}"]')
        code = code.replace("torch.cuda.set_device(dist.get_rank())", f'torch.device("{device}")')
        code = code.replace("backend='nccl'", "backend='gloo'")
    return code


def run(code: str, **names: Any) -> dict[str, Any]:
    """Runs some code, which knows these names, and returns all that it has then."""
    exec(here(code), names)
    return names


def prompted(code: str) -> str:
    """The code of an interactive session."""
    lines = textwrap.dedent(code).strip().splitlines()
    assert all(line.startswith(">>>") for line in lines)
    return "\n".join(line[4:] for line in lines)


# The reference of torch.distributed.pipeline.sync


@pytest.fixture
def old_names() -> Iterator[None]:
    """The old modules are there, for one test."""
    before, finders = dict(sys.modules), list(sys.meta_path)
    install("sync")
    yield
    for name in set(sys.modules) - set(before):
        if name.startswith("torch.distributed.pipeline"):
            del sys.modules[name]
    if "torch.distributed.pipeline" not in before:
        del torch.distributed.pipeline
    sys.meta_path[:] = finders


IMPORTS = """
    import os
    import torch
    from torch import nn
    from torch.distributed.pipeline.sync import Pipe
    from torch.distributed.pipeline.sync.skip.skippable import pop, skippable, stash, verify_skippables
"""

TWO_LAYERS = """
    >>> # Need to initialize RPC framework first.
    >>> os.environ['MASTER_ADDR'] = 'localhost'
    >>> os.environ['MASTER_PORT'] = '29500'
    >>> torch.distributed.rpc.init_rpc('worker', rank=0, world_size=1)
    >>>
    >>> # Build pipe.
    >>> fc1 = nn.Linear(16, 8).cuda(0)
    >>> fc2 = nn.Linear(8, 4).cuda(1)
    >>> model = nn.Sequential(fc1, fc2)
    >>> model = Pipe(model, chunks=8)
    >>> input = torch.rand(16, 16).cuda(0)
    >>> output_rref = model(input)
"""

THREE_LAYERS = """
    @skippable(stash=['1to3'])
    class Layer1(nn.Module):
        def forward(self, input):
            yield stash('1to3', input)
            return f1(input)

    class Layer2(nn.Module):
        def forward(self, input):
            return f2(input)

    @skippable(pop=['1to3'])
    class Layer3(nn.Module):
        def forward(self, input):
            skip_1to3 = yield pop('1to3')
            return f3(input) + skip_1to3

    model = nn.Sequential(Layer1(), Layer2(), Layer3())
"""

SEVERAL_SKIPS = """
    @skippable(stash=['alice', 'bob'], pop=['carol'])
    class StashStashPop(nn.Module):
        def forward(self, input):
            yield stash('alice', f_alice(input))
            yield stash('bob', f_bob(input))
            carol = yield pop('carol')
            return input + carol
"""


@pytest.fixture
def reference(old_names: None) -> Callable[..., dict[str, Any]]:
    """Runs code of the reference; the functions of which it speaks are given."""

    def run_with_imports(code: str, **names: Any) -> dict[str, Any]:
        return run(here(IMPORTS) + here(code), **names)

    return run_with_imports


def test_two_layers_on_two_gpus(reference: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that they are as before in the end
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are using a Backend .* as a ProcessGroup", UserWarning)
        session = reference(prompted(TWO_LAYERS))
        try:
            output = session["output_rref"].local_value()
            torch.testing.assert_close(output, session["fc2"](session["fc1"](session["input"]).to(output.device)))
            output.sum().backward()
            assert all(parameter.grad is not None for parameter in session["model"].parameters())
        finally:
            torch.distributed.rpc.shutdown()


@pytest.mark.usefixtures("rpc")
def test_three_layers_with_a_skip(reference: Callable[..., dict[str, Any]]) -> None:
    functions = {"f1": torch.sin, "f2": torch.cos, "f3": torch.tanh}
    names = reference(THREE_LAYERS, **functions)
    x = torch.randn(8, 2)
    expected = torch.tanh(torch.cos(torch.sin(x))) + x
    torch.testing.assert_close(names["model"](x), expected)  # works perfectly fine without a Pipe
    torch.testing.assert_close(names["Pipe"](names["model"], chunks=4)(x).local_value(), expected)


@pytest.mark.usefixtures("rpc")
def test_one_layer_with_several_skips(reference: Callable[..., dict[str, Any]]) -> None:
    around = """
        @skippable(stash=['carol'])
        class Before(nn.Module):
            def forward(self, input):
                yield stash('carol', 3 * input)
                return input

        @skippable(pop=['alice', 'bob'])
        class Behind(nn.Module):
            def forward(self, input):
                alice = yield pop('alice')
                bob = yield pop('bob')
                return torch.cat([input, alice, bob], dim=1)
    """
    names = reference(here(SEVERAL_SKIPS) + here(around), f_alice=torch.sin, f_bob=torch.cos)
    model = nn.Sequential(names["Before"](), names["StashStashPop"](), names["Behind"]())
    x = torch.randn(8, 2)
    expected = torch.cat([x + 3 * x, x.sin(), x.cos()], dim=1)
    torch.testing.assert_close(names["Pipe"](model, chunks=4)(x).local_value(), expected)


# fmt: off
FAILURES = [
    (
        """
            nn.Sequential(Layer1(), Layer2())
            #               └──── ?
        """,
        "no module declared '1to3' as poppable but stashed",
    ),
    (
        """
            nn.Sequential(Layer2(), Layer3())
            #                   ? ────┘
        """,
        "'1' declared '1to3' as poppable but it was not stashed",
    ),
    (
        """
            nn.Sequential(Layer1(), Layer2(), Layer3(), Layer3())
            #               └───────────────────┘       ^^^^^^
        """,
        "'3' redeclared '1to3' as poppable but not isolated by namespace",
    ),
    (
        """
            nn.Sequential(Layer1(), Layer1(), Layer2(), Layer3())
            #             ^^^^^^      └───────────────────┘
        """,
        "'1' redeclared '1to3' as stashable but not isolated by namespace",
    ),
]
# fmt: on


@pytest.mark.usefixtures("rpc")
@pytest.mark.parametrize(("model", "bullet"), FAILURES, ids=[bullet for _, bullet in FAILURES])
def test_failure_cases(reference: Callable[..., dict[str, Any]], model: str, bullet: str) -> None:
    names = reference(f"{here(THREE_LAYERS)}\nmodel = {here(model).strip()}\n")
    for check in ("verify_skippables", "Pipe"):
        with pytest.raises(TypeError) as caught:
            names[check](names["model"])
        assert str(caught.value) == f"one or more pairs of stash and pop do not match:\n\n* {bullet}"


# An article of four steps. Its import path gives another class today; its Pipe is that of pipework


STEP_1 = """
    import torch
    import torch.distributed as dist

    dist.init_process_group(backend='nccl', init_method='env://')
    torch.cuda.set_device(dist.get_rank())
"""

STEP_2 = """
    import torch.nn as nn
    from torch.distributed.pipelining import Pipe

    # Example model split into 2 parts
    class Stage1(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(512, 1024)
            self.relu = nn.ReLU()

        def forward(self, x):
            return self.relu(self.fc1(x))

    class Stage2(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc2 = nn.Linear(1024, 10)

        def forward(self, x):
            return self.fc2(x)

    # Combine stages into a list for the pipeline
    modules = [Stage1().cuda(), Stage2().cuda()]
    model = nn.Sequential(*modules)
"""

STEP_3 = """
    from torch.distributed.pipelining import Pipe

    # Balance: [1, 1] indicates equal stage lengths for 2 GPUs
    pipe_model = Pipe(model, chunks=4, balance=[1, 1], devices=[0, 1])
"""

STEP_4 = """
    optimizer = torch.optim.Adam(pipe_model.parameters(), lr=1e-3)

    for _ in range(10):
        inputs = torch.randn(32, 512).cuda(0)
        targets = torch.randint(0, 10, (32,)).cuda(1)

        outputs = pipe_model(inputs)
        loss = nn.CrossEntropyLoss()(outputs, targets)

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def article(*steps: str) -> str:
    """The steps one after the other, with today's import line."""
    return "".join(map(here, steps)).replace(
        "from torch.distributed.pipelining import Pipe", "from pipework import Pipe"
    )


def test_the_four_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    try:
        names = run(article(STEP_1, STEP_2))
        before = [parameter.detach().clone() for parameter in names["model"].parameters()]
        run(article(STEP_3, STEP_4), **names)
    finally:
        torch.distributed.destroy_process_group()
    for parameter, old in zip(names["model"].parameters(), before, strict=True):
        assert not torch.equal(parameter, old.to(parameter.device))
