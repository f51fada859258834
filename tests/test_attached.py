"""Models as people write them, with a pipe attached: bitwise as without, or refused by name."""

import collections
import copy
import dataclasses
import gc
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipework import Chunk, NoChunk, PipeWarning, Plan, attach, plan, to_sequential
from pipework.model.checkpoint import MODES
from pipework.model.parts.cut import Cuttable
from pipework.values import nested
from tests.helpers import saved_and_loaded
from tests.model.parts.harness import assert_exact, assert_same, attached, loss_in, plain_step
from tests.model.parts.models import (
    MODELS,
    WIDTH,
    Block,
    Chain,
    Changing,
    EncoderDecoder,
    Frozen,
    Lists,
    Plain,
    ResNet,
    UNet,
    Vision,
    batch_of,
    loss_of,
)
from tests.tiers import sampled

# The forward itself computes with a gradient between units. Several stages compute that, each with its own summand of
# the gradient, so that sums and products round in another order.
ROUNDS = (Lists, Plain)


def groups(kind: type[nn.Module]) -> int:
    return len(Cuttable(kind(), batch_of(kind, 2), blocks=None).groups)


def check(kind: type[nn.Module], balance: list[int], **options: Any) -> None:
    model = kind()
    rounds = kind in ROUNDS
    but = model.state_dict() if rounds else ()
    assert_exact(model, batch_of(kind), but=but, steps=1 if rounds else 2, balance=balance, **options)


# The schedule of two workers, or how micro-batches are kept where each unit has a worker.
CUTS = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "always", "except_last", "never")


@pytest.mark.parametrize(("kind", "cut"), sampled(MODELS, CUTS, each=3, whole=1))
def test_models(kind: type[nn.Module], cut: str) -> None:
    count = groups(kind)
    if cut in MODES:
        chunks = 4 if kind is Changing else 3  # its parts copy the inputs, to memory that begins elsewhere
        check(kind, [1] * count, chunks=chunks, devices=["cpu"] * count, checkpoint=cut)
        return
    stages = 4 if cut in ("interleaved-1f1b", "zb-v") else 2
    if count < stages:
        cut, stages = "1f1b", 2
    check(kind, [1] * (stages - 1) + [count - stages + 1], chunks=4, schedule=cut)


def plan_of(kind: type[nn.Module], **options: Any) -> Plan:
    batch = batch_of(kind)
    few = {"devices": ["cpu", "cpu"], "iterations": 8, "timeout": 0, **options}
    layers = to_sequential(kind(), batch)
    return plan(
        layers, (), keywords=batch, target=batch["labels"], loss_fn=lambda result, _: loss_in(result), chunks=2, **few
    )


@pytest.mark.parametrize(
    "kind",
    [UNet, *(pytest.param(kind, marks=pytest.mark.thorough) for kind in (Vision, EncoderDecoder))],
    ids=lambda kind: kind.__name__,
)
def test_a_plan_of_the_units(kind: type[nn.Module]) -> None:
    assert_exact(kind(), batch_of(kind), chunks=1, plan=plan_of(kind))


def test_a_plan_that_was_saved_decides(tmp_path: Path) -> None:
    made = plan_of(ResNet, memory="1GiB")
    assert len(made.layers) == groups(ResNet)
    made.save(tmp_path / "plan.json")
    pipe = attach(ResNet(), batch_of(ResNet), plan=Plan.load(tmp_path / "plan.json"))
    assert pipe.plan == made
    assert pipe.schedule().orders == made.schedule.orders


@pytest.mark.thorough
def test_plans_that_are_refused() -> None:
    of_other = plan_of(Vision, devices=["cpu"])
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"plan": 4}, "wanted a Plan"),
        ({"plan": of_other}, "the plan is for"),
        ({"plan": of_other, "balance": [3, 3]}, "balance= is given beside plan="),
    ]
    for options, message in wrong:
        model = ResNet()
        with pytest.raises((TypeError, ValueError), match=message):
            attach(model, batch_of(ResNet), **options)
        assert "forward" not in vars(model)


class Takes(Vision):
    """Its forward has an argument of the name that a call of a pipe has, too."""

    def forward(self, pixels: Tensor, labels: Tensor | None = None, loss_scale: float = 1.0) -> Any:
        return super().forward(pixels * loss_scale, labels)


