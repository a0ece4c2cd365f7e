"""Replacing a file as a whole: whoever reads or is killed at any moment meets the old content or the new, never a mix.

The new file is written in a temporary folder beside the target, flushed to the disk and moved over the target.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from graphopt.errors import DataError

try:
    import fcntl
except ImportError:  # Windows, where nothing tells a folder in use from one left behind: none is removed there
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

_TEMPORARY_SUFFIX = ".tmp"
_LOCK_NAME = "lock"


class SaveError(DataError, OSError):
    """A file could not be written; what was there before is untouched. ``errno`` is that of the cause, if any."""


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` produce a file at the path it is given, then put that file at ``path`` in one move.

    Missing folders are made. Temporary folders left by killed savers of the same path are removed. On any failure
    the old file stays and no temporary remains. Raises SaveError for what the file system refuses; whatever else
    ``write`` raises comes through as it is.
    """
    target = path.resolve()  # a link to a checkpoint stays a link
    try:
        if target.is_dir():
            raise IsADirectoryError(f"{target} is a folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target)
        with _temporary_folder(target) as folder:
            written = folder / "new"
            write(written)
            _flush_to_disk(written)
            written.chmod((folder / _LOCK_NAME).stat().st_mode)
            written.replace(target)
    except SaveError:
        raise
    except OSError as error:
        raise save_error(path, error) from error
    # The move has happened; some network file systems refuse to flush a folder.
    with contextlib.suppress(OSError):
        _flush_to_disk(target.parent)


def save_error(path: Path, cause: Exception) -> SaveError:
    """The SaveError that tells a user what ``cause`` means for ``path``."""
    kept = "the file that was there is unchanged" if path.is_file() else "nothing was written"
    error = SaveError(f"could not write {str(path)!r}: {cause}; {kept}. Choose another folder or free space")
    error.errno = getattr(cause, "errno", None)
    return error


@contextlib.contextmanager
def _temporary_folder(target: Path) -> Iterator[Path]:
    """A folder beside ``target``, locked while it is in use and gone afterwards."""
    folder, lock = _new_locked_folder(target)
    try:
        yield folder
    finally:
        lock.close()
        shutil.rmtree(folder, ignore_errors=True)


def _new_locked_folder(target: Path) -> tuple[Path, TextIO]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_prefix(target), suffix=_TEMPORARY_SUFFIX, dir=target.parent))
        lock = _lock_folder(folder)
        if lock is not None:
            return folder, lock
        # Another saver that cleans up took the folder while it had no lock.
        shutil.rmtree(folder, ignore_errors=True)


def _lock_folder(folder: Path) -> TextIO | None:
    """The lock file, open and locked; None when somebody else has it or the folder is gone."""
    try:
        lock = (folder / _LOCK_NAME).open("w")
    except FileNotFoundError:
        return None
    if _try_lock(lock.fileno()) and (folder / _LOCK_NAME).exists():
        return lock
    lock.close()
    return None


def _remove_stale(target: Path) -> None:
    """Remove temporary folders of ``target`` whose maker no longer lives: nobody holds their lock."""
    if fcntl is None:
        return
    for folder in sorted(target.parent.iterdir()):
        if not (folder.name.startswith(_prefix(target)) and folder.name.endswith(_TEMPORARY_SUFFIX)):
            continue
        with contextlib.suppress(OSError), (folder / _LOCK_NAME).open("a") as lock:
            if not _try_lock(lock.fileno()):
                continue
            log.info("removing %s, left by a save that did not finish", folder)
            shutil.rmtree(folder, ignore_errors=True)


def _prefix(target: Path) -> str:
    return f".{target.name}."


def _try_lock(descriptor: int) -> bool:
    """Whether this process now holds the lock; the system gives it back when the process ends, however it ends."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _flush_to_disk(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # folders cannot be opened there
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
