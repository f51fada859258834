"""Ten things that torch.distributed.pipelining computes wrongly without an error, beside the right numbers.

    torchrun --nproc-per-node 2 examples/silent_errors.py
    python examples/silent_errors.py                # the same: it starts the two processes itself; half a minute

Each case computes the same three times: with the model alone, with the installed torch.distributed.pipelining, used as
its documentation says, and with pipework. Both pipelines have two processes, with half of the layers each. An error
that PyTorch has fixed in your version is shown as right. Comments say how to get the right number from
torch.distributed.pipelining. The table also shows errors of pipework, and the script then ends with exit code 1.
"""

import argparse
import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint, pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    SplitPoint,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import pipework
from pipework import Mesh, Pipe

CHUNKS = 4  # micro-batches in a mini-batch
CPU = torch.device("cpu")
PATIENCE = 60  # seconds until processes that wait for each other are ended

Figures = list[float | str]


class Case(NamedTuple):
    """The names of the figures, and three ways to compute them."""

    names: list[str]
    plain: Callable[[], Figures]
    theirs: Callable[[], Figures]
    ours: Callable[[], Figures]


# ---- Shared by all cases ----


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(rows: int = 16, seed: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(rows, 8), torch.randn(rows, 1)


def halves(model: nn.Sequential) -> list[nn.Sequential]:
    """The layers of the two stages."""
    layers = list(model)
    return [nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])]


def own_stage(model: nn.Sequential) -> PipelineStage:
    """The stage of this process. The documentation has: PipelineStage(stage_mod, stage_idx, num_stages, device)."""
    rank = distributed.get_rank()
    return PipelineStage(halves(model)[rank], rank, 2, CPU)


def step(schedule: ScheduleGPipe | Schedule1F1B, x: Tensor, y: Tensor | None = None, **options: list) -> Tensor | None:
    """One step as in the documentation: the first process passes the input, the last one the target."""
    if distributed.get_rank() == 0:
        return schedule.step(x)
    return schedule.step(target=y, **options) if y is not None else schedule.step()


def own_half(model: nn.Sequential, mesh: Mesh, **options: object) -> Pipe:
    """The pipe of pipework, which takes the whole model."""
    return Pipe(model, CHUNKS, balance=[2, len(model) - 2], loss_fn=F.mse_loss, mesh=mesh, **options)


def norm(tensors: Iterable[Tensor | None]) -> float:
    return torch.stack([tensor.square().sum() for tensor in tensors if tensor is not None]).sum().sqrt().item()


def norm_of_both(tensors: Iterable[Tensor | None]) -> float:
    """The norm of the tensors of both processes together."""
    square = torch.tensor(norm(tensors)).square()
    distributed.all_reduce(square)
    return square.sqrt().item()


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def figures_of(rank: int, *figures: float) -> Figures:
    """The figures of one process, on both."""
    values = torch.tensor(figures, dtype=torch.float64)
    distributed.broadcast(values, rank)
    return values.tolist()


def spread(tensor: Tensor) -> float:
    """The largest difference between the tensors of the two processes."""
    high, low = tensor.detach().clone(), tensor.detach().clone()
    distributed.all_reduce(high, distributed.ReduceOp.MAX)
    distributed.all_reduce(low, distributed.ReduceOp.MIN)
    return (high - low).max().item()


# ---- The ten cases: the docstring of each is printed below its figures ----


def gradient_accumulation(mesh: Mesh) -> Case:
    """Every step divides all of .grad by the number of micro-batches, including the gradients of earlier steps.

    Of the mini-batches that you accumulate only the last counts in full; here the one before counts a quarter.
    """
    batches = [batch(seed=1), batch(seed=2)]

    def plain() -> Figures:
        model = small_model()
        for x, y in batches:
            F.mse_loss(model(x), y).backward()
        return [norm(gradients(model))]

    def theirs() -> Figures:
        stage = own_stage(small_model())
        # Right with scale_grads=False, and the loss divided by the number of micro-batches in loss_fn.
        schedule = ScheduleGPipe(stage, CHUNKS, loss_fn=F.mse_loss)
        for x, y in batches:
            step(schedule, x, y)
        return [norm_of_both(gradients(stage.submod))]

    def ours() -> Figures:
        pipe = own_half(small_model(), mesh)
        for x, y in batches:
            pipe(x, target=y).backward()
        return [norm_of_both(gradients(pipe))]

    return Case(["gradient norm after two mini-batches"], plain, theirs, ours)


