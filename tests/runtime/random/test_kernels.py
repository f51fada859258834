import os
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipework.runtime.random import kernels
from pipework.runtime.random.streams import Key, RandomStream
from tests.nursery import ENVIRONMENT
from tests.programs import RunPython

DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout2d": lambda x: F.dropout2d(x.view(1, 8, 8, 1)),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "bernoulli": torch.bernoulli,
    "rand": lambda x: torch.rand(64),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(64),
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(100, (64,)),
    "randperm": lambda x: torch.randperm(64),
    "multinomial": lambda x: torch.multinomial(torch.ones(64), 32),
    "normal": lambda x: torch.normal(x, x),
    "gumbel": F.gumbel_softmax,
    "poisson": lambda x: torch.poisson(x * 9),
    "binomial": lambda x: torch.binomial(x * 90, x),
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "gamma": torch._standard_gamma,
    "dirichlet": torch._sample_dirichlet,
    "cauchy": lambda x: x.clone().cauchy_(),
    "geometric": lambda x: x.clone().geometric_(0.1),
    "exponential": lambda x: x.clone().exponential_(),
    "log_normal": lambda x: x.clone().log_normal_(),
    "uniform": lambda x: x.clone().uniform_(),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 8, 8)] * 3, dropout_p=0.5),
    "lstm": lambda x: LSTM(x.view(2, 8, 4))[0],
    "init": lambda x: nn.init.trunc_normal_(x.clone()),
}
LSTM = nn.LSTM(4, 4, 2, dropout=0.5)


@pytest.mark.parametrize("name", DRAWS)
def test_every_kind_of_draw_belongs_to_its_place(name: str) -> None:
    kernels.install()
    draw, x = DRAWS[name], torch.full((64,), 0.5)
    stream = RandomStream(Key(1))

    def at(layer: int, micro_batch: int) -> torch.Tensor:
        stream.enter(layer, micro_batch)
        return draw(x)

    before = torch.get_rng_state()
    with kernels.drawing_from(stream):
        first, other_layer, other_micro_batch, again = at(0, 0), at(1, 0), at(0, 1), at(0, 0)
    assert torch.equal(first, again)
    assert not torch.equal(first, other_layer)
    assert not torch.equal(first, other_micro_batch)
    assert torch.equal(torch.get_rng_state(), before), "the caller's generator is left alone"


@pytest.mark.parametrize("name", DRAWS)
def test_without_a_stream_every_draw_is_pytorchs_own(name: str) -> None:
    kernels.install()
    draw, x = DRAWS[name], torch.full((64,), 0.5)
    torch.manual_seed(3)
    first = draw(x)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(draw(x), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(draw(x), first)


def test_a_generator_that_the_layer_gives_itself_is_respected() -> None:
    kernels.install()
    expected = torch.rand(4, generator=torch.Generator().manual_seed(5))
    stream = RandomStream(Key(1))
    stream.enter(0, 0)
    with kernels.drawing_from(stream):
        assert torch.equal(torch.rand(4, generator=torch.Generator().manual_seed(5)), expected)
        assert torch.equal(
            torch.poisson(expected * 9, torch.Generator().manual_seed(6)),
            torch.poisson(expected * 9, torch.Generator().manual_seed(6)),
        )


def test_installing_changes_nothing_that_pytorch_draws(run_python: RunPython) -> None:
    script = (
        "import torch\n"
        "from pipework.runtime.random import kernels\n"
        "def draws():\n"
        "    torch.manual_seed(0)\n"
        "    return [torch.rand(5), torch.randn(5), torch.randperm(5), torch.nn.functional.dropout(torch.ones(9))]\n"
        "before = draws()\n"
        "assert not kernels._libraries\n"
        "kernels.install(); kernels.install()\n"
        "assert [*kernels._libraries] == ['cpu']\n"
        "assert all(map(torch.equal, before, draws()))\n"
    )
    run_python(["-c", script], env={**os.environ, **ENVIRONMENT, "PYTHONWARNINGS": "error"}).check_returncode()


def test_nobody_goes_on_before_everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr(torch.library, "Library", Mock())
    monkeypatch.setattr(kernels.torch_private, "random_operators", lambda key: {})
    monkeypatch.setattr(kernels, "_libraries", {})
    monkeypatch.setattr(kernels, "_wrap_state_access", lambda kind: found.append({**kernels._libraries}))
    kernels.install()
    assert found == [{}]
    assert [*kernels._libraries] == ["cpu"]


@pytest.mark.parametrize(("layer", "installs"), [("nn.ReLU()", False), ("nn.Dropout(0.1)", True)])
@pytest.mark.thorough
def test_the_kernels_are_replaced_only_when_a_layer_may_draw(run_python: RunPython, layer: str, installs: bool) -> None:
    script = (
        "import torch\nfrom torch import nn\nfrom pipework import Pipe\nfrom pipework.runtime.random import kernels\n"
        f"pipe = Pipe(nn.Sequential(nn.Linear(2, 2), {layer}), 2, balance=[1, 1], devices=['cpu'] * 2)\n"
        "assert not kernels._libraries\n"
        f"pipe(torch.ones(4, 2)); assert bool(kernels._libraries) is {installs}\n"
    )
    run_python(["-c", script], env={**os.environ, **ENVIRONMENT, "PYTHONWARNINGS": "error"}).check_returncode()
