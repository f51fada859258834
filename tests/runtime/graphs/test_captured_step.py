"""What the caller may do around captured steps: everything is bitwise as with a pipe without graphs."""

import copy
import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from pipework import MicroBatches, NoChunk, Pipe, attach
from pipework.runtime.transport import LocalEndpoint
from tests.helpers import assert_same

pytestmark = pytest.mark.usefixtures("captured_soon")


def pair(layers: nn.Sequential | None = None, **options: Any) -> tuple[Pipe, Pipe]:
    """A pipe without graphs and one with them, of equal layers."""
    torch.manual_seed(0)
    if layers is None:
        layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    options = {"chunks": 2, "loss_fn": mse_loss, "devices": ["cpu"] * 2, "balance": [2, len(layers) - 2]} | options
    options.setdefault("schedule", "1f1b")
    one, other = (Pipe(copy.deepcopy(layers), **options, graphs=graphs) for graphs in (False, True))
    return one, other


def data(step: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 4, generator=generator)


def trained(pipe: Pipe, x: Any, target: Any, *more: Any, **options: Any) -> Tensor:
    """The loss of a step, after its backward."""
    loss = pipe(x, *more, target=target, **options)
    loss.backward()
    return loss


Way = Callable[[Pipe, int], Any]


def outcome(pipe: Pipe, way: Way, steps: int) -> list[Any]:
    """Trains a pipe. What each step returns is held to the end, and read there."""
    optimizer = torch.optim.AdamW(pipe.parameters(), 0.05, foreach=True)
    results = []
    for step in range(steps):
        torch.manual_seed(step)
        returned = way(pipe, step)
        gradients = [None if each.grad is None else each.grad.clone() for each in pipe.parameters()]
        results.append((returned, gradients))
        if all(each is None or each.isfinite().all() for each in gradients):
            optimizer.step()
            optimizer.zero_grad()
    return [results, [each.detach() for each in pipe.parameters()], [each.clone() for each in pipe.buffers()]]


def alike(pipes: tuple[Pipe, Pipe], way: Way, steps: int = 5, replayed: int = 3) -> None:
    assert_same(*(outcome(pipe, way, steps) for pipe in pipes))
    assert pipes[1].graphs is not None
    assert pipes[1].graphs.replayed == replayed


def accumulated(pipe: Pipe, step: int) -> Any:
    losses = [pipe(data(3 * step + n)[0], target=data(3 * step + n)[1]) for n in range(3)]
    (losses[2] * 0.5 + losses[0] + losses[1]).backward()
    return losses


def in_any_order(pipe: Pipe, step: int) -> Any:
    losses = [pipe(data(2 * step + n)[0], target=data(2 * step + n)[1]) for n in range(2)]
    for loss in reversed(losses):
        loss.backward()
    return losses


def differentiated(pipe: Pipe, step: int) -> Any:
    x, y = data(step)
    loss = pipe(x.requires_grad_(), target=y)
    first = torch.autograd.grad(loss, [x, *pipe.parameters()], retain_graph=True)
    loss.backward(retain_graph=True)
    (loss * 3).backward()
    return loss, first, x.grad


def kept(pipe: Pipe, step: int) -> Any:
    """Gradients that the user holds, and outputs."""
    x, y = data(step)
    loss, output = pipe(x, target=y, return_output=True)
    loss.backward()
    held = [each.grad for each in pipe.parameters()]
    if step % 2:
        for each in pipe.parameters():
            each.grad = None
    else:
        pipe.zero_grad(set_to_none=False)
        held = []
    return loss, output, held


def hooked(pipe: Pipe, step: int) -> Any:
    handles = [each.register_hook(lambda gradient: gradient * 2) for each in pipe.parameters()]
    loss = trained(pipe, *data(step))
    for handle in handles:
        handle.remove()
    return loss


def scaled(pipe: Pipe, step: int) -> Any:
    return trained(pipe, *data(step), loss_scale=torch.tensor(2.0**step) / 3)


def evaluated(pipe: Pipe, step: int) -> Any:
    x, y = data(step)
    loss = pipe(x, target=y)
    outputs = []
    for _ in range(2):
        pipe.eval()
        with torch.no_grad():
            outputs += [pipe(x), pipe(x, target=y)]
        pipe.train()
        if not loss.grad_fn:
            break
    loss.backward()
    return loss, outputs


