"""Trains a small Llama of transformers in a pipeline, byte by byte, on the source text of Python's own library.

    python examples/finetune.py            # about a minute on two CPU cores; uses every accelerator it finds
    python examples/finetune.py --lora     # with adapters of PEFT: only these are trained
    torchrun --nproc-per-node 2 examples/finetune.py     # the same in two processes

The model is transformers' own class, and nothing of it is rewritten: `pipework.attach` cuts it. With a model of yours,
replace `LlamaForCausalLM(...)` by `AutoModelForCausalLM.from_pretrained(folder)`.
Needs: pip install ".[hf]"  # from a checkout
"""

import argparse
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import pipework

CONTEXT = 128  # bytes that the model sees at a time

parser = argparse.ArgumentParser(description="Trains a small Llama in a pipeline.")
parser.add_argument("--schedule", default="1f1b", help="in which order the workers work (%(default)s)")
parser.add_argument("--stages", type=int, default=2, help="workers on CPU, without accelerators (%(default)s)")
parser.add_argument("--chunks", type=int, default=8, help="micro-batches of a mini-batch (%(default)s)")
parser.add_argument("--rows", type=int, default=32, help="of a mini-batch (%(default)s)")
parser.add_argument("--steps", type=int, default=100, help="(%(default)s)")
parser.add_argument("--lora", action="store_true", help="train adapters of rank 8 only")
parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")


def read_text() -> Tensor:
    """The bytes of the standard library's modules."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def draw_batch(text: Tensor, rows: int) -> dict[str, Tensor]:
    """Random rows. The labels are the inputs: transformers compares each position with the next label."""
    starts = torch.randint(len(text) - CONTEXT, (rows, 1))
    ids = text[starts + torch.arange(CONTEXT)].long()
    return {"input_ids": ids, "labels": ids.clone()}


def make_model(lora: bool) -> torch.nn.Module:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=6, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=CONTEXT, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model


def main(argv: list[str] | None = None) -> None:
    options = parser.parse_args(argv)
    mesh = pipework.init()  # None, unless torchrun has started this process as one of several
    torch.manual_seed(options.seed)
    text = read_text()
    model = make_model(options.lora)
    sample = draw_batch(text, max(1, options.rows // options.chunks))
    accelerators = torch.accelerator.device_count()
    devices = None if mesh is not None or accelerators > 1 else ["cpu"] * options.stages
    pipe = pipework.attach(model, sample, chunks=options.chunks, schedule=options.schedule, devices=devices, mesh=mesh)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2 if options.lora else 3e-3)
    is_shown = pipe.is_last
    if is_shown:
        print(f"{type(model).__name__}, {sum(map(Tensor.numel, trained)):,} trained parameters here")
    start = time.perf_counter()
    for step in range(1, options.steps + 1):
        loss = model(**draw_batch(text, options.rows)).loss  # runs the whole schedule
        loss.backward()
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if is_shown and (step % max(1, options.steps // 10) == 0 or step == 1):
            speed = step * options.rows * CONTEXT / (time.perf_counter() - start)
            print(f"step {step}/{options.steps}  loss {loss.item():.3f}  {speed:,.0f} tokens/s", flush=True)
    if mesh is None:  # the model has all its layers in this process, and is what it always was
        model.eval()
        prompt = torch.tensor([list(b"def ")])
        written = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=60, do_sample=False)
        print(repr(bytes(written[0].tolist()).decode("latin-1")))


if __name__ == "__main__":
    main()
