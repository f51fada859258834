"""A transformer language model, trained as with torch.distributed.pipeline.sync in 2021. Nothing here knows pipework.

    python -m pipework.compat examples/old/transformer_sync.py      # half a minute on two CPU cores

Typical of its time: RPC is initialized although there is one process. The layers are put on their devices before
they are wrapped, each partition in an nn.Sequential of its own. Data are moved by hand. `Pipe` returns a reference,
and `local_value()` gets its output. The mask goes with the data from layer to layer; `NoChunk` keeps it in one piece.
Two GPUs are used if there are two, else the CPU.
"""

import argparse
import copy
import math
import re
import tempfile
from collections import Counter
from pydoc_data.topics import topics  # what help("lambda") prints: a part of every Python

import torch
from torch import nn
from torch.distributed import rpc
from torch.distributed.pipeline.sync import NoChunk, Pipe

parser = argparse.ArgumentParser(description="A transformer language model in a pipeline, as it was written in 2021.")
parser.add_argument("--epochs", type=int, default=2, metavar="N", help="passes through the text (%(default)s)")
parser.add_argument("--steps", type=int, metavar="N", help="at most so many mini-batches in an epoch (all)")
parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="rows of a mini-batch (%(default)s)")
parser.add_argument("--context", type=int, default=64, metavar="N", help="words in a row (%(default)s)")
parser.add_argument("--width", type=int, default=48, metavar="N", help="features of a word (%(default)s)")
parser.add_argument("--layers", type=int, default=2, metavar="N", help="encoder layers (%(default)s)")
parser.add_argument("--words", type=int, default=1000, metavar="N", help="size of the vocabulary (%(default)s)")
parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is random (%(default)s)")


# ---- Text ------------------------------------------------------------------------------------------------------------
def read_text(vocabulary):
    """Numbers that stand for words, 0 for all rare ones: for training, for validation, and for the test."""
    texts = [topics[name] for name in sorted(topics)]
    paragraphs = list(dict.fromkeys(paragraph for text in texts for paragraph in text.split("\n\n")))
    parts = [[], [], []]
    for number, paragraph in enumerate(paragraphs):
        part = {8: 1, 9: 2}.get(number // 5 % 10, 0)
        parts[part] += re.findall(r"\w+|[^\w\s]", paragraph.lower())
    frequent = Counter(parts[0]).most_common(vocabulary - 1)
    numbers = {word: number for number, (word, _) in enumerate(frequent, start=1)}
    return [torch.tensor([numbers.get(word, 0) for word in part]) for part in parts]


def batchify(tokens, rows):
    return tokens[: len(tokens) // rows * rows].view(rows, -1)


def batches(text, context):
    """Rows of words and, as targets, the word after each of them."""
    for start in range(0, text.size(1) - 1, context):
        end = min(start + context, text.size(1) - 1)
        yield text[:, start:end], text[:, start + 1 : end + 1]


# ---- Model: each layer passes the mask on ----------------------------------------------------------------------------
class Encoder(nn.Module):
    def __init__(self, words, width, context):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.dropout = nn.Dropout(0.1)
        position = torch.arange(context).unsqueeze(1)
        frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        table = torch.zeros(context, width)
        table[:, 0::2] = torch.sin(position * frequency)
        table[:, 1::2] = torch.cos(position * frequency)
        self.register_buffer("table", table)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, words, mask):
        features = self.embedding(words) * math.sqrt(self.table.size(1))
        return self.dropout(features + self.table[: words.size(1)]), mask


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)

    def forward(self, features, mask):
        return self.layer(features, src_mask=mask), mask


class Decoder(nn.Module):
    def __init__(self, width, words):
        super().__init__()
        self.linear = nn.Linear(width, words)

    def forward(self, features, mask):
        return self.linear(features)


def two_partitions(options, devices):
    """The layers in two halves, each on its device."""
    encoder = Encoder(options.words, options.width, options.context)
    blocks = [Block(options.width) for _ in range(options.layers)]
    decoder = Decoder(options.width, options.words)
    half = len(blocks) // 2
    return nn.Sequential(
        nn.Sequential(encoder, *blocks[:half]).to(devices[0]),
        nn.Sequential(*blocks[half:], decoder).to(devices[1]),
    )


# ---- Training --------------------------------------------------------------------------------------------------------
def loss_of(model, words, targets, devices):
    length = words.size(1)
    mask = torch.ones(length, length, dtype=torch.bool, device=devices[0]).triu(1)  # True: must not be seen
    output = model(words.to(devices[0]), NoChunk(mask)).local_value()
    targets = targets.reshape(-1).to(devices[1])
    return nn.functional.cross_entropy(output.view(targets.size(0), -1), targets)


def train(model, optimizer, text, devices, context):
    model.train()
    for words, targets in batches(text, context):
        optimizer.zero_grad()
        loss = loss_of(model, words, targets, devices)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        yield loss.item()


def evaluate(model, text, devices, context):
    """The mean loss of a word."""
    model.eval()
    total = 0.0
    with torch.no_grad():
        for words, targets in batches(text, context):
            total += loss_of(model, words, targets, devices).item() * words.size(1)
    return total / (text.size(1) - 1)


def run(options):
    torch.manual_seed(options.seed)
    devices = ["cuda:0", "cuda:1"] if torch.cuda.device_count() >= 2 else ["cpu", "cpu"]
    train_text, valid_text, test_text = (batchify(part, options.batch_size) for part in read_text(options.words))
    model = Pipe(two_partitions(options, devices), chunks=8)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(model)} layers in {len(model.partitions)} partitions on {devices}, {parameters:,} parameters")

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8)
    best, best_state = float("inf"), None
    for epoch in range(1, options.epochs + 1):
        for step, loss in enumerate(train(model, optimizer, train_text, devices, options.context), start=1):
            if step % 30 == 0:
                print(f"epoch {epoch}  step {step}  loss {loss:.3f}", flush=True)
            if step == options.steps:
                break
        loss = evaluate(model, valid_text, devices, options.context)
        print(f"epoch {epoch}  validation loss {loss:.3f}  perplexity {math.exp(loss):.1f}", flush=True)
        if loss < best:
            best, best_state = loss, copy.deepcopy(model.state_dict())
        scheduler.step()
    model.load_state_dict(best_state)
    print(f"test perplexity {math.exp(evaluate(model, test_text, devices, options.context)):.1f}")


def main():
    options = parser.parse_args()
    with tempfile.NamedTemporaryFile() as file:
        rpc_options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{file.name}")
        rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=rpc_options)
        run(options)
        rpc.shutdown()


if __name__ == "__main__":
    main()
