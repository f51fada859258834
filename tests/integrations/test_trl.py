"""The trainers of TRL, with a pipe attached to the body of the model, below the loss."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipework import attach
from tests.integrations.tiny import llama

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore"),  # of TRL's own choices, such as options that are deprecated
]
CHUNKS = 2  # of two gradients both orders of the sum have the same bits


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", "<pad>", *(f"w{number}" for number in range(34))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def text(words: int, start: int) -> str:
    return " ".join(f"w{(start * 7 + 3 * number) % 34}" for number in range(words))


def with_adapters(model: Any) -> Any:
    import peft

    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(model, config)


def classifier() -> Any:
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForSequenceClassification(llama(num_labels=1).config)


def sft(model: Any, **options: Any) -> Any:
    import trl

    rows = [{"text": text(3 + number % 3, number)} for number in range(8)]
    return trl.SFTTrainer(model, **options_of(trl.SFTConfig, rows, **options))


def dpo(model: Any, **options: Any) -> Any:
    import trl

    rows = [{"prompt": text(2, n), "chosen": text(3, n + 1), "rejected": text(4, n + 2)} for n in range(8)]
    reference = None if hasattr(model, "peft_config") else llama()
    return trl.DPOTrainer(model, reference, **options_of(trl.DPOConfig, rows, **options))


def reward(model: Any, **options: Any) -> Any:
    import trl

    rows = [{"chosen": text(3, number), "rejected": text(4, number + 5)} for number in range(8)]
    return trl.RewardTrainer(model, **options_of(trl.RewardConfig, rows, **options))


def kto(model: Any, **options: Any) -> Any:
    import trl

    rows = [{"prompt": text(2, n), "completion": text(3, n + 1), "label": n % 2 == 0} for n in range(8)]
    return trl.KTOTrainer(model, llama(), **options_of(trl.KTOConfig, rows, **options))


def grpo(model: Any, **options: Any) -> Any:
    """Its model writes the texts itself, with numbers that it draws: a pipe that trains has drawn one before."""
    import transformers
    import trl

    class Seeds(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            torch.manual_seed(state.global_step)

    def reward(completions: list[str], **others: Any) -> list[float]:
        return [float(len({*each.split()})) for each in completions]

    rows = [{"prompt": text(2, number)} for number in range(8)]
    arguments = options_of(trl.GRPOConfig, rows, num_generations=2, max_completion_length=4, **options)
    return trl.GRPOTrainer(model, reward, callbacks=[Seeds()], **{**arguments, "eval_dataset": None})


def options_of(kind: Any, rows: list[dict[str, str]], **options: Any) -> dict[str, Any]:
    from datasets import Dataset

    arguments = kind(
        use_cpu=True, report_to=[], disable_tqdm=True, max_steps=2, per_device_train_batch_size=4, save_strategy="no",
        logging_steps=1, learning_rate=1e-2, gradient_checkpointing=False, bf16=False, **options,
    )  # fmt: skip
    data = Dataset.from_list(rows)
    return {"args": arguments, "train_dataset": data, "eval_dataset": data, "processing_class": tokenizer()}


def with_pipe(model: Any) -> Any:
    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    sample = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    core = model.get_base_model() if hasattr(model, "peft_config") else model
    attach(core.base_model, sample, chunks=CHUNKS, schedule="gpipe", devices=["cpu", "cpu"])
    return model


def in_micro_batches(model: Any) -> Any:
    """The same model; what is below the loss runs for each micro-batch by itself."""
    core = (model.get_base_model() if hasattr(model, "peft_config") else model).base_model
    whole = core.forward

    def forward(input_ids: torch.Tensor, **batch: Any) -> Any:
        batch["input_ids"] = input_ids
        cut = {name: value.tensor_split(CHUNKS) for name, value in batch.items() if isinstance(value, torch.Tensor)}
        results = [whole(**batch | {name: each[number] for name, each in cut.items()}) for number in range(CHUNKS)]
        return type(results[0])(last_hidden_state=torch.cat([each.last_hidden_state for each in results]))

    core.forward = forward
    return model


@pytest.mark.parametrize(
    ("trainer", "model"),
    [
        (sft, llama),
        (sft, lambda: with_adapters(llama())),
        (dpo, llama),
        (dpo, lambda: with_adapters(llama())),
        (reward, classifier),
        (kto, llama),
        (grpo, llama),
    ],
    ids=["sft", "sft_adapters", "dpo", "dpo_adapters", "reward", "kto", "grpo"],
)
def test_training_is_that_of_the_micro_batches_to_the_last_bit(
    trainer: Callable[..., Any], model: Callable[[], nn.Module], tmp_path: Path
) -> None:
    pytest.importorskip("trl")
    logs, states = [], []
    for prepared in (with_pipe, in_micro_batches):
        made = trainer(prepared(model()), output_dir=str(tmp_path))
        made.train()
        if made.eval_dataset is not None:
            made.evaluate()
        logs.append([entry.get("loss", entry.get("eval_loss")) for entry in made.state.log_history])
        states.append(made.model.state_dict())
    assert len(logs[0]) == 3 + (made.eval_dataset is not None)
    assert logs[0] == logs[1]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_a_pipe_around_the_loss_is_refused_where_the_trainer_goes_past_it(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    model, ids = llama(), torch.tensor([[3, 4, 5], [6, 7, 8]])
    attach(model, {"input_ids": ids, "labels": ids}, chunks=CHUNKS, devices=["cpu", "cpu"])
    with pytest.raises(RuntimeError, match=r"got gradients of a LlamaForCausalLM .*_fused_forward.*base_model"):
        sft(model, output_dir=str(tmp_path)).train()