def odd(pipe: Pipe, step: int) -> Any:
    """Two sizes, that alternate."""
    return trained(pipe, *data(step, rows=4 if step % 2 else 3))


def three_sizes(pipe: Pipe, step: int) -> Any:
    """One of them would be captured anew each time. It runs without graphs, so that two are replayed."""
    return trained(pipe, *data(step, rows=4 + step % 3))


def replaced(pipe: Pipe, step: int) -> Any:
    """A layer, and the memory of a parameter."""
    torch.manual_seed(step)
    if step == 3:
        pipe[0] = nn.Linear(4, 4)
    elif step == 6:
        pipe[2].weight.data = torch.randn(4, 4)
    return scaled(pipe, 0)


def lost(pipe: Pipe, step: int) -> Any:
    """A message is lost between two actions, and the call is made again."""
    if step == 3:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalEndpoint, "sender", lambda endpoint, kind, stage: lose)
            with pytest.raises(OSError, match="lost"):
                pipe(*data(step)[:1], target=data(step)[1])
        torch.manual_seed(step)
    return odd(pipe, 2 * step + 1)


def lose(micro_batch: int, message: Any) -> None:
    raise OSError("lost")


def given(pipe: Pipe, step: int) -> Any:
    return trained(pipe, *(MicroBatches([each[:2], each[2:]]) for each in data(step, rows=5)))


def failing(pipe: Pipe, step: int) -> Any:
    """Calls that fail before the workers run, and in between."""
    with pytest.raises(Exception):  # noqa: B017, PT011
        pipe(torch.randn(4, 3), target=torch.randn(4, 4))
    torch.manual_seed(step)
    return scaled(pipe, 0)


def cast(pipe: Pipe, step: int) -> Any:
    x, y = data(step)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=bool(step < 4)):
        loss = pipe(x, target=y)
    loss.backward()
    return loss


def watched(pipe: Pipe, step: int) -> Any:
    """Saved-tensor hooks, or a mode, are around some calls."""
    if step % 2 == 0:
        return odd(pipe, 1)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with FlopCounterMode(display=False) if step == 3 else hooks:
        return odd(pipe, 3)


WAYS: dict[str, tuple[Way, int, int]] = {  # steps, and how many are replayed
    "accumulated": (accumulated, 3, 7),
    "differentiated": (differentiated, 4, 2),
    "kept": (kept, 5, 3),
    "evaluated": (evaluated, 4, 2),
    "three sizes": (three_sizes, 12, 4),
    "replaced": (replaced, 9, 2),
    "lost": (lost, 5, 3),
    "cast": (cast, 8, 4),
}
MORE_WAYS: dict[str, tuple[Way, int, int]] = {
    "in any order": (in_any_order, 4, 6),
    "hooked": (hooked, 5, 3),
    "scaled": (scaled, 5, 3),
    "odd": (odd, 8, 4),
    "given": (given, 5, 3),
    "failing": (failing, 5, 3),
    "watched": (watched, 8, 2),
}


@pytest.mark.parametrize(
    ("way", "schedule"),
    [
        *((way, ("1f1b", "zb-h1")[number % 2]) for number, way in enumerate(WAYS)),
        *(
            pytest.param(way, ("zb-h1", "1f1b")[number % 2], marks=pytest.mark.thorough)
            for number, way in enumerate(WAYS)
        ),
        *(pytest.param(way, name, marks=pytest.mark.thorough) for way in MORE_WAYS for name in ("1f1b", "zb-h1")),
    ],
)
def test_what_the_caller_does(way: str, schedule: str) -> None:
    call, steps, replayed = (WAYS | MORE_WAYS)[way]
    alike(pair(schedule=schedule), call, steps, replayed)


class Draws(nn.Module):
    """Its outputs differ in each step by a number that the host has."""

    def __init__(self, number: Callable[[Any], float]) -> None:
        super().__init__()
        self.number, self.steps, self.generator = number, 0, numpy.random.default_rng(0)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.number(self)


def counts(layer: Any) -> float:
    layer.steps += 1
    return float(layer.steps)


def replaces(layer: Any) -> float:
    layer.total = layer.total + 1
    return 2.0


