"""Lightning with an attached pipe in one process, beside a loop without it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integrations.tiny import llama, loader, trained_by_hand, with_pipe

pytestmark = [
    pytest.mark.thorough,  # it takes seconds to import
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),  # Lightning, with PyTorch's trees
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]


def module_of(model: nn.Module) -> Any:
    import pytorch_lightning

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.losses: list[float] = []

        def training_step(self, batch: Any, number: int) -> Any:
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("validation", self.model(**batch).loss)

        def predict_step(self, batch: Any, number: int) -> Any:
            return self.model(**batch).logits

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Module()


def trainer_of(folder: Path, **options: Any) -> Any:
    import pytorch_lightning
    from pytorch_lightning.callbacks import ModelCheckpoint

    saves = ModelCheckpoint(folder, filename="{epoch}", monitor="validation", save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pytorch_lightning.Trainer(accelerator="cpu", devices=1, max_epochs=2, callbacks=[saves], **quiet, **options)


AUTOMATIC: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}


def test_training_validation_checkpoints_and_resuming(tmp_path: Path) -> None:
    expected, reference = trained_by_hand(epochs=2)
    module, trainer = module_of(with_pipe(llama())), trainer_of(tmp_path, **AUTOMATIC)
    trainer.fit(module, loader(9), loader(6))
    assert module.losses == expected
    for name, tensor in reference.state_dict().items():
        assert torch.equal(module.model.state_dict()[name], tensor)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["epoch=0.ckpt", "epoch=1.ckpt"]
    predicted = torch.cat(trainer.predict(module, loader(6)))
    (metrics,) = trainer.validate(module, loader(6), verbose=False)
    assert metrics["validation"] == pytest.approx(trainer.checkpoint_callback.best_model_score.item())

    for has_pipe in (True, False):
        model = with_pipe(llama()) if has_pipe else llama()
        again, resuming = module_of(model), trainer_of(tmp_path / str(has_pipe), **AUTOMATIC)
        resuming.fit(again, loader(9), loader(6), ckpt_path=str(tmp_path / "epoch=0.ckpt"))
        assert again.losses == expected[3:] if has_pipe else again.losses == pytest.approx(expected[3:], rel=1e-5)
        torch.testing.assert_close(torch.cat(resuming.predict(again, loader(6))), predicted, rtol=1e-4, atol=1e-5)
