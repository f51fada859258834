"""Parts of one card as devices: a pipe whose workers have SMs of their own has the bits of the plain model."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.gpu import parts
from pipework import Pipe
from pipework.schedule import schedule_spec
from pipework.testing import draw_key, reference_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore::pipework.PipeWarning"),  # all workers on one card are meant
]
CARD = torch.device("cuda", 0)
WIDTH, LAYERS, CHUNKS, ROWS = 512, 8, 8, 1024


@pytest.fixture(scope="module", params=[2, 4])
def cut(request: pytest.FixtureRequest) -> list[parts.Part]:
    pytest.importorskip("cuda.bindings")
    return parts.split(request.param)


def test_parts_are_equal_and_disjoint(cut: list[parts.Part]) -> None:
    every = torch.cuda.get_device_properties(CARD).multi_processor_count
    assert len({part.sms for part in cut}) == 1
    assert 0.8 * every <= sum(part.sms for part in cut) <= every
    assert len({part.stream.cuda_stream for part in cut}) == len(cut)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("schedule", "debug"), [("1f1b", ()), ("1f1b", "one_thread"), ("interleaved-1f1b", ()), ("zb-v", ())]
)
def test_a_pipe_on_parts_has_the_bits_of_the_plain_model(
    cut: list[parts.Part], schedule: str, debug: object, dtype: torch.dtype
) -> None:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(LAYERS)]
    model = nn.Sequential(*blocks).to(CARD, dtype)
    plain = copy.deepcopy(model)
    stages = len(cut) * schedule_spec(schedule).stages_per_worker
    pipe = Pipe(
        model, CHUNKS, "except_last", balance=[LAYERS // stages] * stages, devices=[CARD] * len(cut),
        schedule=schedule, loss_fn=F.mse_loss, debug=debug,
    )  # fmt: skip
    parts.compute_on(pipe, cut)
    for step in range(6):
        x, y = (torch.randn(ROWS, WIDTH, device=CARD, dtype=dtype) for _ in range(2))
        torch.manual_seed(step)
        wanted = reference_step(plain, x, y, F.mse_loss, CHUNKS, draw_key())
        torch.manual_seed(step)
        loss = pipe(x, target=y)
        loss.backward()
        assert torch.equal(loss, wanted.loss)
        for name, parameter in pipe.named_parameters():
            own = plain.get_parameter(name).grad
            assert isinstance(own, torch.Tensor)
            assert torch.equal(parameter.grad, own), (step, name)
        pipe.zero_grad()
        plain.zero_grad()
