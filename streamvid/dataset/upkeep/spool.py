"""A folder for files on their way into a store; a killed run's is found again by the next one of the same copy."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamvid.errors import StorageError
from streamvid.storage import LocalStore, Store

OWN_FOLDER = ".copying"
"""At a local dest: a file is then renamed into place, which works on one file system alone."""

_NAME = re.compile(r"[0-9a-f]{32}")


@contextmanager
def spool(dest: Store, name: str, temp_dir: str | Path | None) -> Iterator[Path]:
    """An empty folder that is gone afterwards. `name`: of the copy, which one process at a time does."""
    if isinstance(dest, LocalStore):
        folder = dest.root / OWN_FOLDER
    else:
        folder = Path(temp_dir or tempfile.gettempdir()) / f"streamvid-copy-{os.getuid()}-{name[:16]}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove(folder)
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise StorageError(
            f"cannot write to {folder.parent}: {error.strerror or error}; give a place that you may write to"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def spooled_name(path: str) -> str:
    """What a file of the dataset is called in the folder."""
    return hashlib.sha256(path.encode()).hexdigest()[:32]


def _remove(folder: Path) -> None:
    """What a killed run left, and nothing of anybody else: temporary folders are open to all."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return
    is_mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_mine or not all(_NAME.fullmatch(path.name) for path in folder.iterdir()):
        raise StorageError(f"{folder} is in the way, and no killed copy of yours has left it; remove it")
    shutil.rmtree(folder)
