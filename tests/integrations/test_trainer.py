"""The `Trainer` of transformers with an attached pipe, beside one that runs each micro-batch by itself."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipework import MicroBatches
from tests.integrations.tiny import MicroBatched, llama, pipe_of, rows, same_values, with_pipe

# PEFT asks transformers by an older name.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing. is deprecated:FutureWarning")


ARGUMENTS = (
    "compute_metrics",
    "compute_loss_func",
    "model_init",
    "data_collator",
)  # of trainers; others are training arguments


def trainer_of(folder: Path, model: Any, *, micro_batched: bool = False, **options: Any) -> Any:
    """Nine rows in mini-batches of four; each step is logged."""
    import transformers

    own = {name: options.pop(name) for name in list(options) if name in ARGUMENTS}
    settings = {
        "use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "learning_rate": 1e-2,
        "per_device_train_batch_size": 4, "num_train_epochs": 2, "save_strategy": "no", **options,
    }  # fmt: skip
    kind = type("Reference", (MicroBatched, transformers.Trainer), {}) if micro_batched else transformers.Trainer
    arguments = transformers.TrainingArguments(output_dir=str(folder), **settings)
    trainer = kind(model=model, args=arguments, train_dataset=rows(9), eval_dataset=rows(6), **own)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def logged(trainer: Any) -> list[tuple[float, ...]]:
    names = ("loss", "grad_norm", "learning_rate", "epoch")
    return [tuple(entry[name] for name in names) for entry in trainer.state.log_history if "loss" in entry]


def same_parameters(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def with_adapters(model: nn.Module) -> Any:
    import peft

    torch.manual_seed(3)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def same_logs(trainers: Sequence[Any], tolerance: float) -> None:
    """Trains both to the end; what they have logged is the same."""
    for trainer in trainers:
        trainer.train()
    for one, other in zip(*map(logged, trainers), strict=True):
        assert one == pytest.approx(other, rel=tolerance)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "num_train_epochs": 1}, id="accumulation"
        ),
        pytest.param(
            {"max_grad_norm": 0.0, "optim": "adafactor", "dataloader_drop_last": True},
            id="no_clipping_and_drop_last",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            {"per_device_train_batch_size": 3, "bf16": True},
            id="fewer_rows_than_chunks_and_bf16",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_training_is_that_of_the_micro_batches_to_the_last_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    trainers = [
        trainer_of(tmp_path, with_pipe(llama()), **options),
        trainer_of(tmp_path, llama(), micro_batched=True, **options),
    ]
    for trainer in trainers:
        trainer.train()
    assert len(logged(trainers[0])) >= 2
    assert logged(trainers[0]) == logged(trainers[1])
    assert same_parameters(trainers[0].model, trainers[1].model)


@pytest.mark.thorough
def test_evaluation_metrics_and_predictions(tmp_path: Path) -> None:
    def accuracy(predicted: Any) -> dict[str, float]:
        return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}

    one, other = (
        trainer_of(tmp_path, model, compute_metrics=accuracy, per_device_eval_batch_size=4)
        for model in (with_pipe(llama()), llama())
    )
    found, expected = one.evaluate(), other.evaluate()
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)
    assert found["eval_accuracy"] == expected["eval_accuracy"]
    predictions, wanted = one.predict(rows(5)), other.predict(rows(5))
    assert predictions.predictions == pytest.approx(wanted.predictions, rel=1e-4, abs=1e-6)
    assert (predictions.label_ids == wanted.label_ids).all()


@pytest.mark.parametrize(
    "adapters", [pytest.param(False, marks=pytest.mark.thorough), pytest.param(True, marks=pytest.mark.slow)]
)
def test_a_checkpoint_resumes_to_the_last_bit_also_without_a_pipe(tmp_path: Path, adapters: bool) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    wrapped: Callable[[Any], Any] = with_adapters if adapters else lambda model: model
    whole = trainer_of(tmp_path, with_pipe(wrapped(llama())), **saving)
    whole.train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-6"]
    again = trainer_of(tmp_path, with_pipe(wrapped(llama())), **saving)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert logged(again) == logged(whole)
    assert same_parameters(again.model, whole.model)
    plain = trainer_of(tmp_path, wrapped(llama()), **saving)
    plain.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert logged(plain)[-1] == pytest.approx(logged(whole)[-1], rel=1e-4)
    files = {path.name for path in (tmp_path / "checkpoint-6").iterdir()}
    assert ("adapter_model.safetensors" if adapters else "model.safetensors") in files


@pytest.mark.thorough
def test_the_best_model_is_there_at_the_end(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path, with_pipe(llama()), eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
        load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True, save_total_limit=1,
    )  # fmt: skip
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(losses) == 3
    assert trainer.evaluate()["eval_loss"] == max(losses)  # of another step than the last one
    assert losses[-1] < max(losses)
    best = Path(trainer.state.best_model_checkpoint)
    assert json.loads((best / "trainer_state.json").read_text())["best_metric"] == max(losses)


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options", [{"label_smoothing_factor": 0.1}, {"compute_loss_func": summed}], ids=["smoothing", "function"]
)
def test_a_loss_of_the_trainer_needs_a_schedule_that_goes_backward_at_the_end(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    trainer = trainer_of(tmp_path, with_pipe(llama()), **options)
    with pytest.raises(ValueError, match=r"for a loss outside of the pipe choose schedule='gpipe'"):
        trainer.train()
    options = {**options, "gradient_accumulation_steps": 2}
    models = with_pipe(llama(), schedule="gpipe"), llama()
    same_logs([trainer_of(tmp_path, each, **options) for each in models], 1e-5)


def pipe_trainer_of(folder: Path, model: Any, devices: Any = ("cpu", "cpu"), **options: Any) -> Any:
    """Of the same settings."""
    import transformers

    from pipework.integrations.trainer import PipeTrainer

    plain = trainer_of(folder, llama(), **options)
    pipe = pipe_of(model, devices=list(devices))
    trainer = PipeTrainer(pipe, model, plain.args, train_dataset=rows(9), eval_dataset=rows(6))
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


@pytest.mark.thorough
def test_a_stop_that_was_asked_for_saves_first(tmp_path: Path) -> None:
    trainer = pipe_trainer_of(tmp_path, llama())
    trainer.pipe.request_stop()
    assert trainer.train().global_step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def same_files(one: Path, other: Path) -> None:
    """What of two folders of checkpoints does not tell a process or a time."""
    names = {path.name for path in one.iterdir()}
    assert names == {path.name for path in other.iterdir()}
    for name in ("optimizer.pt", "scheduler.pt"):
        same_values(*(torch.load(each / name) for each in (one, other)))


@pytest.mark.parametrize(
    "adapters", [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.thorough)]
)
def test_each_trainer_goes_on_where_the_other_one_has_stopped(tmp_path: Path, adapters: bool) -> None:
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 4, "weight_decay": 0.1}
    wrapped: Callable[[Any], Any] = with_adapters if adapters else lambda model: model
    makers: dict[str, Callable[[Path], Any]] = {
        "plain": lambda folder: trainer_of(folder, wrapped(llama()), micro_batched=True, **options),
        "pipe": lambda folder: pipe_trainer_of(folder, wrapped(llama()), **options),
    }
    whole = {name: make(tmp_path / name) for name, make in makers.items()}
    for trainer in whole.values():
        trainer.train()
    assert len(logged(whole["plain"])) == 6
    assert logged(whole["plain"]) == logged(whole["pipe"])
    same_files(*(tmp_path / name / "checkpoint-4" for name in makers))
    for first, then in (("plain", "pipe"), ("pipe", "plain")):
        trainer = makers[then](tmp_path / f"{first} {then}")
        trainer.train(resume_from_checkpoint=str(tmp_path / first / "checkpoint-4"))
        assert logged(trainer) == logged(whole["plain"])
        assert same_parameters(trainer.model, whole["plain"].model)


@pytest.mark.thorough
def test_a_checkpoint_of_the_model_alone_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = trainer_of(tmp_path, llama(), save_strategy="steps", save_steps=6, save_only_model=True)
    plain.train()
    trainer = pipe_trainer_of(tmp_path, llama())
    trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-6 has the model alone" in caplog.text
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)


@pytest.mark.gpu
def test_stages_on_several_devices_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    devices = [torch.device(kind.type, number % torch.accelerator.device_count()) for number in range(2)]
    trainer = pipe_trainer_of(
        tmp_path / "devices", llama(), devices, use_cpu=False, save_strategy="steps", save_steps=2
    )
    plain = trainer_of(tmp_path / "plain", llama(), use_cpu=False)
    same_logs([trainer, plain], 1e-3)
    assert [next(part.parameters()).device for part in trainer.pipe.partitions] == devices
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-3)


@pytest.mark.thorough
def test_a_collator_that_makes_the_micro_batches(tmp_path: Path) -> None:
    def halves(each: list[dict[str, Tensor]]) -> dict[str, MicroBatches]:
        whole = {name: torch.stack([row[name] for row in each]) for name in each[0]}
        return {name: MicroBatches(value.chunk(2)) for name, value in whole.items()}

    one = trainer_of(tmp_path, with_pipe(llama()), data_collator=halves)
    other = trainer_of(tmp_path, with_pipe(llama(), chunks=2))
    assert one.evaluate(rows(8))["eval_loss"] == pytest.approx(other.evaluate(rows(8))["eval_loss"], rel=1e-6)
    one.train()
    batch = halves(rows(4))
    with torch.no_grad():
        assert one.model.eval()(**batch).logits.shape == (4, 7, 37)
    from pipework.integrations.trainer import PipeTrainer

    # Labels that are not of equal lengths are padded, as `Trainer` pads those of batches.
    model = llama()
    trainer = PipeTrainer(pipe_of(model), model, one.args, data_collator=halves)
    found, expected = trainer.predict(rows(6)), trainer_of(tmp_path, with_pipe(llama())).predict(rows(6))
    np.testing.assert_array_equal(found.label_ids, expected.label_ids)
    np.testing.assert_allclose(found.predictions, expected.predictions, rtol=1e-5)
    trainer.data_collator = lambda each: {
        name: MicroBatches([value[0], value[1][:, :5]]) for name, value in halves(each).items()
    }
    found = trainer.predict(rows(6))
    assert (found.label_ids[[2, 3, 5], 5:] == -100).all()
    assert (found.label_ids[[0, 1, 4], 5:] != -100).any()
    assert found.predictions.shape == expected.predictions.shape