def test_a_call_takes_a_factor_of_the_loss() -> None:
    model, plain, batch = Vision(), Vision(), batch_of(Vision)
    plain.load_state_dict(model.state_dict())
    attached(model, batch, chunks=4)
    attached(plain, batch, chunks=4)
    scaled, loss = loss_in(model(**batch, loss_scale=1 / 8)), loss_in(plain(**batch)) / 8
    assert torch.equal(scaled, loss)
    scaled.backward()
    loss.backward()
    assert_same(model, plain)
    with torch.no_grad():
        assert torch.equal(loss_in(model.eval()(**batch, loss_scale=1 / 8)), loss_in(plain.eval()(**batch)) / 8)
    with pytest.raises(ValueError, match="loss_scale= are for pipe"), torch.no_grad():
        model(batch["pixels"], loss_scale=1 / 8)


def test_a_forward_with_an_argument_of_that_name_gets_it_itself() -> None:
    model, plain, batch = Takes(), Takes(), batch_of(Vision)
    plain.load_state_dict(model.state_dict())
    attached(model, batch, chunks=4)
    loss_in(model(**batch, loss_scale=0.5)).backward()
    plain_step(plain, {**batch, "loss_scale": 0.5}, 4)
    assert_same(model, plain)


@pytest.mark.thorough
def test_evaluation_and_training_follow_the_model() -> None:
    model, batch = ResNet(), batch_of(ResNet)
    plain = copy.deepcopy(model)
    attached(model, batch, chunks=4)
    for each in (plain, model):
        each.eval()
    with torch.no_grad():
        inputs = {"x": batch["x"]}
        torch.testing.assert_close(model(**inputs), plain(**inputs))
    for each in (plain, model):
        each.train()
    assert torch.equal(model(**batch).detach(), plain_step(plain, batch, 4))