def evaluation_before_the_optimizer(mesh: Mesh) -> Case:
    """schedule.eval() ends like a training step: it divides the present gradients.

    A validation loss between backward and optimizer.step() makes that step smaller.
    """
    (x, y), (held_out, answers) = batch(seed=1), batch(seed=2)

    def plain() -> Figures:
        model = small_model()
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            model(held_out)
        return [norm(gradients(model))]

    def theirs() -> Figures:
        stage = own_stage(small_model())
        schedule = ScheduleGPipe(stage, CHUNKS, loss_fn=F.mse_loss)
        step(schedule, x, y)
        # Right with scale_grads=False as well.
        with torch.no_grad():
            if distributed.get_rank() == 0:
                schedule.eval(held_out)
            else:
                schedule.eval(target=answers)
        return [norm_of_both(gradients(stage.submod))]

    def ours() -> Figures:
        pipe = own_half(small_model(), mesh)
        pipe(x, target=y).backward()
        with torch.no_grad():
            pipe(held_out, target=answers)
        return [norm_of_both(gradients(pipe))]

    return Case(["gradient norm after an evaluation"], plain, theirs, ours)


def shapes_from_a_real_forward(mesh: Mesh) -> Case:
    """To find the shapes, the first step runs the layers of the second stage on uninitialized memory.

    Batch norm takes the values there, which differ in each run, for data, and keeps them in its statistics.
    """
    x, y = batch()

    def model() -> nn.Sequential:
        layers = small_model()
        layers[3] = nn.BatchNorm1d(16)
        return layers

    def statistics(layer: nn.BatchNorm1d) -> tuple[float, float]:
        return layer.running_var.max().item(), layer.num_batches_tracked.item()

    def plain() -> Figures:
        layers = model()
        for rows in x.tensor_split(CHUNKS):  # also in micro-batches, since one large batch has other statistics
            layers(rows)
        return list(statistics(layers[3]))

    def theirs() -> Figures:
        layers = model()
        # Right if every stage gets input_args= and output_args=, examples of its inputs and outputs.
        step(ScheduleGPipe(own_stage(layers), CHUNKS, loss_fn=F.mse_loss), x, y)
        return figures_of(1, *statistics(layers[3]))

    def ours() -> Figures:
        layers = model()
        own_half(layers, mesh, deferred_batch_norm=False)(x, target=y)
        return figures_of(1, *(statistics(layers[3]) if mesh.rank == 1 else (0, 0)))  # the layer is on rank 1

    return Case(["batch norm: largest running variance", "batch norm: batches counted"], plain, theirs, ours)


def smaller_last_batch(mesh: Mesh) -> Case:
    """The second stage continues with as many rows as before: new ones, and below them those of old batches.

    There are too many predictions, most of them at the wrong place; an average over them looks reasonable.
    """
    (x, _), (last, _) = batch(16, seed=1), batch(8, seed=2)

    def plain() -> Figures:
        with torch.no_grad():
            output = small_model()(last)
        return [len(output), output.mean().item()]

    def theirs() -> Figures:
        schedule = ScheduleGPipe(own_stage(small_model()), CHUNKS)
        with torch.no_grad():
            step(schedule, x)
            # Right if the last batch is padded or dropped, or has a schedule and stages of its own.
            output = step(schedule, last)
        return figures_of(1, *((0, 0) if output is None else (len(output), output.mean().item())))

    def ours() -> Figures:
        pipe = own_half(small_model(), mesh)
        with torch.no_grad():
            pipe(x)
            output = pipe(last)
        return figures_of(1, *((0, 0) if output is None else (len(output), output.mean().item())))

    return Case(["rows that come out", "their mean"], plain, theirs, ours)


