"""`PipeTrainer` on several ranks trains, evaluates, saves and resumes as in one process."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipework import Mesh
from tests.distributed.together.alike import of_all_ranks
from tests.integrations.tiny import MicroBatched, batch, llama, pipe_of, rows, same_values
from tests.jobs import runs_on

Run = Callable[..., list[Any]]
SAVING = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}


def trainer_of(
    folder: Path,
    mesh: Mesh | None,
    *,
    adapters: bool = False,
    schedule: str = "1f1b",
    tied: bool = False,
    plain: bool = False,
    **options: Any,
) -> Any:
    """Of a pipe, or of the model that runs each micro-batch in turn."""
    import transformers

    from pipework.integrations.trainer import PipeTrainer

    model = llama(tie_word_embeddings=tied)
    if adapters:
        import peft

        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing. is deprecated", FutureWarning)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        torch.manual_seed(3)
        model = peft.get_peft_model(model, config)
    settings = {
        "use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "learning_rate": 1e-2,
        "per_device_train_batch_size": 4, "num_train_epochs": 2, "max_grad_norm": 0.1, **SAVING, **options,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(output_dir=str(folder), **settings)
    data = {"train_dataset": rows(9), "eval_dataset": rows(6), "compute_metrics": accuracy}
    if plain:
        trainer = type("Reference", (MicroBatched, transformers.Trainer), {})(model, arguments, **data)
    else:
        pipe = pipe_of(model, mesh, schedule=schedule, balance=[2, 3])
        trainer = PipeTrainer(pipe, model, arguments, **data)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def accuracy(predicted: Any) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def logged(trainer: Any) -> list[list[float]]:
    """What does not depend on the time."""
    names = ("step", "epoch", "loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "train_loss")
    return [[entry[name] for name in names if name in entry] for entry in trainer.state.log_history]


def same_on_disk(folder: Path, model: Any) -> None:
    again = type(model).from_pretrained(folder)
    own = dict(model.named_parameters())
    assert 0 < len(own) < len(again.state_dict())
    for name, parameter in own.items():
        assert torch.equal(again.state_dict()[name], parameter), name


def train_and_resume(mesh: Mesh, folder: str) -> dict[str, Any]:
    place = Path(folder)
    trainer = trainer_of(place / "whole", mesh, gradient_accumulation_steps=2, load_best_model_at_end=True)
    trainer.train()
    found = {"whole": logged(trainer), "best": trainer.evaluate()["eval_loss"], "logs": trainer.args.should_log}
    assert trainer.predict(rows(5)).predictions.shape == (5, 7, 37)
    trainer.save_model()
    same_on_disk(place / "whole", trainer.model)
    same_on_disk(place / "whole" / "checkpoint-4", trainer.model)

    again = trainer_of(place / "whole", mesh, gradient_accumulation_steps=2)
    again.train(resume_from_checkpoint=str(place / "whole" / "checkpoint-2"))
    found["resumed"] = logged(again)
    return found


@pytest.mark.thorough
def test_two_ranks_train_evaluate_save_and_resume(on_ranks: Run, tmp_path: Path) -> None:
    first, second = on_ranks(2, train_and_resume, patience=180.0, folder=str(tmp_path / "ranks"))
    assert (first.pop("logs"), second.pop("logs")) == (True, False)
    assert first == second
    assert first["resumed"][:-1] == first["whole"][:6]  # but for the mean of all steps
    assert first["best"] == min(entry[2] for entry in first["whole"] if len(entry) == 4)

    threads = trainer_of(tmp_path / "threads", None, gradient_accumulation_steps=2)
    threads.train()
    assert logged(threads) == first["whole"]
    resumed = trainer_of(tmp_path / "resumed", None, gradient_accumulation_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "ranks" / "whole" / "checkpoint-2"))  # of two ranks
    assert logged(resumed)[:-1] == first["whole"][:6]


EXCHANGED: dict[str, dict[str, Any]] = {"all": {}, "tied": {"tied": True}, "adapters": {"adapters": True}}
EIGHT_STEPS = {
    "max_steps": 8, "save_steps": 4, "save_total_limit": 2, "eval_strategy": "no", "weight_decay": 0.1,
    "max_grad_norm": 0.0,
}  # fmt: skip


def take_over_and_hand_over(mesh: Mesh, folder: str, name: str) -> list[Any]:
    """Eight steps, then the last four of a plain trainer's eight ones."""
    place, options = Path(folder), {**EXCHANGED[name], **EIGHT_STEPS}
    trainer = trainer_of(place / "ranks", mesh, **options)
    trainer.train()
    again = trainer_of(place / "resumed", mesh, **options)
    again.train(resume_from_checkpoint=str(place / "plain" / "checkpoint-4"))
    return [logged(trainer)[:8], logged(again)[:8]]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=getattr(pytest.mark, "thorough" if name == "adapters" else "slow"))
        for name in EXCHANGED
    ],
)
def test_ranks_and_a_plain_trainer_go_on_where_the_other_one_has_stopped(
    on_ranks: Run, tmp_path: Path, name: str
) -> None:
    options = {"plain": True, **EXCHANGED[name], **EIGHT_STEPS}
    plain = trainer_of(tmp_path / "plain", None, **options)
    plain.train()
    ranks = on_ranks(2, take_over_and_hand_over, patience=180.0, folder=str(tmp_path), name=name)
    tolerance = 1e-4 if name == "tied" else 0.0  # their gradients are summed in another order
    expected = [pytest.approx(entry, rel=tolerance) for entry in logged(plain)[:8]]
    assert len(expected) == 8
    assert all(found == expected for each in ranks for found in each)
    for number, kinds in ((4, ("ranks",)), (8, ("ranks", "resumed"))):
        for kind in kinds:
            for file in ("optimizer.pt", "scheduler.pt"):
                one, other = (torch.load(tmp_path / each / f"checkpoint-{number}" / file) for each in ("plain", kind))
                same_values(one, other, tolerance)
    files = {path.name for path in (tmp_path / "ranks" / "checkpoint-8").iterdir()}
    assert {"trainer_state.json", "rng_state.pth", "random-1"} <= files
    models = {"adapter_model.safetensors", "model.safetensors"} & files
    assert models == {"adapter_model.safetensors" if name == "adapters" else "model.safetensors"}
    trainer = trainer_of(tmp_path / "back", None, **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "ranks" / "checkpoint-4"))
    assert logged(trainer)[:8] == expected
    same_values(trainer.model.state_dict(), plain.model.state_dict(), tolerance)