@pytest.mark.parametrize("kind", [ResNet, Changing], ids=lambda kind: kind.__name__)
def test_inference_mode(kind: type[nn.Module]) -> None:
    model, batch = kind(), batch_of(kind)
    attached(model, batch, chunks=4)
    model.eval()
    with torch.no_grad():
        expected = model(**batch)
    with torch.inference_mode():
        found = model(**{name: value.clone() for name, value in batch.items()})
    for one, other in zip(*map(torch.utils._pytree.tree_leaves, (found, expected)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.thorough
def test_attributes_and_buffers_may_change_between_calls() -> None:
    model = Vision()
    plain = copy.deepcopy(model)
    attached(model, batch_of(Vision), chunks=4)
    for each in (plain, model):
        each.load_state_dict({name: value + 0.1 for name, value in each.state_dict().items()})
        each.keep = torch.full_like(each.keep, 0.3)
    assert torch.equal(loss_in(model(**batch_of(Vision))).detach(), plain_step(plain, batch_of(Vision), 4))
    model, plain = Plain(), Plain()
    plain.load_state_dict(model.state_dict())
    attached(model, batch_of(Plain), chunks=4)
    model.scale = plain.scale = 0.25
    assert torch.equal(loss_in(model(**batch_of(Plain))).detach(), plain_step(plain, batch_of(Plain), 4))


@pytest.mark.parametrize("copies", [copy.deepcopy, saved_and_loaded], ids=["deepcopy", "pickle"])
def test_a_copy_has_a_pipe_of_its_own(copies: Callable[[nn.Module], nn.Module]) -> None:
    model, batch = Vision(), batch_of(Vision)
    plain = copy.deepcopy(model)
    attached(model, batch, chunks=4)
    copied = copies(model)
    expected = plain_step(plain, batch, 4)
    loss = loss_in(copied(**batch))
    loss.backward()
    assert torch.equal(loss.detach(), expected)
    assert_same(copied, plain)
    assert all(parameter.grad is None for parameter in model.parameters())


def put_plain(model: Any) -> Any:
    model.forward = types.MethodType(type(model).forward, model)  # nothing keeps the forward that was there
    return model


def put_around(model: Any) -> Any:
    kept = model.forward
    model.forward = lambda **batch: type(model).forward(model, **batch) if batch else kept()
    return model


def call_units(model: Any) -> Any:
    return lambda pixels, labels: model.head(model.blocks[0](pixels.new_zeros(8, WIDTH))).sum()


@pytest.mark.parametrize(
    ("bypass", "has_trained", "why"),
    [
        (put_plain, False, "replaced by Vision.forward"),
        (put_plain, True, "replaced by Vision.forward"),
        (put_around, True, "replaced by put_around.*lambda"),
        (call_units, False, "nothing has called the Vision itself"),
    ],
)
def test_an_optimizer_refuses_gradients_that_were_computed_without_the_pipe(
    bypass: Callable[[Any], Any], has_trained: bool, why: str
) -> None:
    model, batch = Vision(), batch_of(Vision)
    attached(model, batch, chunks=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if has_trained:
        loss_in(model(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss_in(bypass(model)(**batch)).backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=f"SGD got gradients of a Vision .*{why}.*base_model"):
        optimizer.step()
    assert all(map(torch.equal, model.state_dict().values(), before.values()))
    del model.forward
    optimizer.step()


def call_pipe(model: Any) -> Any:
    pipe = attached(model, batch_of(Vision), chunks=4)
    return lambda pixels, labels: pipe(pixels, labels, target=labels)


def wrap(model: Any) -> Any:
    attached(model, batch_of(Vision), chunks=4)
    kept = model.forward
    model.forward = lambda **batch: kept(**batch)
    return model


def take_off(model: Any) -> Any:
    attached(model, batch_of(Vision), chunks=4)
    del model.forward
    return put_plain(model)


@pytest.mark.parametrize("way", [call_pipe, wrap, take_off])
def test_other_steps_go_on(way: Callable[[Any], Any]) -> None:
    model = Vision()
    called = way(model)
    loss_in(called(**batch_of(Vision))).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_stage_without_trained_parameters_runs_once_and_differentiates_nothing(checkpoint: str) -> None:
    model, calls = Frozen(), []
    model.blocks[1].register_forward_hook(lambda *_: calls.append("forward"))
    model.blocks[1].register_full_backward_hook(lambda *_: calls.append("backward"))
    plain = copy.deepcopy(model)
    attached(model, batch_of(Frozen), chunks=4, balance=[2, 3], checkpoint=checkpoint, check=False)
    loss = loss_in(model(**batch_of(Frozen)))
    loss.backward()
    assert calls == ["forward"] * 4
    assert torch.equal(loss.detach(), plain_step(plain, batch_of(Frozen), 4))
    assert_same(model, plain)
    assert all(parameter.grad is None for parameter in model.blocks[:2].parameters())


def test_hooks_of_units_and_of_the_model() -> None:
    model, batch = Plain(), batch_of(Plain)
    plain = copy.deepcopy(model)
    calls: list[str] = []
    for each in (plain, model):
        each.blocks[0].register_forward_hook(lambda module, inputs, output: output * 2)
    model.blocks[1].register_forward_hook(lambda *_: calls.append("unit"))
    model.register_forward_hook(lambda *_: calls.append("model"))
    attached(model, batch, chunks=4, checkpoint="never", balance=[2, 2])
    calls.clear()  # of the comparison with the model itself
    loss = loss_in(model(**batch))
    assert torch.equal(loss.detach(), plain_step(plain, batch, 4))
    assert sorted(calls) == ["model", *["unit"] * 4]


class Glue(nn.Module):
    """Three blocks, and something between them."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(()))
        self.steps = 0
        self.between = [between]

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        x = self.between[0](self, self.blocks[0](x))
        return loss_of(self.blocks[2](self.blocks[1](x)), labels)


def counts(model: Any, x: Tensor) -> Tensor:
    model.steps += 1
    return x


def writes_buffer(model: Any, x: Tensor) -> Tensor:
    model.seen += 1
    return x


def writes_parameter(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.scale.clamp_(max=1)
    return x


def hooks_tensor(model: Any, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 2)
    return x


class Leaving(nn.Module):
    """Leaves what it has computed in what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, seen: Any) -> Tensor:
        seen["last"] = self.inner(x)
        return torch.relu(seen["last"])


REFUSED = {
    "counter": (counts, r"keeps a state in self.steps"),
    "buffer in place": (writes_buffer, r"changes self.seen in place"),
    "parameter in place": (writes_parameter, r"changes self.scale in place"),
    "tensor hook": (hooks_tensor, r"registers a hook on a tensor"),
    "parameters()": (
        lambda model, x: x + sum(p.square().sum() for p in model.parameters()),
        r"computes with the values of self.parameters",
    ),
}


@pytest.mark.parametrize("seen", [{}, collections.UserDict()], ids=["dict", "UserDict"])
def test_tensors_that_a_unit_leaves_in_its_arguments_are_refused(seen: Any) -> None:
    model = Glue(lambda model, x: model.blocks[3](x, seen) + seen["last"])
    model.blocks.append(Leaving())
    with pytest.raises(ValueError, match=r"blocks.3#0 puts a tensor into a list, dict or object that Glue's forward"):
        attached(model, batch_of(Glue))


@pytest.mark.parametrize("name", REFUSED)
def test_glue_that_each_part_would_do_again_is_refused(name: str) -> None:
    between, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        attached(Glue(between), batch_of(Glue))


class Positions(nn.Module):
    """The glue reads a buffer and an attribute of its first unit, and an output of it in place, in evaluation only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.embed.register_buffer("numbers", torch.arange(WIDTH))
        self.embed.scale = torch.full((WIDTH,), 2.0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(x)
        y = functional.dropout(x, 0.3, self.training)
        y *= 2
        for block in self.blocks:
            y = block(y, self.embed.numbers * self.embed.scale)
        return loss_of(y, labels)


@pytest.mark.parametrize("trains", [True, False])
def test_what_the_glue_does_in_the_other_mode_and_reads_of_units(trains: bool) -> None:
    model, batch = Positions().train(trains), batch_of(Positions)
    plain = copy.deepcopy(model).eval()
    attached(model, batch, balance=[1, 1, 1, 1], devices=["cpu"] * 4)
    model.eval()
    loss = loss_in(model(**batch))
    loss.backward()
    assert torch.equal(loss.detach(), plain_step(plain, batch, 2))
    assert_same(model, plain)


def test_other_ways_through_the_model_are_refused() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.register_buffer("hold", torch.zeros(()))

        def forward(self, x: Tensor, way: str = "", labels: Tensor | None = None) -> Any:
            first, second, third = self.blocks
            if way == "swapped":
                return loss_of(first(third(second(x))), labels)
            x = second(first(x))
            return loss_of(x if way == "fewer" else third(x), labels)

    batch = batch_of(Branching)
    for way, message in (("swapped", "takes another way for this"), ("fewer", "ended before its last part")):
        model = Branching()
        attached(model, batch, balance=[1, 1, 1], devices=["cpu"] * 3)
        with pytest.raises(RuntimeError, match=message):
            model(**batch, way=way)


class TwoInputs(nn.Module):
    """Parts of it read different inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None, *, labels: Tensor | None = None) -> Any:
        x = self.blocks[0](x)
        x = self.blocks[1](x if mask is None else x * mask)
        x = self.blocks[2](x)
        return loss_of(self.blocks[3](torch.tanh(x) + y), labels)


@pytest.mark.parametrize("sampled", [True, False], ids=["mask in the sample", "no mask in the sample"])
def test_inputs_go_by_their_names(sampled: bool) -> None:
    x, y, mask, labels = torch.randn(4, 8, WIDTH)
    sample = {"x": x, "y": y, "labels": labels, **({"mask": mask} if sampled else {})}
    model = TwoInputs()
    attached(model, sample, balance=[1] * 4, devices=["cpu"] * 4)
    for batch in ({"labels": labels, "y": y, "x": x}, {"y": y, "mask": mask, "labels": labels, "x": x}):
        plain = copy.deepcopy(model)
        del plain.forward
        model.zero_grad()
        loss = loss_in(model(**batch))
        loss.backward()
        assert torch.equal(loss.detach(), plain_step(plain, batch, 2))
        assert_same(model, plain, model.state_dict() if "mask" in batch else ())  # several parts multiply by the mask
    with torch.no_grad():
        positional = loss_in(model(x, y, labels=labels))
    assert torch.equal(positional, loss_in(model(labels=labels, y=y, x=x)).detach())


@pytest.mark.thorough
def test_a_pipe_that_is_taken_off_is_freed_at_once() -> None:
    model, batch = Plain(), batch_of(Plain)
    pipe = weakref.ref(attach(model, batch, chunks=2, devices=["cpu"] * 2))
    model(**batch)["loss"].backward()
    gc.collect()
    gc.disable()
    try:
        del model.forward
        assert pipe() is None
    finally:
        gc.enable()


def test_uses_of_attach_that_are_refused() -> None:
    batch = batch_of(Plain)
    model = Plain()
    pipe = attached(model, batch)
    with pytest.raises(AttributeError, match=r"'chunks' of a pipe cannot be changed: .* take it off before, `del"):
        pipe.chunks = 8
    with pytest.raises(ValueError, match=r"attached to this Plain already: .*del model.forward"):
        attached(model, batch)
    del model.forward
    attached(model, batch)
    for wrong, got in ((batch, "dict"), (Plain, "the class Plain")):
        with pytest.raises(TypeError, match=f"must be an nn.Module, got {got}: give the model first"):
            attached(wrong, model)
    with pytest.raises(ValueError, match="outputs is not one of 'last' or 'all': got 'first'"):
        attached(Plain(), batch, outputs="first")
    for blocks in ("Linear", nn.Linear):
        with pytest.raises(TypeError, match=r"blocks is .*: wanted a list of classes"):
            attached(Plain(), batch, blocks=blocks)
    ways = r".*schedule '1f1b' needs .*target= names .*loss_fn=lambda output, target: .*target=y.*schedule='gpipe'"
    with pytest.raises(ValueError, match=r"the sample has no 'labels' \(it has 'x'\)" + ways):
        attached(Plain(), {"x": batch["x"]})
    with pytest.raises(ValueError, match="the forward of Plain returned no loss for the sample" + ways):
        attached(Plain(), {**batch, "labels": None})


@pytest.mark.thorough
def test_a_difference_is_named() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            for block in self.blocks:
                x = block(x) * (2 if type(block) is nn.Linear else 1)
            return loss_of(x, labels)

    with pytest.raises(
        ValueError, match=r"parts of Odd give another result than the model itself .*not equal! Expected"
    ):
        attached(Odd(), batch_of(Odd))
    attached(Odd(), batch_of(Odd), check=False)


def test_frozen_batch_norms_stay_in_evaluation() -> None:
    model, batch = ResNet(), batch_of(ResNet)
    model.layer1.eval()
    assert_exact(model, batch, chunks=2, balance=[3, 4])
    before = [module.training for module in model.modules()]
    attached(model, batch)
    assert [module.training for module in model.modules()] == before


def test_functional_loss_of_other_names() -> None:
    class Wanting(Chain):
        def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
            return functional.mse_loss(self.run(x), wanted)

    model, batch = Wanting(), batch_of(Plain)
    plain = copy.deepcopy(model)
    attach(model, (batch["x"], batch["labels"]), target="wanted", chunks=4, devices=["cpu", "cpu"])
    renamed = {"x": batch["x"], "wanted": batch["labels"]}
    assert torch.equal(model(*renamed.values()).detach(), plain_step(plain, renamed, 4, target="wanted"))


class Named(Chain):
    """Its arguments have the names of those of a pipe's call."""

    def forward(self, x: Tensor, target: Tensor, outputs: float = 1.0, *, return_output: float = 1.0) -> Tensor:
        return functional.mse_loss(self.run(x) * outputs * return_output, target)


def test_arguments_with_the_names_of_those_of_a_pipe() -> None:
    model, x = Named(), torch.randn(8, WIDTH)
    attach(model, {"x": x, "target": x}, target="target", chunks=4, devices=["cpu"] * 2)
    expected = torch.stack([Named.forward(model, piece, piece, 2.0) for piece in x.chunk(4)]).mean()
    assert torch.equal(model(x=x, target=x, outputs=2.0), expected)
    with pytest.raises(TypeError, match="the forward takes 'return_output' by name only"):
        model(x=x, target=x, return_output=2.0)


class Padded(Chain):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.run(x), labels)


def test_padding_that_a_models_own_loss_leaves_out() -> None:
    model, x, labels = Padded(), torch.randn(8, WIDTH), torch.arange(8) % WIDTH
    attach(model, {"x": x, "labels": labels}, chunks=4, devices=["cpu"] * 2)
    labels[:2] = -100
    told = (
        r"the model's own loss is not looked into, .* Attach the pipe \(after `del model.forward`\) with loss_weight="
    )
    with pytest.warns(PipeWarning, match=told):
        model(x, labels)
    del model.forward
    counted = {"loss_weight": lambda labels: (labels >= 0).sum()}
    attach(model, {"x": x[3:], "labels": labels[3:]}, chunks=4, devices=["cpu"] * 2, **counted)
    torch.testing.assert_close(model(x, labels), Padded.forward(model, x, labels))


class Tokens(Chain):
    """Its loss leaves out a class, which it knows as a number."""

    def __init__(self, ignored: int) -> None:
        super().__init__()
        self.ignored = ignored

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.run(x).transpose(1, 2), labels, ignore_index=self.ignored)


