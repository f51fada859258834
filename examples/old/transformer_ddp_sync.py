"""The model of transformer_sync.py in two processes, each with a pipeline of two stages, as it was written in 2021.

    python -m pipework.compat examples/old/transformer_ddp_sync.py  # half a minute on two CPU cores

Each process initializes RPC for itself, as a world of one, and joins a process group of both. `DistributedDataParallel`
wraps its `Pipe`, averages the gradients and returns the reference to the output. In 2021 that needed
checkpoint="never". The script starts the processes with `mp.spawn`, and they find the old modules, too. Four
GPUs are used if there are four, else the CPU.
"""

import copy
import math
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import rpc
from torch.distributed.pipeline.sync import Pipe
from torch.nn.parallel import DistributedDataParallel

# The script next to this one.
from transformer_sync import batchify, evaluate, parser, read_text, train, two_partitions

REPLICAS = 2


def mean(value):
    """The mean over all processes."""
    tensor = torch.tensor(value)
    dist.all_reduce(tensor)
    return tensor.item() / dist.get_world_size()


def have_equal_parameters(model):
    """Whether all processes have the same parameters, to the last bit."""
    mine = torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(each, everyone[0]) for each in everyone)


def run_worker(rank, folder, options):
    torch.set_num_threads(max(1, torch.get_num_threads() // REPLICAS))
    torch.manual_seed(options.seed)  # the same model in all processes
    devices = ["cpu", "cpu"]
    if torch.cuda.device_count() >= 2 * REPLICAS:
        devices = [f"cuda:{2 * rank}", f"cuda:{2 * rank + 1}"]

    rpc_options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc-{rank}")
    rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=rpc_options)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ddp", rank=rank, world_size=REPLICAS)
    pipe = Pipe(two_partitions(options, devices), chunks=4, checkpoint="never")
    model = DistributedDataParallel(pipe)
    torch.manual_seed(options.seed + 1 + rank)  # other dropout masks in each process

    texts = [batchify(part, options.batch_size)[rank::REPLICAS] for part in read_text(options.words)]
    train_text, valid_text, test_text = texts
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8)
    best, best_state = float("inf"), None
    for epoch in range(1, options.epochs + 1):
        for step, loss in enumerate(train(model, optimizer, train_text, devices, options.context), start=1):
            if rank == 0 and step % 30 == 0:
                print(f"epoch {epoch}  step {step}  loss {loss:.3f} in process 0", flush=True)
            if step == options.steps:
                break
        loss = mean(evaluate(pipe, valid_text, devices, options.context))
        if rank == 0:
            print(f"epoch {epoch}  validation loss {loss:.3f}  perplexity {math.exp(loss):.1f}", flush=True)
        if loss < best:
            best, best_state = loss, copy.deepcopy(pipe.state_dict())
        scheduler.step()
    pipe.load_state_dict(best_state)
    loss, equal = mean(evaluate(pipe, test_text, devices, options.context)), have_equal_parameters(pipe)
    if rank == 0:
        print(f"test perplexity {math.exp(loss):.1f}")
        print(f"parameters of both processes: {'equal, to the last bit' if equal else 'DIFFERENT'}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    rpc.shutdown()
    if not equal:
        raise SystemExit(1)


def main():
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_worker, args=(folder, options), nprocs=REPLICAS, join=True)


if __name__ == "__main__":
    main()
