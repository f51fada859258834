from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipework import MicroBatches, NoChunk, attach
from pipework.model.parts.check import check_parts
from pipework.model.parts.cut import Cuttable
from pipework.model.parts.side_effects import Attributes
from tests.model.parts.models import WIDTH

X = torch.randn(8, WIDTH)


class Net(nn.Module):
    """Returns something else where its first layer is in another part."""

    def __init__(self, other: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(4, 4)])
        self.layers[3] = nn.Linear(WIDTH, WIDTH)
        self.other = [other]

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        here = type(self.layers[0]) is nn.Linear
        return x if here or self.other[0] is None else self.other[0](x)


def compare(model: nn.Module, before: Attributes | None = None) -> None:
    cuttable = Cuttable(model, X, blocks=None)
    assert cuttable.sample[0][0].shape == (2, WIDTH), "the first rows are enough"
    check_parts(cuttable, cuttable.sequential(), before or Attributes([model], values=False))


def test_nothing_changes() -> None:
    model = Net()
    model.layers[0].eval()
    flags = [each.training for each in model.modules()]
    buffers = [each.clone() for each in model.buffers()]
    state = torch.get_rng_state()
    compare(model)
    assert [each.training for each in model.modules()] == flags
    assert all(map(torch.equal, model.buffers(), buffers))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(each.grad is None for each in model.parameters())


def test_a_difference_of_values_shapes_dtypes_or_nesting_is_named() -> None:
    for other in (lambda x: x + 1, lambda x: x[:1], lambda x: x.double(), lambda x: [x]):
        with pytest.raises(ValueError, match="parts of Net give another result than the model itself for the sample: "):
            compare(Net(other))
    with torch.device("meta"):
        compare(Net(lambda x: x + 1))  # without values


class Scaled(Net):
    factor = 1.0

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.factor


def test_the_parts_give_what_the_model_gave_before_it_was_cut() -> None:
    model = Scaled()
    before = Attributes([model], values=False)
    model.factor = 2.0
    with pytest.raises(ValueError, match="parts of Scaled give another result"):
        compare(model, before)
    assert model.factor == 2.0


ROWS = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
OTHER = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2))
Loss = Callable[[Tensor, Any], Tensor]


class LossNet(nn.Module):
    """Its loss is any function of its output and the labels."""

    def __init__(self, loss: Loss, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(3))
        self.loss = [loss]

    def forward(self, x: Tensor, mask: Tensor | None = None, labels: Any = None) -> Any:
        for block in self.blocks:
            x = block(x).tanh()
            x = x if mask is None else x + mask.sum() * 0.01
        return {"loss": self.loss[0](x, labels), "x": x}


def contrastive(x: Tensor, labels: Tensor) -> Tensor:
    """Each row is to be closer to its own label than to those of other rows."""
    return functional.cross_entropy(x @ labels.T, torch.arange(len(x)))


def root(x: Tensor, labels: Tensor) -> Tensor:
    return functional.mse_loss(x, labels).sqrt()


def counted(x: Tensor, labels: Tensor) -> Tensor:
    """A mean over what is no 0."""
    return ((x - labels) ** 2).sum() / (labels != 0).sum()


def summed(x: Tensor, labels: Tensor) -> Tensor:
    return functional.mse_loss(x, labels, reduction="sum")


def attached(model: nn.Module, sample: Any = None, **options: Any) -> Any:
    options = {"chunks": 4, "devices": ["cpu", "cpu"], "balance": [1, 2], **options}
    return attach(model, {"x": ROWS, "labels": OTHER} if sample is None else sample, **options)


