"""Saving the state of a training to files and loading it again, with any number of stages and processes."""

from pipework.saving.convert import convert
from pipework.saving.files import DamagedError, UnfitError
from pipework.saving.load import Checkpoint, load_checkpoint
from pipework.saving.save import save_checkpoint

__all__ = ["Checkpoint", "DamagedError", "UnfitError", "convert", "load_checkpoint", "save_checkpoint"]
