"""Trains the model of transformer.py as two replicas: two processes, each with a pipeline of two stages.

    torchrun --nproc-per-node 2 examples/transformer_ddp.py
    python examples/transformer_ddp.py              # the same: it starts the two processes itself

                      process 0                            process 1
     words     half of each mini-batch's rows       the other half of its rows
     pipe      stage 0  ->  stage 1                 stage 0  ->  stage 1
     backward          gradients  <---- averaged by DDP ---->  gradients

So both take the steps that one process would take with whole mini-batches, and their parameters stay equal. The script
compares them at the end. Ctrl-C ends the training early. Needs: pip install ".[train]"  # from a checkout
"""

import argparse
import gc
import os
import signal
import sys
import tempfile
from pathlib import Path

import torch
from torch import distributed, multiprocessing
from torch.nn.parallel import DistributedDataParallel

# The script next to this one: model, text and training loop are the same.
from transformer import (
    Progress,
    batchify,
    check,
    evaluate,
    fail,
    language_model,
    options_of_training,
    perplexity,
    read_corpus,
    train,
)

from pipework import Pipe

REPLICAS = 2  # processes, without torchrun


def mean(*values: float, device: torch.device) -> list[float]:
    """The mean of each value over all processes."""
    tensor = torch.tensor(values, device=device)
    distributed.all_reduce(tensor)
    return (tensor / distributed.get_world_size()).tolist()


def have_equal_parameters(pipe: Pipe) -> bool:
    """Whether all processes have the same parameters, to the last bit."""
    mine = torch.cat([parameter.detach().flatten().to(pipe.input_device) for parameter in pipe.parameters()])
    everyone = [torch.empty_like(mine) for _ in range(distributed.get_world_size())]
    distributed.all_gather(everyone, mine)
    return all(torch.equal(each, everyone[0]) for each in everyone)


def replica(rank: int, local_rank: int, replicas: int, init_method: str, options: argparse.Namespace) -> int:
    """Runs in each process; `replicas` of them are on this machine."""
    equal = train_replica(rank, local_rank, replicas, init_method, options)
    # DistributedDataParallel must be freed before the process group, whose last holder joins gloo's threads: at the end
    # of the process these can no longer end, and it would hang or be aborted. What PyTorch has caught while it made the
    # first DistributedDataParallel of a process refers to its frames, and so to all that training has left behind.
    gc.collect()
    distributed.barrier()
    distributed.destroy_process_group()
    return 0 if equal else 1


def train_replica(rank: int, local_rank: int, replicas: int, init_method: str, options: argparse.Namespace) -> bool:
    """Trains, and returns whether all processes end with the same parameters."""
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True  # Both processes stop after the same step.
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # A second Ctrl-C does not wait.

    signal.signal(signal.SIGINT, interrupt)

    # Every stage of every process has its own accelerator if there are enough; else stages share them.
    found, stages = torch.accelerator.device_count(), options.stages
    places = range(local_rank * stages, (local_rank + 1) * stages)
    devices = [place * found // (replicas * stages) if found else "cpu" for place in places]
    backend = "gloo"
    if found >= replicas * stages:
        torch.accelerator.set_device_index(devices[0])
        backend = distributed.get_default_backend_for_device(torch.accelerator.current_accelerator())
    world = int(os.environ.get("WORLD_SIZE", replicas))
    distributed.init_process_group(backend, init_method=init_method, rank=rank, world_size=world)

    corpus = read_corpus(options)
    torch.manual_seed(options.seed)  # the same model everywhere
    model = language_model(options, len(corpus.words))
    torch.manual_seed(options.seed + 1 + rank)  # other dropout masks everywhere

    # ---- Two processes need only these lines; the training loop is the same as for one ----
    pipe = Pipe(model, chunks=options.chunks, checkpoint=options.checkpoint, devices=devices)
    model = DistributedDataParallel(pipe)
    texts = [batchify(part, options.batch_size)[rank::world] for part in (corpus.train, corpus.valid, corpus.test)]

    train_text, valid_text, test_text = texts
    optimizer = torch.optim.SGD(model.parameters(), lr=options.rate)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    if rank == 0:
        print(f"{world} processes, each with {len(train_text)} of {options.batch_size} rows; the first has\n{pipe}")
    progress = Progress(options, options.batch_size, train_text.size(1)) if rank == 0 else None
    best, stop = float("inf"), 0.0
    for epoch in range(1, options.epochs + 1):
        for step, own_loss in enumerate(train(model, optimizer, train_text, options.context), 1):
            loss, stop = mean(own_loss, interrupted, device=pipe.output_device)
            if progress:
                progress.step(epoch, step, loss)
            if stop or step == options.steps:
                break
        # Evaluate the pipe without DDP: there are no gradients to average.
        (loss,) = mean(evaluate(pipe, valid_text, options.context), device=pipe.output_device)
        if progress:
            progress.epoch(epoch, loss, best)
        best = min(loss, best)
        scheduler.step()
        if stop:
            break

    if options.timeline:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        with pipe.record() as recording:  # one more step, which does not change the model
            next(train(model, optimizer, train_text, options.context))
        if rank == 0:
            recording.save(options.timeline)
            print(f"bubble {recording.bubble():.0%} in process 0: {options.timeline}")
    (loss,) = mean(evaluate(pipe, test_text, options.context), device=pipe.output_device)
    equal = have_equal_parameters(pipe)
    if rank == 0:
        print("stopped early" if stop else f"test perplexity {perplexity(loss):.1f}")
        print(f"parameters of all {world} processes: {'equal, to the last bit' if equal else 'DIFFERENT'}", flush=True)
    return equal


def start_replica(rank: int, init_method: str, options: argparse.Namespace) -> None:
    sys.exit(replica(rank, rank, REPLICAS, init_method, options))


def main(argv: list[str] | None = None) -> int:
    parser = options_of_training("Trains a transformer in two processes, each with a pipeline.")
    parser.set_defaults(stages=2)
    options = parser.parse_args(argv)
    check(options)
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    world = int(os.environ["WORLD_SIZE"]) if by_torchrun else REPLICAS
    if options.batch_size % world:
        fail(f"--batch-size is {options.batch_size}: it must be a multiple of {world}, the number of processes")
    if by_torchrun:
        rank, local_rank, replicas = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        return replica(rank, local_rank, replicas, "env://", options)

    read_corpus(options)  # A wrong option is reported once, here, and not by every process.
    print(
        f"starting {REPLICAS} processes, as this does: torchrun --nproc-per-node {REPLICAS} {sys.argv[0]}", flush=True
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // REPLICAS)))  # of each process
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True  # Ctrl-C reaches all processes; this one waits for the others.

    signal.signal(signal.SIGINT, interrupt)
    with tempfile.TemporaryDirectory() as folder:
        init_method = Path(folder, "rendezvous").as_uri()
        try:
            multiprocessing.spawn(start_replica, (init_method, options), nprocs=REPLICAS)
        except multiprocessing.ProcessExitedException as ended:
            return 130 if interrupted else ended.exit_code
    return 130 if interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