REFUSED: dict[str, tuple[Callable[[Any], float], str]] = {
    "random": (lambda layer: random.random(), "drew random numbers from Python's random or NumPy"),
    "numpy": (lambda layer: float(numpy.random.rand()), "drew random numbers from Python's random or NumPy"),
    "generator": (lambda layer: layer.generator.random(), "the state of generator 'generator' of layer '1'"),
    "counts": (counts, "attribute 'steps' of layer '1' .Draws. was"),
    "replaces": (replaces, "buffer 'total' of layer '1' .Draws. was replaced"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_numbers_of_the_host_are_refused(what: str) -> None:
    number, told = REFUSED[what]
    _, pipe = pair(nn.Sequential(nn.Linear(4, 4), Draws(number), nn.Linear(4, 4)), checkpoint="never")
    with pytest.raises((RuntimeError, ValueError), match=told):
        outcome(pipe, scaled, 8)
    assert pipe.graphs.replayed == 0


@pytest.mark.thorough
def test_a_compiled_layer_is_unfrozen() -> None:
    """Its backward is compiled in a step without graphs."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    for layer in layers:
        layer.compile()
    layers[1].requires_grad_(False)

    def way(pipe: Pipe, step: int) -> Any:
        pipe[1].requires_grad_(step >= 3)
        return scaled(pipe, step)

    alike(pair(layers), way, 7, 3)


@pytest.mark.thorough
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_attached_llama(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    # A mask may be looked at, unless CUDA captures: the stand-in is not CUDA.
    monkeypatch.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 16, "use_cache": False}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=2, attention_dropout=0.2, attn_implementation=attention
    )
    torch.manual_seed(0)
    models = [transformers.LlamaForCausalLM(config).train()]
    models.append(copy.deepcopy(models[0]))
    results = []
    for model, graphs in zip(models, (False, True), strict=True):
        batch = {"input_ids": torch.randint(16, (4, 5)), "attention_mask": torch.ones(4, 5, dtype=torch.int64)}
        pipe = attach(model, batch | {"labels": batch["input_ids"]}, chunks=2, devices=["cpu"] * 2, graphs=graphs)

        def way(pipe: Any, step: int, model: nn.Module = model) -> Any:
            tokens = torch.randint(16, (4, 5))
            mask = torch.arange(5) < torch.tensor([[5], [3], [4], [5]])
            loss = model(input_ids=tokens, attention_mask=mask.long(), labels=tokens).loss
            loss.backward()
            return loss

        results.append(outcome(model, way, 4))
    assert_same(*results)
    assert pipe.graphs.replayed == 2


def test_a_scaler_that_changes() -> None:
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2) for _ in range(2)]
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 4))
    results = []
    for scaler, graphs in zip(scalers, (False, True), strict=True):
        pipe = Pipe(copy.deepcopy(layers), 2, loss_fn=mse_loss, devices=["cpu"] * 2, grad_scaler=scaler, graphs=graphs)
        optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
        for step in range(8):
            x, y = data(step)
            torch.manual_seed(step)
            loss = pipe(x * 1000, target=y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            results.append((graphs, loss, scaler.get_scale(), [each.detach().clone() for each in pipe.parameters()]))
    assert_same([each[1:] for each in results if not each[0]], [each[1:] for each in results if each[0]])


def test_weights_and_ignored_targets() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target, ignore_index=-1)

    def way(pipe: Pipe, step: int) -> Any:
        x, y = data(step, rows=6)
        target = y.argmax(1)
        target[: step + 1] = -1
        return trained(pipe, x, target)

    for weight in (lambda target: (target != -1).sum(), lambda target: int((target != -1).sum())):
        alike(pair(loss_fn=loss, loss_weight=weight), way)


class Pushed(nn.Linear):
    """Takes a number and a keyword."""

    def forward(self, x: Tensor, factor: float = 1.0, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x) * factor
        return y if mask is None else y * mask


def test_inputs_beside_tensors() -> None:
    def way(pipe: Pipe, step: int) -> Any:
        x, y = data(step, rows=6)
        return trained(pipe, x, y, 0.5 if step < 3 else 2.0, mask=x > step / 10)

    alike(pair(nn.Sequential(Pushed(4, 4), nn.Dropout(0.2), nn.Linear(4, 4))), way, steps=8, replayed=4)


def test_two_pipes() -> None:
    plain, captured = pair()
    _, second = pair()
    for step in range(6):
        losses = []
        for pipe in (plain, captured, second):
            torch.manual_seed(step)
            losses.append(trained(pipe, *data(step)))
        assert losses[0] == losses[1] == losses[2]
    for three in zip(*(pipe.parameters() for pipe in (plain, captured, second)), strict=True):
        assert_same(three[0].grad, three[1].grad)
        assert_same(three[0].grad, three[2].grad)


def test_two_threads() -> None:
    """Their steps share the memory of one captured step, and one of them is in evaluation or without a target."""
    plain, captured = pair(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), schedule="gpipe")
    parameters = {pipe: list(pipe.parameters()) for pipe in (plain, captured)}
    found: list[bool] = []

    def gradients(pipe: Pipe, number: int) -> list[Tensor]:
        x, y = data(number)
        return [*torch.autograd.grad(pipe(x, target=y), parameters[pipe])]

    wanted = [gradients(plain, number) for number in range(2)]

    def run(number: int) -> None:
        for step in range(12):
            result = gradients(captured, number)
            found.append(all(map(torch.equal, result, wanted[number])))
            if step % 3 == number:
                captured(data(number)[0]).sum().backward()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 24
    assert captured.graphs.captured == 1


def test_copies_are_captured_by_themselves() -> None:
    import pickle

    _, pipe = pair(loss_fn=nn.MSELoss())
    for step in range(4):
        odd(pipe, 2 * step + 1)
    for twin in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        for step in range(4):
            gradients = []
            for each in (pipe, twin):
                each.zero_grad()
                torch.manual_seed(step)
                odd(each, 2 * step + 1)
                gradients.append([parameter.grad for parameter in each.parameters()])
            assert_same(*gradients)
        assert twin.graphs.replayed == 2


def loss_of_sums(output: Tensor, target: Tensor) -> Tensor:
    """It has no weights: those of graphs are tensors, which a recording counts."""
    return (output - target).square().sum()


@pytest.mark.parametrize("memory", [True, False])
def test_recorded_steps(memory: bool) -> None:
    sizes = []
    for pipe in pair(loss_fn=loss_of_sums, loss_reduction="sum"):
        for step in range(5):
            with pipe.record(memory=memory) as recording:
                odd(pipe, 2 * step + 1)
            intervals = recording.timeline().intervals
            assert all(each.start < each.end for each in intervals)
            sizes.append(sorted((*each.action, each.memory, each.held, each.sent) for each in intervals))
    half = len(sizes) // 2
    assert sizes[:half] == sizes[half:]


@pytest.mark.thorough
def test_recaptures_leave_nothing() -> None:
    _, pipe = pair()
    counts = []
    dropout = next(each for each in pipe.modules() if isinstance(each, nn.Dropout))
    for change in range(5):
        dropout.p = 0.1 + change / 20
        for step in range(3):
            odd(pipe, 2 * step + 1)
        pipe.zero_grad()
        gc.collect()
        counts.append(sum(issubclass(type(each), Tensor) for each in gc.get_objects()))
    assert counts[2] == counts[3] == counts[4]
    assert pipe.graphs.captured == 5


class Checkpointed(nn.Module):
    """PyTorch's checkpoint keeps the state of random numbers for its second pass."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.linear, self.keeps = nn.Linear(4, 4), keeps

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.linear, x, use_reentrant=False, preserve_rng_state=self.keeps)


def test_a_state_of_random_numbers_is_not_captured() -> None:
    alike(pair(nn.Sequential(Checkpointed(keeps=False), nn.Dropout(0.2), nn.Linear(4, 4))), scaled)
    with pytest.raises(RuntimeError, match="the state of random numbers, as"):
        outcome(pair(nn.Sequential(Checkpointed(keeps=True), nn.Dropout(0.2), nn.Linear(4, 4)))[1], scaled, 2)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_inputs_without_strides_are_evaluated() -> None:
    class Dense(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y.to_dense()[:1]

    _, pipe = pair(nn.Sequential(Dense(), nn.Linear(4, 4), nn.Linear(4, 4)))
    with torch.no_grad():
        assert pipe.eval()(torch.ones(4, 4), NoChunk(torch.eye(4).to_sparse_csr())).shape == (4, 4)
