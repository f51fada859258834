"""Micro-batches that the caller has made, packed sequences and others, in every way, to the last bit."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipework import MicroBatches, NoChunk, PipeSequential
from pipework.testing import Reference, draw_key, reference_backward, reference_step
from tests.ranks import held

LENGTHS = [[3, 4], [9], [1, 1, 2], [5, 6], [2]]


class Packed(nn.Module):
    """Adds up each of several sequences that lie one behind the other, without padding."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        sequences = self.project(x).split(lengths.tolist())
        return self.dropout(torch.cat([each.cumsum(0) for each in sequences])), lengths


class Head(nn.Linear):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return super().forward(torch.tanh(x))


def packed_model() -> nn.Sequential:
    return PipeSequential(Packed(), Packed(), Packed(), Head(8, 5))


def packed(lengths: list[list[int]]) -> tuple[tuple[MicroBatches, MicroBatches], MicroBatches]:
    """Tokens with the lengths of their sequences, and labels; all tokens but one micro-batch's require a gradient."""
    tokens = [torch.randn(sum(each), 8, requires_grad=n != 1) for n, each in enumerate(lengths)]
    labels = [torch.randint(5, (sum(each),)) for each in lengths]
    return (MicroBatches(tokens), MicroBatches(map(torch.tensor, lengths))), MicroBatches(labels)


def summed_loss(outputs: MicroBatches, targets: MicroBatches) -> Tensor:
    every = zip(outputs, targets, strict=True)
    return torch.stack([functional.cross_entropy(*each, reduction="sum") for each in every]).sum()


def reference(way: Any, plain: nn.Sequential, inputs: Any, targets: MicroBatches, key: int) -> Reference:
    if way.inside:
        return reference_step(plain, inputs, targets, functional.cross_entropy, 2, key, loss_weight=torch.numel)
    return reference_backward(plain, inputs, lambda outputs: summed_loss(outputs, targets), 2, key)


def test_packed_sequences_weighted_by_tokens(way: Any, checkpoint: str) -> None:
    plain = packed_model()
    options = {"loss_fn": functional.cross_entropy, "loss_weight": torch.numel} if way.inside else {"loss_fn": None}
    pipe = way.pipe(plain, 2, checkpoint, balance=[1, 1, 1, 1], **options)
    optimizers = [torch.optim.AdamW([{"params": each.parameters()}], lr=0.01) for each in (plain, pipe)]
    for step, count in enumerate((5, 1, 3, 4)):  # another number of micro-batches in each step
        (tokens, lengths), targets = packed(LENGTHS[:count])
        own = MicroBatches([each.detach().clone().requires_grad_(each.requires_grad) for each in tokens])
        torch.manual_seed(step)
        expected = reference(way, plain, (tokens, lengths), targets, draw_key())
        torch.manual_seed(step)
        loss, outputs = way.run(pipe, (own, lengths), targets, summed_loss)
        assert isinstance(outputs, MicroBatches)
        loss.backward()
        assert torch.equal(loss, expected.loss)
        assert all(torch.equal(*each) for each in zip(outputs, expected.output, strict=True))
        for theirs, mine in zip(tokens, own, strict=True):
            assert theirs.grad is mine.grad is None or torch.equal(theirs.grad, mine.grad)
        for name, parameter in held(plain, pipe).named_parameters():
            assert torch.equal(pipe.get_parameter(name).grad, parameter.grad), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


class Scaled(nn.Linear):
    def forward(self, value: dict[str, Tensor], scale: Tensor, *, power: int) -> Tensor:
        return super().forward(value["x"]) * scale**power


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)


def test_what_all_micro_batches_share_gets_the_sum_of_their_gradients(way: Any) -> None:
    plain = nn.Sequential(Scaled(4, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    pipe = way.pipe(plain, 2, balance=[1, 1, 1, 1], loss_fn=mean_square, loss_reduction="sum")
    batches = [{"x": torch.randn(*shape, 4)} for shape in ((3,), (2, 5), (7, 1, 2))]
    targets = [torch.randn_like(each["x"]) for each in batches]
    scales = [torch.randn(4, requires_grad=True) for _ in range(2)]
    with torch.no_grad():
        scales[1].copy_(scales[0])
    losses = []
    for batch, target in zip(batches, targets, strict=True):
        value = plain[0](batch, scales[0], power=2)
        losses.append(functional.mse_loss(plain[1:](value), target))
    expected = losses[0] + losses[1] + losses[2]
    for each in losses:
        each.backward()

    def loss_outside(outputs: MicroBatches, targets: MicroBatches) -> Tensor:
        first, second, third = map(functional.mse_loss, outputs, targets)
        return first + second + third

    inputs = (MicroBatches(batches), NoChunk(scales[1]))
    loss = way.loss(pipe, inputs, MicroBatches(targets), loss_outside, power=2)
    loss.backward()
    assert torch.equal(loss, expected)
    assert torch.equal(scales[1].grad, scales[0].grad)
    for name, parameter in held(plain, pipe).named_parameters():
        assert torch.equal(pipe.get_parameter(name).grad, parameter.grad), name


def test_rows_weigh_the_mean_where_all_tensors_have_them(way: Any) -> None:
    """Sequences are padded to another length in each micro-batch; there is one label for each."""
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.AdaptiveAvgPool2d((1, 6)), nn.Flatten(), nn.Linear(6, 3))
    pipe = way.pipe(plain, 2, balance=[2, 1, 1, 1], loss_fn=functional.cross_entropy)
    batches = [torch.randn(rows, length, 4) for rows, length in ((3, 5), (1, 9), (4, 2))]
    labels = [torch.randint(3, (len(each),)) for each in batches]

    def mean(outputs: MicroBatches, targets: MicroBatches) -> Tensor:
        return functional.cross_entropy(torch.cat(list(outputs)), torch.cat(list(targets)))

    loss = way.loss(pipe, MicroBatches(batches), MicroBatches(labels), mean)
    torch.testing.assert_close(loss, mean(MicroBatches(map(plain, batches)), MicroBatches(labels)))
    pipe.eval()
    with torch.no_grad():
        outputs = way.run(pipe, MicroBatches(batches), MicroBatches(labels), mean)[1]
    assert all(torch.equal(output, plain(batch)) for output, batch in zip(outputs, batches, strict=True))
