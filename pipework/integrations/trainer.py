"""The `Trainer` of transformers for a model whose layers are in several processes."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from transformers import Trainer, TrainerCallback
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_pt_utils import nested_concat

from pipework.integrations.optimizer_file import load_whole_optimizer, names_by_group, save_whole_optimizer
from pipework.integrations.pretrained import load_pretrained, save_pretrained
from pipework.model.marks import MicroBatches
from pipework.values import nested

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import TrainingArguments

    from pipework.pipe import Pipe


class _Stops(TrainerCallback):
    """Saves and ends the training when a process was asked to end, or `pipe.request_stop` was called."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """After the same step in all processes."""
        if self._pipe.stopping:
            control.should_save = control.should_training_stop = True


class PipeTrainer(Trainer):
    """A `Trainer` that leaves all communication between processes to the pipe.

    To transformers and Accelerate, each process trains alone: nothing is wrapped in `DistributedDataParallel`, no rows
    are left out, and all processes of a pipe read the same mini-batches. Replicas of the pipe get other ones. The first
    process writes logs.

    Args:
        pipe: what `pipework.attach(model, ...)` returned.
        model: the model.
        args: made after `pipework.init()`. Their batch size is that of a mini-batch, for all processes of a pipe.
        others: see `Trainer`.

    Raises:
        ValueError: the arguments ask for what a pipe does in another way.

    Example:
        >>> import tempfile, torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainingArguments
        >>> import pipework
        >>> from pipework.integrations.trainer import PipeTrainer
        >>> sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2))
        >>> ids = torch.arange(8).reshape(2, 4)
        >>> rows = [{"input_ids": row, "labels": row} for row in ids]
        >>> sample = {"input_ids": ids, "labels": ids}
        >>> pipe = pipework.attach(model, sample, chunks=2, devices=["cpu", "cpu"], mesh=pipework.init())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     args = TrainingArguments(folder, max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True)
        ...     trainer = PipeTrainer(pipe, model, args, train_dataset=rows)
        ...     trainer.remove_callback(PrinterCallback)
        ...     trainer.train().global_step
        2
    """

    model: Any
    optimizer: Any  # Accelerate's, around one of PyTorch's
    lr_scheduler: Any

    def __init__(self, pipe: Pipe, model: nn.Module, args: TrainingArguments, **others: Any) -> None:
        if args.fp16:
            raise ValueError(
                "fp16=True scales the loss in each process by itself: take bf16=True, or a loop of your own with "
                "attach(..., grad_scaler=)"
            )
        self.pipe = pipe
        args._n_gpu = min(args.n_gpu, 1)
        alone = {"distributed_type": DistributedType.NO, "num_processes": 1, "backend": None}
        rank = pipe.ranks.rank
        args.distributed_state.__dict__.update(alone, process_index=rank, local_process_index=rank)
        super().__init__(model, args, **others)
        self.add_callback(_Stops(pipe))

    # ---- the pipe has placed the model, and layers of other processes have no values that could be moved ------------

    def create_accelerator_and_postprocess(self) -> None:
        """Nothing is moved: see `Trainer`."""
        super().create_accelerator_and_postprocess()
        self.accelerator.device_placement = False

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        pass

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """The loss, which the last stage computes on its own device, as `Trainer` wants it."""
        steps = self.current_gradient_accumulation_steps
        counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        if not (steps == 1 or counted or self.compute_loss_func or self.label_smoother):
            # Else `Trainer` would divide the loss afterwards, when the pipe has computed its gradients.
            inputs = {**inputs, "loss_scale": 1 / steps}
            self.current_gradient_accumulation_steps = 1
        try:
            return super().training_step(model, inputs, num_items_in_batch).to(self.args.device)
        finally:
            self.current_gradient_accumulation_steps = steps

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *others: Any, **named: Any) -> tuple[Any, ...]:
        """Loss, outputs and labels; those of `MicroBatches` joined, as `Trainer` joins those of batches."""
        join = functools.partial(functools.reduce, nested_concat)
        found = super().prediction_step(model, inputs, *others, **named)
        return tuple([nested.replaced(each, MicroBatches, join) for each in found])

    # ---- each replica has other rows --------------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if self.pipe.data_parallel_size == 1:
            return super()._get_train_sampler(train_dataset)
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        return self.pipe.sampler(dataset, seed=self.args.seed)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        items = super()._get_num_items_in_batch(batch_samples, device)
        if items is None or self.pipe.data_parallel_size == 1:
            return items
        every = [float(text) for text in self.pipe.ranks.all_gather_text(str(float(items)))]
        return sum(every) / len(every)  # gradients are averaged over replicas

    # ---- gradients of all processes ---------------------------------------------------------------------------------

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.pipe.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.pipe.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    # ---- each process writes and reads what it trains; the files are those that `Trainer` itself has ----------------

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """One whose state can be saved: see `Trainer`."""
        optimizer = super().create_optimizer(model)
        names_by_group(self.pipe.ranks, self.model, optimizer)
        return optimizer

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        save_pretrained(self.pipe, folder)
        if self.args.should_save:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir)
        save_whole_optimizer(self.pipe.ranks, self.model, self.optimizer.optimizer, folder / OPTIMIZER_NAME)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_pretrained(self.pipe, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        optimizer, scheduler = Path(checkpoint, OPTIMIZER_NAME), Path(checkpoint, SCHEDULER_NAME)
        if not optimizer.is_file():  # save_only_model=True
            logging.getLogger("pipework").warning(
                "%s has the model alone (there is no %s): optimizer and learning rate begin anew", checkpoint, optimizer
            )
            return
        load_whole_optimizer(self.pipe.ranks, self.model, self.optimizer.optimizer, optimizer)
        self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(str(self._of_rank(output_dir)))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            own = self._of_rank(checkpoint)
            super()._load_rng_state(str(own) if own.is_dir() else checkpoint)

    def _of_rank(self, checkpoint: str) -> Path:
        """Where the random states of this process are; those of the first one are where `Trainer` looks for them."""
        rank = self.pipe.ranks.rank
        return Path(checkpoint, f"random-{rank}") if rank else Path(checkpoint)