def zero_bubble_with_replicas(mesh: Mesh) -> Case:
    """A weight gradient that is computed separately is written to .grad without autograd, unseen by DDP.

    The replicas train on their own halves of the data and drift apart; hooks for gradients are never called.
    """
    x, y = batch()
    rank = distributed.get_rank()
    mine = slice(rank, None, 2)  # of the rows
    called = []

    def watched(model: nn.Sequential) -> nn.Sequential:
        called.clear()
        model[2].weight.register_post_accumulate_grad_hook(called.append)
        return model

    def figures(model: nn.Sequential) -> Figures:
        gradient = model[2].weight.grad
        return figures_of(0, norm([gradient]), spread(gradient), len(called))

    def plain() -> Figures:
        model = watched(small_model())
        F.mse_loss(model(x), y).backward()
        return [norm([model[2].weight.grad]), 0.0, len(called)]

    # Here the two processes are replicas, and each has its own pipeline of two stages.

    def theirs() -> Figures:
        model, device_mesh = watched(small_model()), init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
        replicas, alone = device_mesh.get_group("dp"), device_mesh.get_group("pp")
        stages = [
            PipelineStage(DistributedDataParallel(part, process_group=replicas), number, 2, CPU, group=alone)
            for number, part in enumerate(halves(model))
        ]
        # Right with ScheduleInterleaved1F1B, except for the hook, which is called for each micro-batch.
        ScheduleInterleavedZeroBubble(stages, CHUNKS, loss_fn=F.mse_loss).step(x[mine], target=y[mine])
        return figures(model)

    def ours() -> Figures:
        model = watched(small_model())
        pipe = Pipe(model, CHUNKS, balance=[2, 3], devices=["cpu", "cpu"], schedule="zb-h1", loss_fn=F.mse_loss)
        replica = DistributedDataParallel(pipe)
        replica(x[mine], target=y[mine]).backward()
        return figures(model)

    names = ["gradient norm of a weight", "difference between the replicas", "calls of a hook on the weight"]
    return Case(names, plain, theirs, ours)


