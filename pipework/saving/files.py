"""Files that are on the disk when a call returns, and that are known again by their checksum."""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_PIECE = 1 << 24  # bytes that are hashed and written at a time


class Seal(NamedTuple):
    """By what a file is known again."""

    bytes: int
    sha256: str


class DamagedError(OSError):
    """A file of a checkpoint is not what was written; the message names the file and says why."""

    __module__ = "pipework.saving"  # the public name, for tracebacks


class UnfitError(ValueError):
    """A checkpoint is whole, and of something else than what it is to be loaded into."""

    __module__ = "pipework.saving"


@contextlib.contextmanager
def making_sense(file: str) -> Iterator[None]:
    """Where the content of a file is taken apart: its checksum may be right, and it may still make no sense.

    Raises:
        DamagedError: it does not.

    Example:
        >>> with making_sense("training.json"):
        ...     {}["random"]
        Traceback (most recent call last):
        pipework.saving.DamagedError: training.json: it makes no sense (KeyError: 'random')
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{file}: it makes no sense ({type(error).__name__}: {error})") from error


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> Seal:
    """Writes a file and waits until it is on the disk.

    Not through a file object: what `os.write` takes is all that there is, so that nothing is left in a buffer that
    could fail when it is closed.
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
    return Seal(size, digest.hexdigest())


def sync_directory(path: Path) -> None:
    """Waits until the names in a directory are on the disk, without which a renamed file may be gone after a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Writes a small file that is there with its whole content, or not at all."""
    partial = path.with_name(path.name + ".tmp")
    write_file(partial, [content])
    os.rename(partial, path)
    sync_directory(path.parent)


def seal_of(content: bytes) -> Seal:
    """The seal of what was read or is to be written.

    Example:
        >>> seal_of(b"").bytes, seal_of(b"").sha256[:8]
        (0, 'e3b0c442')
    """
    return Seal(len(content), hashlib.sha256(content).hexdigest())


def read_sealed(path: Path, seal: Seal) -> bytes:
    """The content of a small file.

    Raises:
        DamagedError: it is not there, or not what was sealed.
    """
    content = read_small(path)
    _compare(path, seal_of(content), seal)
    return content


def read_small(path: Path) -> bytes:
    """The content of a small file, whatever it is.

    Raises:
        DamagedError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def check_sealed(path: Path, seal: Seal) -> None:
    """Looks through a large file, a piece at a time.

    Raises:
        DamagedError: it is not there, or not what was sealed.
    """
    try:
        size = path.stat().st_size
        if size != seal.bytes:
            _compare(path, Seal(size, ""), seal)
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except DamagedError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    _compare(path, Seal(size, found), seal)


def unreadable(path: Path, error: BaseException) -> DamagedError:
    """What to raise where a file cannot be read."""
    if isinstance(error, FileNotFoundError):
        return DamagedError(f"{path.name}: it is missing")
    reason = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
    return DamagedError(f"{path.name}: it cannot be read ({reason})")


def _compare(path: Path, found: Seal, wanted: Seal) -> None:
    if found.bytes != wanted.bytes:
        raise DamagedError(f"{path.name}: it has {found.bytes} bytes, and {wanted.bytes} were written")
    if found.sha256 != wanted.sha256:
        raise DamagedError(f"{path.name}: its content is not what was written (another SHA-256)")