PADDED = OTHER.clone()
PADDED[::2, 2:] = 0
REFUSED: dict[str, tuple[Loss, dict[str, Any]]] = {
    "contrastive": (contrastive, {}),
    "root": (root, {}),
    "padded": (counted, {"sample": {"x": ROWS, "labels": PADDED}}),
    "sum": (summed, {}),
    "sum, with a weight": (summed, {"loss_weight": torch.numel}),
    "mean as a sum": (functional.mse_loss, {"loss_reduction": "sum"}),
    "other weights": (functional.mse_loss, {"loss_weight": lambda labels: (labels > 0).sum()}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_loss_than_the_model_has_is_refused(name: str) -> None:
    loss, options = REFUSED[name]
    model = LossNet(loss)
    kind = "sum" if "loss_reduction" in options else "weighted mean"
    words = rf"the loss of LossNet for 2 rows of the sample is .*, the {kind} of .*Usual reasons: .*'gpipe', a call wi"
    with pytest.raises(ValueError, match=words):
        attached(model, **options)
    assert "forward" not in vars(model)
    attached(model, **options, check=False)


RIGHT: dict[str, tuple[Loss, dict[str, Any]]] = {
    "mean": (functional.mse_loss, {}),
    "sum": (summed, {"loss_reduction": "sum"}),
    "weights": (counted, {"sample": {"x": ROWS, "labels": PADDED}, "loss_weight": lambda labels: (labels != 0).sum()}),
    "odd rows": (functional.mse_loss, {"sample": {"x": ROWS[:7], "labels": OTHER[:7]}}),
    "a mask for all": (functional.mse_loss, {"sample": {"x": ROWS, "labels": OTHER, "mask": NoChunk(torch.eye(8))}}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_the_loss_of_the_model_itself(name: str) -> None:
    loss, options = RIGHT[name]
    model = LossNet(loss)
    attached(model, **options)
    batch = options.get("sample", {"x": ROWS, "labels": OTHER})
    whole = {key: value.value if isinstance(value, NoChunk) else value for key, value in batch.items()}
    expected = LossNet.forward(model, **whole)["loss"]
    torch.testing.assert_close(model(**batch)["loss"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_as_precise_as_the_numbers_are(dtype: torch.dtype) -> None:
    sample = {"x": ROWS.to(dtype), "labels": OTHER.to(dtype)}
    attached(LossNet(functional.mse_loss, dtype), sample)
    with pytest.raises(ValueError, match="it is their sum"):
        attached(LossNet(summed, dtype), sample)


def test_rows_that_say_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the loss of LossNet for a mini-batch is the mean .*the sample has one row"):
        attached(LossNet(functional.mse_loss), {"x": ROWS[:1], "labels": OTHER[:1]})
    with pytest.raises(ValueError, match=r"first 2 rows of the sample is inf.*give rows whose 'labels' count"):
        attached(LossNet(counted), {"x": ROWS, "labels": torch.zeros_like(OTHER)}, loss_weight=torch.count_nonzero)
    with pytest.raises(ValueError, match=r"nothing shows whether .*does not run on one row of the sample \(.*\); or"):
        attached(LossNet(lambda x, labels: (x.squeeze() @ labels.T)[:, 0].mean()))


def test_train_and_eval_are_not_called() -> None:
    """Those of adapters add them to the weights, and take them away again."""
    model = LossNet(functional.mse_loss)
    model.blocks[0].train = lambda mode=True: pytest.fail("called")  # type: ignore[method-assign]
    attached(model)


def test_of_given_micro_batches_only_the_parts_are_compared() -> None:
    batch = {"x": MicroBatches([ROWS[:3], ROWS[3:]]), "labels": MicroBatches([OTHER[:3], OTHER[3:]])}
    model = LossNet(contrastive)
    attached(model, batch)
    with torch.no_grad():
        first, second = (
            LossNet.forward(model, ROWS[part], labels=OTHER[part])["loss"] for part in (slice(3), slice(3, 8))
        )
        torch.testing.assert_close(model(**batch)["loss"], (3 * first + 5 * second) / 8)


class Denoiser(LossNet):
    """Draws noise and times in glue, and a latent in a unit, as a trainer of diffusion does."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss)
        self.blocks[1] = Drawing()

    def forward(self, x: Tensor, mask: Tensor | None = None, labels: Any = None) -> Any:
        noise, time = torch.randn_like(x), torch.randint(1, 1000, (len(x), 1), device=x.device)
        x = x + noise / time + torch.rand(len(x), 1, device=x.device)
        for block in self.blocks:
            x = block(x).tanh() + torch.randn(x.shape, device=x.device)
        return {"loss": self.loss[0](x - noise, labels), "x": x}


class Drawing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.normal(super().forward(x), 0.1) + torch.empty_like(x).normal_()


def test_a_forward_that_draws_is_compared_without_chance() -> None:
    model, state = Denoiser(functional.mse_loss), torch.get_rng_state()
    pipe = attached(model)
    assert torch.equal(torch.get_rng_state(), state)
    found = [each for each in pipe.verify(ROWS, labels=OTHER).compared if each.against == "micro-batches"]
    assert [each.difference for each in found] == [0, 0, 0]
    with pytest.raises(ValueError, match="the pipe would train with"):
        attached(Denoiser(root))


@pytest.mark.gpu
def test_on_an_accelerator_its_generator_is_put_back() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    generator, model = torch.get_device_module(device), Denoiser(functional.mse_loss).to(device)
    state = generator.get_rng_state()
    attach(model, {"x": ROWS.to(device), "labels": OTHER.to(device)}, chunks=4, devices=[device])
    assert torch.equal(generator.get_rng_state(), state)