def tied_weights(mesh: Mesh) -> Case:
    """A weight that two stages use is copied, and each copy gets the gradient of its own use only.

    From the first step on the copies differ, so this is another model than the one you wrote.
    """
    torch.manual_seed(1)
    words = torch.randint(10, (16,))
    following = words.roll(-1)
    rank = distributed.get_rank()

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Embedding(10, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 10, bias=False))
        layers[3].weight = layers[0].weight
        return layers

    def trained(parameters: Iterator[nn.Parameter], loss_of_step: Callable[[], float]) -> float:
        """The loss of the fifth step."""
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        for _ in range(5):
            optimizer.zero_grad()
            loss = loss_of_step()
            optimizer.step()
        return loss

    def plain() -> Figures:
        layers = model()

        def loss_of_step() -> float:
            loss = F.cross_entropy(layers(words), following)
            loss.backward()
            return loss.item()

        return [trained(layers.parameters(), loss_of_step), 0.0]

    def theirs() -> Figures:
        stage = traced(model(), words[: len(words) // CHUNKS]).build_stage(rank, CPU)
        schedule = ScheduleGPipe(stage, CHUNKS, loss_fn=F.cross_entropy)

        def loss_of_step() -> float:
            losses = []
            # Right if you add the two gradients after each step, over a group of the two processes.
            step(schedule, words, following, losses=losses)
            return torch.stack(losses).mean().item() if losses else 0.0

        loss = trained(stage.submod.parameters(), loss_of_step)
        weight = stage.submod.get_parameter("0.weight" if rank == 0 else "3.weight")
        return figures_of(1, loss, spread(weight))

    def ours() -> Figures:
        layers = model()
        pipe = Pipe(layers, CHUNKS, balance=[2, 2], loss_fn=F.cross_entropy, mesh=mesh)

        def loss_of_step() -> float:
            loss = pipe(words, target=following)
            loss.backward()
            return loss.item()

        loss = trained(pipe.parameters(), loss_of_step)
        return figures_of(1, loss, spread(layers[0 if rank == 0 else 3].weight))

    return Case(["loss after five steps", "difference between the two uses"], plain, theirs, ours)


def traced(model: nn.Sequential, micro_batch: Tensor) -> pipelining.Pipe:
    """The other front end of torch.distributed.pipelining, which traces the model and finds the stages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tracer
        return pipelining.pipeline(model, (micro_batch,), split_spec={"2": SplitPoint.BEGINNING})


def evaluation_of_a_traced_stage(mesh: Mesh) -> Case:
    """A traced stage keeps dropout in the mode in which it was traced; its .eval() changes nothing, without a warning.

    Every validation loss and every prediction is computed without half of the features.
    """
    x = batch()[0].repeat(4, 1)

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Dropout(0.5))

    def figures(output: Tensor) -> tuple[float, float]:
        return output.square().mean().item(), (output == 0).sum().item()

    def plain() -> Figures:
        with torch.no_grad():
            return list(figures(model().eval()(x)))

    def theirs() -> Figures:
        # Right with PipelineStage, or if the model is traced again in eval mode and the weights are copied.
        stage = traced(model(), x[: len(x) // CHUNKS]).build_stage(distributed.get_rank(), CPU)
        stage.submod.eval()
        with torch.no_grad():
            output = step(ScheduleGPipe(stage, CHUNKS), x)
        return figures_of(1, *((0, 0) if output is None else figures(output)))

    def ours() -> Figures:
        pipe = own_half(model(), mesh).eval()
        with torch.no_grad():
            output = pipe(x)
        return figures_of(1, *((0, 0) if output is None else figures(output)))

    return Case(["mean square of the outputs", f"outputs that are zero, of {len(x) * 16}"], plain, theirs, ours)


def saving_of_stages(mesh: Mesh) -> Case:
    """The layers of each nn.Sequential begin at 0, so two stages have weights of the same names: one of each is kept.

    The checkpoint is written and loaded without an error, and half of the model is lost.
    """
    x, _ = batch()

    def model(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    def saved_and_loaded(saved: nn.Module, loaded: nn.Module) -> float:
        """How many tensors have their old values."""
        with shared_folder() as folder:
            checkpoint.save({"model": saved.state_dict()}, checkpoint_id=folder)
            state = {"model": loaded.state_dict()}
            checkpoint.load(state, checkpoint_id=folder)
            loaded.load_state_dict(state["model"])
            pairs = zip(saved.parameters(), loaded.parameters(), strict=True)
            same = torch.tensor(sum(torch.equal(one, other) for one, other in pairs))
            distributed.all_reduce(same)  # both wait for each other
        return float(same)

    def plain() -> Figures:
        with torch.no_grad():
            return [8, model(0)(x).mean().item()]

    def theirs() -> Figures:
        # Right if a stage keeps the model's names, as nn.Sequential(OrderedDict(model.named_children())) does.
        saved, loaded = own_stage(model(0)), own_stage(model(1))
        same = saved_and_loaded(saved.submod, loaded.submod)
        with torch.no_grad():
            output = step(ScheduleGPipe(loaded, CHUNKS), x)
        return figures_of(1, same, 0 if output is None else output.mean().item())

    def ours() -> Figures:
        loaded = own_half(model(1), mesh)
        same = saved_and_loaded(own_half(model(0), mesh), loaded)
        with torch.no_grad():
            output = loaded(x)
        return figures_of(1, same, 0 if output is None else output.mean().item())

    return Case(["tensors that come back, of 8", "mean output of the loaded model"], plain, theirs, ours)


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """A folder of the first process, which both use."""
    with tempfile.TemporaryDirectory() as own:
        names = [own]
        distributed.broadcast_object_list(names)
        yield names[0]


def clipping(mesh: Mesh) -> Case:
    """clip_grad_norm_ uses the gradients of its own process only: each stage is clipped by another norm.

    Stages whose gradients are small are not clipped at all, and the direction of the step changes with the partition.
    """
    x, y = batch()
    limit = 0.1

    def plain() -> Figures:
        model = small_model()
        F.mse_loss(model(x), y).backward()
        before = nn.utils.clip_grad_norm_(model.parameters(), limit)
        return [float(before), norm(gradients(model))]

    def theirs() -> Figures:
        stage = own_stage(small_model())
        step(ScheduleGPipe(stage, CHUNKS, loss_fn=F.mse_loss), x, y)
        # Right with get_total_norm, an all_reduce of its square over the processes, and clip_grads_with_norm_.
        before = nn.utils.clip_grad_norm_(stage.submod.parameters(), limit)
        return [*figures_of(0, before), norm_of_both(gradients(stage.submod))]

    def ours() -> Figures:
        pipe = own_half(small_model(), mesh)
        pipe(x, target=y).backward()
        before = pipe.clip_grad_norm_(limit)
        return [float(before), norm_of_both(gradients(pipe))]

    return Case(["norm that the first process gets", f"gradient norm after clipping to {limit}"], plain, theirs, ours)


def batches_of_other_sizes(mesh: Mesh) -> Case:
    """Fewer rows than before: a loss of new and old rows, then one process dies. More: gloo aborts the process.

    The last batch of an epoch, or the next longer text, ends the job; the loss that was logged before was wrong.
    """
    sizes = (4, 32)

    def plain() -> Figures:
        model = small_model()
        return [F.mse_loss(model(x), y).item() for x, y in (batch(rows, seed=2) for rows in sizes)]

    def theirs() -> Figures:
        """In other processes, which may die."""
        # Right if every batch has the same size: padded, or dropped (drop_last=True).
        ends = [""] * len(sizes)
        if distributed.get_rank() == 0:
            jobs = [start_two("--rows", str(rows), capture=True) for rows in sizes]
            ends = [end_of(job) for job in jobs]
        distributed.broadcast_object_list(ends)
        return [float(end) if re.fullmatch(r"[\d.]+", end) else end for end in ends]

    def ours() -> Figures:
        pipe = own_half(small_model(), mesh, schedule="1f1b")
        losses = [pipe(x, target=y).item() for x, y in (batch(rows, seed=2) for rows in (16, *sizes))]
        return losses[1:]

    return Case([f"loss of {rows} rows after 16" for rows in sizes], plain, theirs, ours)


CASES = [
    gradient_accumulation,
    evaluation_before_the_optimizer,
    shapes_from_a_real_forward,
    smaller_last_batch,
    zero_bubble_with_replicas,
    tied_weights,
    evaluation_of_a_traced_stage,
    saving_of_stages,
    clipping,
    batches_of_other_sizes,
]


# ---- Processes ----


class Job(NamedTuple):
    """Two processes, and the store through which they find each other: it lives here, as torchrun's in torchrun."""

    processes: list[subprocess.Popen[str]]
    store: distributed.TCPStore


def start_two(*arguments: str, capture: bool = False) -> Job:
    """Starts this script in two processes, as torchrun would."""
    store = distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    output = subprocess.PIPE if capture else None
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, *arguments],
            env={**inherited, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=output,
            text=True,
        )
        for rank in range(2)
    ]
    return Job(processes, store)


