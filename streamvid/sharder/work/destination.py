"""Destination of a dataset: a folder, or a prefix of an object store with a work folder on this machine."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from streamvid.dataset.sealed_json import MANIFEST
from streamvid.errors import ConfigError, DatasetError
from streamvid.host.resources import user_cache
from streamvid.sharder.options import ShardOptions
from streamvid.storage import LocalStore, Store, open_store

STAGING = ".staging"
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


@dataclass(frozen=True)
class Destination:
    """Destination of a dataset.

    store: store that contains the dataset.
    folder: local work folder, which need not exist.
    """

    store: Store
    folder: Path

    @property
    def url(self) -> str:
        return self.store.url

    @property
    def is_begun(self) -> bool:
        """True if an earlier sharder left unfinished work."""
        return self.folder.is_dir() or (not self.store.is_local and any(True for _ in self.store.files(STAGING)))

    def check_free(self) -> None:
        """Raise DatasetError if the destination contains anything other than a finished or unfinished dataset."""
        if self.is_begun or self.store.size(MANIFEST) is not None:
            return
        if isinstance(self.store, LocalStore):
            is_free = not self.store.root.is_dir() or not any(self.store.root.iterdir())
            free = "an empty or new folder"
        else:
            is_free, free = not any(True for _ in self.store.files()), "an empty prefix in the bucket"
        if not is_free:
            raise DatasetError(f"destination {self.url} is not empty, but does not contain a dataset; choose {free}")


def find_destination(dest: str | Path, options: ShardOptions) -> Destination:
    """Return the destination at `dest`.

    Raises ConfigError if `dest` or `work_dir` is not usable, DatasetError if `dest` is a file, and StorageError if
    the URL is not supported.
    """
    store = open_store(dest, options.storage)
    if not isinstance(store, LocalStore):
        if store.url.startswith("memory:"):
            raise ConfigError(
                f"destination {store.url}: workers cannot access this process's memory; choose a folder or object store"
            )
        return Destination(store, _work_folder(store.url, options))
    if options.work.work_dir is not None:
        raise ConfigError(
            f"work.work_dir={str(options.work.work_dir)!r} applies only to datasets in object stores; omit it, because "
            "unfinished work on a dataset in a folder is stored in that folder"
        )
    root = Path(os.path.abspath(store.root))  # noqa: PTH100 - keeps links as the user wrote them
    if root.exists() and not root.is_dir():
        raise DatasetError(f"destination {root} is a file; choose an empty or new folder")
    return Destination(LocalStore(root), root / STAGING)


def _work_folder(url: str, options: ShardOptions) -> Path:
    """Return the work folder for a URL and endpoint.

    Every run gets the same folder and thus finds unfinished work from earlier runs.
    """
    endpoint = options.storage.endpoint_url or next((os.environ[name] for name in _ENDPOINTS if name in os.environ), "")
    name = hashlib.sha256(f"{endpoint}\n{url}".encode()).hexdigest()[:32]
    if options.work.work_dir is None:
        return user_cache("shard") / name
    return Path(os.path.abspath(Path(options.work.work_dir).expanduser())) / name  # noqa: PTH100 - as above
