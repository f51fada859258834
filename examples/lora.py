"""Trains adapters of PEFT over a causal model from a folder, in a pipe of two workers.

    python examples/lora.py             # a tiny Llama with random weights, in seconds on a CPU
    python examples/lora.py FOLDER      # a model of yours, as save_pretrained or the Hub has it

Needs: pip install ".[hf]"  # from a checkout
"""

import argparse
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import pipework

parser = argparse.ArgumentParser(description="Trains adapters of a causal model in a pipe.")
parser.add_argument("folder", nargs="?", help="of the model's weights and config.json")
parser.add_argument("--steps", type=int, default=8, help="(%(default)s)")
parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")


def make_folder() -> str:
    """Stands for weights from elsewhere."""
    folder = tempfile.mkdtemp()
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def main(argv: list[str] | None = None) -> None:
    options = parser.parse_args(argv)
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_pretrained(options.folder or make_folder())  # on GPUs: dtype=torch.bfloat16
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")).train()
    # Your tokenizer instead: tokenizer(texts, return_tensors="pt", padding=True), with labels of -100 on the padding.
    ids = torch.arange(32)[:, None] % 8 * 5 + torch.arange(24)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    devices = ["cpu", "cpu"]  # None: all GPUs. One process for each GPU: torchrun, and mesh=pipework.init() instead.
    sample = {name: value[:2] for name, value in batch.items()}
    pipe = pipework.attach(model, sample, chunks=8, devices=devices)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    for step in range(1, options.steps + 1):
        loss = model(**batch).loss  # runs the whole schedule
        loss.backward()
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.4f}")
    model.save_pretrained(folder := tempfile.mkdtemp())  # with a mesh: pipework.save_pretrained(pipe, folder)
    print(f"the adapters are in {folder}")


if __name__ == "__main__":
    main()