def wait_for(job: Job) -> int:
    """Waits until all processes have ended, or one has failed, for which the others would wait."""
    try:
        while None in (codes := [process.poll() for process in job.processes]) and not any(codes):
            time.sleep(0.05)
    except KeyboardInterrupt:
        return 130
    finally:
        for process in job.processes:
            process.kill()
            process.wait()
    return next((abs(code) for code in codes if code), 0)


def last_of_two_batches(rows: int) -> None:
    """Two steps of 1F1B, with 16 rows and with another number of them. The process may die in it."""
    warnings.simplefilter("ignore")  # mse_loss warns of different numbers of rows and targets, again and again
    distributed.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE / 2))

    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(output, target)
        print(f"loss {loss.item()}", flush=True)
        return loss

    schedule = Schedule1F1B(own_stage(small_model()), CHUNKS, loss_fn=loss_of)
    for size in (16, rows):
        print(f"rows {size}", flush=True)
        step(schedule, *batch(size, seed=2))
    print("done", flush=True)


def end_of(job: Job) -> str:
    """The last loss of `last_of_two_batches`, and the error or signal that ended its processes."""
    outputs, causes = [], []
    for process in job.processes:
        try:
            out, errors = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            out, errors = process.communicate()
        outputs.append(out)
        if process.returncode < 0:
            causes.insert(0, signal.Signals(-process.returncode).name)
        elif process.returncode > 0:
            causes += re.findall(r"^(?:\[rank\d\]: )?([\w.]+Error)\b", errors, re.MULTILINE)[-1:] or ["error"]
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", outputs[1].rpartition("rows")[2])]
    mean = [f"{sum(losses) / len(losses)}"] if losses else []
    if not causes:
        return mean[0]
    return ", then ".join([*(f"{float(each):.4g}" for each in mean), causes[0]])


