"""Files that are on the disk when a call returns, and their checksums."""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_PIECE = 1 << 24  # bytes that are hashed and written at a time


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


def checksum_of(content: bytes) -> Checksum:
    """The checksum of a content.

    Example:
        >>> checksum_of(b"").bytes, checksum_of(b"").sha256[:8]
        (0, 'e3b0c442')
    """
    return Checksum(len(content), hashlib.sha256(content).hexdigest())


def read_verified(path: Path, wanted: Checksum) -> bytes:
    """The content of a small file with this checksum.

    Raises:
        DamagedError: the file is missing or has another checksum.
    """
    content = read_small(path)
    _compare(path, checksum_of(content), wanted)
    return content


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
    """Compares a large file with its checksum, without having it in memory.

    Raises:
        DamagedError: the file is missing or has another checksum.
    """
    try:
        size = path.stat().st_size
        if size != wanted.bytes:
            _compare(path, Checksum(size, ""), wanted)
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except DamagedError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    _compare(path, Checksum(size, found), wanted)


def unreadable(path: Path, error: BaseException) -> DamagedError:
    """The error for a file that cannot be read."""
    if isinstance(error, FileNotFoundError):
        return DamagedError(f"{path.name}: it is missing")
    reason = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
    return DamagedError(f"{path.name}: it cannot be read ({reason})")


def _compare(path: Path, found: Checksum, wanted: Checksum) -> None:
    if found.bytes != wanted.bytes:
        raise DamagedError(f"{path.name}: it has {found.bytes} bytes, and {wanted.bytes} were written")
    if found.sha256 != wanted.sha256:
        raise DamagedError(f"{path.name}: its content is not what was written (another SHA-256)")
