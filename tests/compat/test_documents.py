"""The code in the reference of `torch.distributed.pipeline.sync` runs; only devices and the port are this machine's."""

import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pipework.compat import install

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no distributed")


def here(code: str) -> str:
    """The code for this machine; with two GPUs it stays as it is, but for the port."""
    code = textwrap.dedent(code).replace("'29500'", "'0'")  # any port that is free
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return code if torch.cuda.device_count() >= 2 else re.sub(r"\.cuda\(.\)", f'.to("{device}")', code)


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
    # Need to initialize RPC framework first.
    os.environ['MASTER_ADDR'] = 'localhost'
    os.environ['MASTER_PORT'] = '29500'
    torch.distributed.rpc.init_rpc('worker', rank=0, world_size=1)

    # Build pipe.
    fc1 = nn.Linear(16, 8).cuda(0)
    fc2 = nn.Linear(8, 4).cuda(1)
    model = nn.Sequential(fc1, fc2)
    model = Pipe(model, chunks=8)
    input = torch.rand(16, 16).cuda(0)
    output_rref = model(input)
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


@pytest.fixture
def reference(old_names: None) -> Callable[..., dict[str, Any]]:
    """Runs code of the reference; the functions of which it speaks are given."""

    def run(code: str, **names: Any) -> dict[str, Any]:
        exec(here(IMPORTS) + here(code), names)
        return names

    return run


def test_two_layers_on_two_gpus(reference: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that they are as before in the end
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are using a Backend .* as a ProcessGroup", UserWarning)
        session = reference(TWO_LAYERS)
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
