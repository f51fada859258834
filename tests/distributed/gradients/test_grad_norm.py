"""The norm of gradients in several processes is that of one process, to the last bit."""

import json
import math
import random

import pytest
import torch
from torch import nn

from pipework.distributed.gradients.grad_norm import norm_of_all, norms_of_stages

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.complex64)


def random_parameters(chooser: random.Random, dtypes: tuple[torch.dtype, ...]) -> list[nn.Parameter]:
    parameters = []
    for _ in range(chooser.randrange(60)):
        shape = [chooser.randrange(1, 9) for _ in range(chooser.randrange(4))]
        parameters.append(nn.Parameter(torch.zeros(shape, dtype=chooser.choice(dtypes))))
        if chooser.random() < 0.8:
            parameters[-1].grad = torch.randn(shape, dtype=torch.float32).to(parameters[-1].dtype)
    return parameters


def norm_in_processes(stages: list[list[nn.Parameter]], norm_type: float, workers: int = 2) -> torch.Tensor:
    """Each is a worker of every second stage, or so; a parameter that several have is counted by the first of them."""
    exchanged = []
    for worker in range(workers):
        own = {stage: parameters for stage, parameters in enumerate(stages) if stage % workers == worker}
        elsewhere = {
            id(parameter)
            for stage in own
            for parameter in stages[stage]
            for other, theirs in enumerate(stages[:stage])
            if other % workers != worker and any(parameter is each for each in theirs)
            and not any(parameter is each for before in range(other) for each in stages[before])
        }  # fmt: skip
        exchanged.append(json.dumps(norms_of_stages(own, elsewhere, norm_type)))
    return norm_of_all([json.loads(each) for each in exchanged], norm_type)


@pytest.mark.parametrize("norm_type", [1, 2, 2.0, math.inf, 0.5, 3])
@pytest.mark.parametrize("count", range(1, len(DTYPES) + 1))
def test_any_gradients(norm_type: float, count: int) -> None:
    for seed in range(20):
        chooser = random.Random(seed)
        torch.manual_seed(seed)
        parameters = random_parameters(chooser, tuple(chooser.sample(DTYPES, count)))
        cuts = sorted(chooser.randint(0, len(parameters)) for _ in range(3))
        stages = [parameters[a:b] for a, b in zip([0, *cuts], [*cuts, len(parameters)], strict=True)]
        stages[3] += chooser.sample(parameters, min(2, len(parameters)))  # tied
        expected = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
        norm = norm_in_processes(stages, norm_type, workers=chooser.choice([1, 2, 3]))
        assert norm.dtype is expected.dtype
        assert torch.equal(norm, expected), (seed, norm, expected)


@pytest.mark.parametrize("odd", [math.inf, math.nan])
def test_what_is_not_finite(odd: float) -> None:
    stages = [[nn.Parameter(torch.ones(2))], [nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]]
    for stage in stages:
        stage[0].grad = torch.full_like(stage[0], odd)
    assert str(norm_in_processes(stages, 2.0)) == f"tensor({odd})"


def test_no_gradients_at_all() -> None:
    assert torch.equal(norm_in_processes([[], [nn.Parameter(torch.ones(2))]], 2.0), nn.utils.get_total_norm([]))


def test_sparse_gradients_have_no_norm() -> None:
    """In one process they have one since PyTorch 2.15."""
    layer = nn.Embedding(5, 3, sparse=True)
    layer(torch.arange(2)).sum().backward()
    with pytest.raises(TypeError, match=r"shape .5, 3. in stage 1 has the layout torch\.sparse_coo"):
        norms_of_stages({0: [], 1: [layer.weight]}, (), 2.0)