class HandMasked(Tokens):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        losses = functional.cross_entropy(self.run(x).transpose(1, 2), labels, reduction="none")
        counts = labels != self.ignored
        return (losses * counts).sum() / counts.sum()


@pytest.mark.parametrize(
    ("kind", "ignored", "padded"),
    [(Tokens, -1, 0), (Tokens, 0, 0), *((Tokens, value, 2) for value in (-100, -1, 0, 2, 5)), (HandMasked, 0, 2)],
)
def test_padding_is_told_by_what_the_models_own_loss_leaves_out(kind: Any, ignored: int, padded: int) -> None:
    model, x = kind(ignored), torch.randn(8, 4, WIDTH)
    labels = 1 + (torch.arange(8)[:, None] + torch.arange(4)) % 4
    labels[labels == ignored] = 5
    labels[:, 4 - padded :] = ignored  # equally many in each row
    attach(model, {"x": x[:2], "labels": labels[:2]}, chunks=4, devices=["cpu"] * 2)
    model(x, labels)
    labels[3:5, 1:] = ignored
    with pytest.warns(PipeWarning, match=rf"targets have the value {ignored}, .* target: \(target != {ignored}\)"):
        model(x, labels)


class Summed(Chain):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.mse_loss(self.run(x), labels, reduction="sum")


