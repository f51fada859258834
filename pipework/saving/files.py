"""Files that are on the disk when a call returns, their checksums, and the directories of a run's checkpoints.

step-00000012.tmp        is being written
step-00000012            was written; it is complete if it has the file COMPLETE
step-00000012.replaced   was complete; it is kept until its replacement is complete
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import time
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

COMPLETE: Final = "COMPLETE"
MANIFEST: Final = "manifest.json"
_NAME: Final = re.compile(r"step-(\d{8,})(\.replaced|\.tmp)?")
_PATIENCE: Final = 10.0  # seconds until another machine must see a file; network file systems cache directories
_PIECE: Final = 1 << 24  # bytes that are hashed and written at a time


class Checksum(NamedTuple):
    """Size and SHA-256 of a file."""

    bytes: int
    sha256: str


class DamagedError(OSError):
    """A file of a checkpoint differs from what was written; the message names the file and the reason."""

    __module__ = "pipework.saving"  # the public name, for tracebacks


class UnfitError(ValueError):
    """An intact checkpoint does not fit the pipe or the optimizer."""

    __module__ = "pipework.saving"


@contextlib.contextmanager
def parsing(file: str) -> Iterator[None]:
    """A context in which the content of a file is parsed. A file with the right checksum may still be invalid.

    Raises:
        DamagedError: the content is invalid.

    Example:
        >>> with parsing("training.json"):
        ...     {}["random"]
        Traceback (most recent call last):
        pipework.saving.DamagedError: training.json: its content is invalid (KeyError: 'random')
    """
    try:
        yield
    except UnfitError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{file}: its content is invalid ({type(error).__name__}: {error})") from error


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> Checksum:
    """Writes a file and waits until it is on the disk.

    It calls `os.write` instead of a file object, whose buffer could fail to be written when it is closed.
    """
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        for piece in pieces:
            whole = memoryview(piece)
            for start in range(0, len(whole), _PIECE):
                part = whole[start : start + _PIECE]
                digest.update(part)
                size += len(part)
                while part:
                    part = part[os.write(descriptor, part) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Checksum(size, digest.hexdigest())


def sync_directory(path: Path) -> None:
    """Waits until the names in a directory are on the disk. Otherwise a crash may undo a rename."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Writes a small file atomically: a crash leaves the old content or the new one."""
    partial = path.with_name(path.name + ".tmp")
    write_file(partial, [content])
    os.rename(partial, path)
    sync_directory(path.parent)


def read_small(path: Path) -> bytes:
    """The content of a small file.

    Raises:
        DamagedError: the file cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def verify_file(path: Path, wanted: Checksum) -> None:
    """Compares a file with its checksum, without having it in memory.

    Raises:
        DamagedError: the file is missing or has another checksum.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.file_digest(file, "sha256").hexdigest() if size == wanted.bytes else ""
    except OSError as error:
        raise unreadable(path, error) from error
    if size != wanted.bytes:
        raise DamagedError(f"{path.name}: it has {size} bytes, and {wanted.bytes} were written")
    if digest != wanted.sha256:
        raise DamagedError(f"{path.name}: its content is not what was written (another SHA-256)")


def unreadable(path: Path, error: BaseException) -> DamagedError:
    """The error for a file that cannot be read."""
    if isinstance(error, FileNotFoundError):
        return DamagedError(f"{path.name}: it is missing")
    reason = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
    return DamagedError(f"{path.name}: it cannot be read ({reason})")


def step_name(step: int) -> str:
    """The name of a step's directory.

    Example:
        >>> step_name(12)
        'step-00000012'
    """
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a directory, also of a replaced one; None if it is not the directory of a step.

    Example:
        >>> step_of("step-00000012"), step_of("step-00000012.replaced"), step_of("step-00000012.tmp"), step_of("best")
        (12, 12, None, None)
    """
    match = _NAME.fullmatch(name)
    return int(match[1]) if match and match[2] != ".tmp" and len(match[1]) < 100 else None


def saved_steps(directory: Path) -> list[Path]:
    """The checkpoints in a directory, complete or not, the newest first."""
    if not directory.exists():
        return []
    found = [(step, path) for path in directory.iterdir() if (step := step_of(path.name)) is not None]
    return [path for _, path in sorted(found, key=lambda each: (each[0], not each[1].suffix), reverse=True)]


def is_complete(path: Path) -> bool:
    """Whether a checkpoint was completed. Its files may still be damaged."""
    return (path / COMPLETE).is_file()


def begin(directory: Path, step: int) -> Path:
    """Makes an empty directory to write into, and removes the remains of interrupted saves."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in list(directory.iterdir()):
        if not _NAME.fullmatch(path.name):
            continue
        whole = path.with_suffix("")
        if path.suffix == ".replaced" and not is_complete(whole):  # its replacement was never completed
            shutil.rmtree(whole, ignore_errors=True)
            os.rename(path, whole)
        elif path.suffix:
            shutil.rmtree(path)
    partial = directory / f"{step_name(step)}.tmp"
    os.mkdir(partial)
    return partial


def finish(partial: Path, manifest: bytes) -> Path:
    """Gives a directory with all its files a manifest and its final name, and marks it as complete."""
    write_file(partial / MANIFEST, [manifest])
    sync_directory(partial)
    final = partial.with_suffix("")
    if final.exists():
        os.rename(final, final.with_suffix(".replaced"))
    os.rename(partial, final)
    sync_directory(final.parent)
    replace_file(final / COMPLETE, completion(manifest))
    return final


def completion(manifest: bytes) -> bytes:
    """The content of the file that marks a checkpoint as complete."""
    return hashlib.sha256(manifest).hexdigest().encode() + b"\n"


def read_sealed(directory: Path) -> bytes:
    """The content of the manifest of a complete checkpoint.

    Raises:
        DamagedError: its checksum is not the one in the file COMPLETE.
    """
    mark, content = read_small(directory / COMPLETE), read_small(directory / MANIFEST)
    if mark != completion(content):
        raise DamagedError(f"{MANIFEST}: its SHA-256 is not the one in {COMPLETE}")
    return content


def clear(final: Path, keep: int | None) -> None:
    """Removes the checkpoint that was replaced, and older ones than the newest `keep`. A failure is only logged."""
    paths = [path for path in saved_steps(final.parent) if (step_of(path.name) or 0) <= (step_of(final.name) or 0)]
    kept = paths if keep is None else [path for path in paths if not path.suffix and is_complete(path)][:keep]
    for path in paths:
        if path in kept and path != final.with_suffix(".replaced"):
            continue
        gone = path.with_suffix(".tmp")
        try:
            # It is renamed first, so that a partly removed directory is not taken for a checkpoint.
            os.rename(path, gone)
            shutil.rmtree(gone)
        except OSError as error:
            logging.getLogger("pipework").warning("the old checkpoint %s could not be removed: %s", path, error)


def discard(partial: Path) -> None:
    """Removes the files of a checkpoint that could not be written, as far as possible."""
    shutil.rmtree(partial, ignore_errors=True)
    final = partial.with_suffix("")
    if not is_complete(final):
        shutil.rmtree(final, ignore_errors=True)


def wait_for(path: Path) -> None:
    """Waits until this process sees a file that another rank made.

    Raises:
        FileNotFoundError: the file did not appear.
    """
    until = time.monotonic() + _PATIENCE
    while not path.exists():
        if time.monotonic() > until:
            raise FileNotFoundError(
                f"{path} was made by rank 0 and is not seen here: the directory of checkpoints must be on a file "
                "system that all processes share, under the same name"
            )
        time.sleep(0.05)