# ---- The table ----


def attempted(compute: Callable[[], Figures], count: int) -> Figures:
    """The figures; if there is an error, its name."""
    try:
        return compute()
    except Exception as error:
        return [type(error).__name__] * count


def is_right(figure: float | str, truth: float | str) -> bool:
    return not isinstance(figure, str) and math.isclose(figure, truth, rel_tol=1e-6, abs_tol=1e-9)


def shown(figure: float | str, truth: float | str) -> str:
    text = figure if isinstance(figure, str) else f"{figure:.6g}"
    return text if is_right(figure, truth) else f"{text}  WRONG"


def line(*columns: str) -> str:
    return "{:<40}{:<14}{:<34}{}".format(*columns).rstrip()


def table(mesh: Mesh) -> bool:
    """Computes and prints everything; returns whether pipework is right everywhere."""
    first, right, wrong = mesh.rank == 0, True, 0

    def show(text: str) -> None:
        if first:
            print(text, flush=True)

    show(f"PyTorch {torch.__version__}, two processes, gloo\n")
    show(line("", "the model", "torch.distributed", ""))
    show(line("", "alone", ".pipelining", "pipework"))
    for number, case in enumerate(CASES, 1):
        names, plain, theirs, ours = case(mesh)
        every = [attempted(compute, len(names)) for compute in (plain, theirs, ours)]
        show(f"\n{number:2} {case.__name__.replace('_', ' ')}")
        for name, truth, of_theirs, of_ours in zip(names, *every, strict=True):
            show(line(f"   {name}", f"{truth:.6g}", shown(of_theirs, truth), shown(of_ours, truth)))
            right = right and is_right(of_ours, truth)
        wrong += not all(map(is_right, every[1], every[0]))
        for sentence in filter(str.strip, case.__doc__.splitlines()):
            show(f"   {sentence.strip()}")
    show(f"\n{wrong} of {len(CASES)} cases are wrong with torch.distributed.pipelining.")
    return right


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What torch.distributed.pipelining computes wrongly without an error.")
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)  # for processes that may die
    options = parser.parse_args(argv)
    if "RANK" not in os.environ:
        return wait_for(start_two())
    torch.set_default_dtype(torch.float64)  # so that differences are not due to rounding
    if options.rows:
        last_of_two_batches(options.rows)
        return 0
    mesh = pipework.init()
    if len(mesh.ranks) != 2:
        sys.exit(f"this example needs two processes, got {len(mesh.ranks)}: start it with --nproc-per-node 2")
    right = table(mesh)
    distributed.barrier()
    distributed.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