@pytest.mark.thorough
def test_a_loss_that_is_a_sum() -> None:
    model, x = Summed(), torch.randn(8, WIDTH)
    batch = {"x": x, "labels": x}
    with pytest.raises(ValueError, match=r"it is their sum, give loss_reduction='sum'"):
        attach(model, batch, chunks=4, devices=["cpu"] * 2)
    attach(model, batch, chunks=4, loss_reduction="sum", devices=["cpu"] * 2)
    torch.testing.assert_close(model(**batch), Summed.forward(model, **batch))


def test_a_model_that_is_wrapped_is_refused() -> None:
    model = nn.DataParallel(Plain())
    with pytest.raises(ValueError, match=r"attach got a model in DataParallel.*attach the pipe to the model itself"):
        attach(model, batch_of(Plain))


@dataclasses.dataclass
class Denoised:
    """What a denoiser returns."""

    sample: Tensor
    steps: Tensor
    name: str = "denoised"


class Denoiser(nn.Module):
    """As those of diffusers: it computes no loss, and takes some arguments by position."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, sample: Tensor, steps: Tensor, outputs: float = 1.0, *, hidden: Tensor | None = None) -> Denoised:
        shift = self.time(steps[:, None])
        sample = sample if hidden is None else sample + hidden.sum(0)
        for block in self.blocks:
            sample = block(sample + shift)
        return Denoised(sample * outputs, steps)


def of_sample(output: Denoised, target: Tensor) -> Tensor:
    return functional.mse_loss(output.sample, target)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zb-v"])
def test_a_loss_of_the_users_own(schedule: str) -> None:
    model = Denoiser()
    plain = copy.deepcopy(model)
    x, noise = torch.randn(2, 7, WIDTH)
    steps, hidden = torch.rand(7), torch.randn(3, 7, WIDTH)  # of three layers of a model of texts
    options = {"balance": [1, 1, 1, 3] if schedule in ("interleaved-1f1b", "zb-v") else [2, 4], "schedule": schedule}
    few = {"sample": x[:2], "steps": steps[:2], "hidden": hidden[:, :2]}
    pipe = attach(model, few, loss_fn=of_sample, chunks=3, devices=["cpu"] * 2, **options)
    for call in (model, pipe):
        model.zero_grad()
        plain.zero_grad()
        loss = call(x, steps, hidden=hidden, target=noise)
        loss.backward()
        expected = torch.zeros(())
        columns = (each.tensor_split(3) for each in (x, steps, noise))
        for sample, step, target, own in zip(*columns, hidden.tensor_split(3, 1), strict=True):
            part = of_sample(plain(sample, step, hidden=own), target) * (len(sample) / 7)
            part.backward()
            expected = expected + part.detach()
        assert torch.equal(loss.detach(), expected)
        assert_same(model, plain)
    assert pipe.verify(x, steps, target=noise)
    model.eval()
    with torch.no_grad():
        loss, output = model(x, steps, outputs=2.0, target=noise, return_output=True)
        assert torch.equal(model(x, steps, outputs=2.0).sample, output.sample)
    torch.testing.assert_close(loss, of_sample(plain(x, steps, 2.0), noise))
    assert (output.steps.equal(steps), output.name) == (True, "denoised")
    asks = r"call model\(\*\*batch, target=y\)"
    with pytest.raises(TypeError, match=f"Denoiser.forward: got an unexpected keyword argument 'labels'; .*{asks}"):
        model(x, steps, labels=noise)
    with pytest.raises(TypeError, match=f"too many positional arguments; .*{asks}"):
        model(x, steps, None, 1.0, noise)
    if schedule != "gpipe":
        with pytest.raises(ValueError, match=f"got no target: {asks}"):
            model.train()(x, steps)
        with pytest.raises(ValueError, match=r"got no target: call pipe.predict\(\*\*batch, target=y\)"):
            pipe.predict(x, steps)


def test_a_target_of_the_call_has_no_other_name() -> None:
    with pytest.raises(ValueError, match=r"loss_fn= and target='labels', .*one of them out.*model\(\*\*batch, tar"):
        attach(Denoiser(), (torch.randn(2, WIDTH),), loss_fn=of_sample, target="labels")


def test_a_loss_of_several_rows_is_noticed() -> None:
    """A contrastive loss inside of the pipe sees the rows of a micro-batch alone."""

    class TwoTowers(Denoiser):
        def forward(self, x: Tensor) -> Any:
            for block in self.blocks:
                x = block(x)
            return x, self.time.weight.norm()

    def contrastive(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return functional.cross_entropy(output[0] @ target.T * output[1], torch.arange(len(target)))

    model, x = TwoTowers(), torch.randn(8, WIDTH)
    attach(model, x, loss_fn=contrastive, chunks=4, devices=["cpu"] * 2)
    with pytest.warns(PipeWarning, match=r"is no mean over rows: .*schedule='gpipe', and the loss of pipe\(x\)"):
        model(x, target=x).backward()


# What a model makes of its last layer's output, of the shape [rows, WIDTH], and a loss of that.
OUTSIDE: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], Tensor]]] = {
    "rows": (lambda model, x: x, lambda output: output.square().mean()),
    "contrastive": (
        lambda model, x: (x[:, :2], x[:, 2:4], model.scale.exp()),
        lambda output: functional.cross_entropy(output[0] @ output[1].T * output[2], torch.arange(7)),
    ),
    "questions": (
        lambda model, x: {"start_logits": x[:, :3], "end_logits": x[:, 3:], "loss": None},
        lambda output: output["start_logits"].logsumexp(0).sum() - output["end_logits"][:, 0].mean(),
    ),
    "detection": (
        lambda model, x: {"boxes": x.unflatten(1, (2, -1)).sigmoid(), "auxiliary": [{"boxes": x}], "size": (3, 4)},
        lambda output: output["boxes"].amax((0, 1)).sum() + output["auxiliary"][0]["boxes"].std(),
    ),
    "rows in the second dimension": (
        lambda model, x: [x.T, torch.stack([x, x + 1]).flatten(0, 0)],
        lambda output: (output[0] @ output[1].sum(0)).trace(),
    ),
}


class Outside(Chain):
    def __init__(self, last: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))
        self.last = [last]

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        x = self.run(x)
        return self.last[0](self, x) if labels is None else {"loss": functional.mse_loss(x, labels)}


@dataclasses.dataclass
class Noisy:
    """What a model takes, whole: `shift` has the rows in dimension 1, or every micro-batch gets all of it."""

    x: Tensor
    shift: Any


class TakesNoisy(Outside):
    def forward(self, batch: Noisy) -> Any:  # type: ignore[override]
        return super().forward(batch.x + batch.shift.T)


@pytest.mark.parametrize("mark", [lambda value: Chunk(value, dim=1), lambda value: NoChunk(value[:, :1])])
def test_a_dataclass_of_inputs_is_cut_and_its_outputs_are_joined(mark: Callable[[Tensor], Any]) -> None:
    model, x, shift = TakesNoisy(lambda model, x: [x, x.T]), torch.randn(7, WIDTH), torch.randn(WIDTH, 7)
    plain, batch = copy.deepcopy(model), Noisy(x, mark(shift))
    pipe = attach(model, (batch,), schedule="gpipe", chunks=3, devices=["cpu"] * 2, balance=[2, 2])
    assert pipe._executor.layout.outputs == {"output[0]": 0, "output[1]": 1}
    output, expected = model(batch), plain(Noisy(x, batch.shift.value))
    torch.testing.assert_close(output, expected)
    output[1].sum().backward()
    expected[1].sum().backward()
    torch.testing.assert_close(model.blocks[0].inner.weight.grad, plain.blocks[0].inner.weight.grad)


@pytest.mark.parametrize("name", OUTSIDE)
def test_without_a_loss_the_call_returns_what_the_model_returns(name: str) -> None:
    last, loss_of_output = OUTSIDE[name]
    model, x = Outside(last), torch.randn(7, WIDTH)
    plain = copy.deepcopy(model)
    options = {"schedule": "gpipe", "chunks": 3, "devices": ["cpu"] * 2}
    pipe = attach(model, (x[:2],), **options)
    output, expected = model(x), plain(x)
    assert nested.same(nested.flatten(output)[1], nested.flatten(expected)[1])
    loss_of_output(output).backward()
    loss_of_output(expected).backward()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    found = pipe.verify(x)
    assert found, found
    assert all(each.difference == 0 for each in found.compared if each.against == "micro-batches"), found
    with torch.no_grad():
        tensors, structure = nested.flatten(model(x))
        parts = [nested.flatten(plain(part))[0] for part in x.tensor_split(3)]
    assert nested.same(structure, nested.flatten(expected)[1])
    for tensor, *pieces in zip(tensors, *parts, strict=True):
        dim = next((dim for dim, size in enumerate(tensor.shape) if size == 7), None)
        assert torch.equal(tensor, pieces[0] if dim is None else torch.cat(pieces, dim))
    with pytest.raises(ValueError, match=r"Outside was called with target=, and attach got no loss_fn .*=lambda"):
        model(x, target=x)
    with pytest.raises(ValueError, match=r"returned output\['loss'\], a number .* not return for the sample.*labels"):
        model(x, labels=x)


def test_what_is_not_made_of_rows_is_left_out_and_named() -> None:
    def last(model: Any, x: Tensor) -> Any:
        return {"x": x, "similarities": x @ x.T, "more": (x.mean(0), 3)}

    model, x = Outside(last), torch.randn(8, WIDTH)
    attach(model, (x[:2],), schedule="gpipe", chunks=4, devices=["cpu"] * 2)
    with pytest.warns(PipeWarning, match=r"None in place of output\['similarities'\], output\['more'\]\[0\]: no dim"):
        output = model(x)
    assert (output["similarities"], output["more"]) == (None, (None, 3))
    output["x"].sum().backward()
    assert model(x)["x"].shape == x.shape, "it is told once"


def test_rows_that_are_computed_together_are_refused() -> None:
    def last(model: Any, x: Tensor) -> Any:
        return {"x": x, "centred": x - x.mean(0)}

    model, x = Outside(last), torch.randn(8, WIDTH)
    options = {"schedule": "gpipe", "chunks": 4, "devices": ["cpu"] * 2}
    with pytest.raises(
        ValueError, match=r"Outside returns another output\['centred'\] for the first 2 rows of the sam"
    ):
        attach(model, (x,), **options)
    assert "forward" not in vars(model)
    with pytest.raises(ValueError, match=r"nothing shows whether what Outside returns .* has one row: .*with split="):
        attach(model, (x[:1],), **options)
    attach(model, (x,), check=False, **options)
    attach(Outside(lambda model, x: x + torch.randn_like(x)), (x,), **options)  # other noise is no other result


def test_beside_a_loss_that_is_right_such_rows_are_left_out() -> None:
    class Beside(Chain):
        def forward(self, x: Tensor, labels: Tensor) -> Any:
            x = self.run(x)
            return {"loss": functional.mse_loss(x, labels), "x": x, "centred": x - x.mean(0)}

    model, x = Beside().eval(), torch.randn(8, WIDTH)
    attach(model, {"x": x, "labels": x}, chunks=4, devices=["cpu"] * 2)
    with pytest.warns(PipeWarning, match=r"None in place of output\['centred'\]: "), torch.no_grad():
        output = model(x, x)
    assert (output["centred"], output["x"].shape) == (None, x.shape)


class Normed(nn.Module):
    """The list of what makes the weight of its first layer is one of units."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return loss_of(x, labels)


def test_a_parametrized_layer_around_units() -> None:
    assert_exact(Normed(), batch_of(Normed), chunks=4, balance=[1, 2])


def test_a_pipe_is_predicted_as_its_model_is_called_and_errors_name_the_block() -> None:
    model, batch = Plain(), batch_of(Plain)
    pipe = attach(model, batch, chunks=2, balance=[1, 3], devices=["cpu", "cpu"])
    for target in ({}, {"target": batch["labels"]}):
        assert len(pipe.predict(**batch, **target, timeout=0).stages) == 2

    def fail(*_: Any) -> None:
        raise ValueError("of the block")

    model.blocks[2].register_forward_hook(fail)
    with pytest.raises(ValueError, match="of the block") as caught:
        model(**batch)
    assert caught.value.__notes__ == [
        "pipework: in blocks.2 (Linear)",
        "pipework: in the part blocks.1 .. blocks.3 (3)",
        "pipework: stage 1, micro-batch 0, action F",
    ]