VARIANTS: dict[str, dict[str, Any]] = {
    "no clipping": {"max_grad_norm": 0.0, "save_only_model": True, "save_strategy": "epoch"},
    "loss outside": {"label_smoothing_factor": 0.1},
}


def variants(mesh: Mesh | None, folder: str) -> dict[str, Any]:
    found = {}
    for name, options in VARIANTS.items():
        trainer = trainer_of(
            Path(folder) / name,
            mesh,
            schedule="gpipe" if name == "loss outside" else "1f1b",
            num_train_epochs=1,
            **options,
        )
        found[name] = [trainer.evaluate()["eval_loss"]]
        trainer.train()
        found[name] += logged(trainer)
    again = trainer_of(Path(folder) / "no clipping", mesh, num_train_epochs=1, max_grad_norm=0.0)
    again.train(resume_from_checkpoint=True)  # from the model alone, at the end of its only epoch
    found["model alone"] = [again.evaluate()["eval_loss"]]
    return found


@pytest.mark.thorough
def test_other_settings(on_ranks: Run, tmp_path: Path) -> None:
    first, second = on_ranks(2, variants, patience=180.0, folder=str(tmp_path / "ranks"))
    assert first == second == variants(None, str(tmp_path / "threads"))
    assert first["model alone"][0] == next(each[2] for each in reversed(first["no clipping"]) if len(each) == 4)


@pytest.mark.thorough
@runs_on(4, dp=2, patience=180.0)
def test_two_replicas_take_the_mean_over_the_tokens_of_both(mesh: Mesh, folder: str) -> None:
    trainer = trainer_of(Path(folder), mesh, max_steps=1, eval_strategy="no", optim="sgd", max_grad_norm=0.0)
    trainer.train_dataset = rows(8)
    trainer.train()
    trainer.save_model()
    first, same, second, also = of_all_ranks(logged(trainer))
    assert (first, second) == (same, also)
    model = llama().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loss = model(**batch(8)).loss
    loss.backward()
    optimizer.step()
    assert (first[0][2] + second[0][2]) / 2 == pytest.approx(loss.item(), rel=1e-5)
    for name, tensor in type(model).from_pretrained(folder).state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name])


@pytest.mark.thorough
def test_loss_scaling_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"fp16=True .*take bf16=True"):
        trainer_of(tmp_path, None, fp16=True)
