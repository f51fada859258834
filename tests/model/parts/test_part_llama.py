"""The bytes between the parts of a Llama: hidden states and integers, and no masks that each part makes itself."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipework.attached import to_sequential
from pipework.values import nested

ROWS, TOKENS, WIDTH, HEAD = 2, 16, 32, 8


def test_a_message_of_a_decoder() -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=4, num_attention_heads=WIDTH // HEAD,
        num_key_value_heads=2, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    ids = torch.randint(3, 64, (ROWS, TOKENS))
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0  # so that each layer gets a mask of all pairs of tokens
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}
    value = batch
    parts = to_sequential(LlamaForCausalLM(config), batch)
    sent = []
    for number, part in enumerate(list(parts)[:-1]):
        value = part(**value) if number == 0 else part(value)
        tensors, _ = nested.flatten(value)
        sent.append([tensor for tensor in tensors if tensor.is_floating_point()])
        assert sum(tensor.nbytes for tensor in tensors if not tensor.is_floating_point()) == 3 * ids.nbytes
    positions = [[1, TOKENS, HEAD]] * 2  # computed once, by a module that is given hidden states
    shapes = [sorted(list(tensor.shape) for tensor in tensors) for tensors in sent]
    assert shapes == [[*positions, [ROWS, TOKENS, WIDTH]]] * 4 + [[[ROWS, TOKENS, WIDTH]]] * 2
