"""Where the dataset is to be: a folder, or a prefix of a bucket with a working folder on this machine."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from streamvid.dataset.manifest import MANIFEST
from streamvid.errors import ConfigError, DatasetError
from streamvid.host.resources import user_cache
from streamvid.sharder.options import ShardOptions
from streamvid.storage import LocalStore, Store, open_store

STAGING = ".staging"
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


@dataclass(frozen=True)
class Destination:
    """store: what the dataset's files go to. folder: on this machine, of all that is unfinished; may not be there."""

    store: Store
    folder: Path

    @property
    def url(self) -> str:
        return self.store.url

    @property
    def is_sealed(self) -> bool:
        return self.store.size(MANIFEST) is not None

    @property
    def is_begun(self) -> bool:
        """Whether a sharder has left something that is to be finished or removed."""
        return self.folder.is_dir() or (not self.store.is_local and any(True for _ in self.store.files(STAGING)))

    def check_free(self) -> None:
        """DatasetError where there is something else than a dataset or the beginning of one."""
        if self.is_sealed or self.is_begun:
            return
        if isinstance(self.store, LocalStore):
            is_free = not self.store.root.is_dir() or not any(self.store.root.iterdir())
            free = "a folder that is empty or not there yet"
        else:
            is_free, free = not any(True for _ in self.store.files()), "a prefix of the bucket where nothing is"
        if not is_free:
            raise DatasetError(f"dest {self.url} is not empty and holds no dataset; give {free}")


def find_destination(dest: str | Path, options: ShardOptions) -> Destination:
    """The place that `dest` names. Raises ConfigError, DatasetError for a file, StorageError for no store."""
    store = open_store(dest, options.own_storage)
    if not isinstance(store, LocalStore):
        if store.url.startswith("memory:"):
            raise ConfigError(f"dest {store.url} is in this process alone, and workers are others; give another place")
        return Destination(store, _work_folder(store.url, options))
    if options.work_dir is not None:
        raise ConfigError(
            f"work_dir={str(options.work_dir)!r} is for a dataset in a bucket; one in a folder is finished in that "
            "folder: leave work_dir out"
        )
    root = Path(os.path.abspath(store.root))  # noqa: PTH100 — links stay as the user wrote them
    if root.exists() and not root.is_dir():
        raise DatasetError(f"dest {root} is a file; give a folder that is empty or not there yet")
    return Destination(LocalStore(root), root / STAGING)


def _work_folder(url: str, options: ShardOptions) -> Path:
    """The same for the same bucket of the same server, so that the next run finds what this one leaves."""
    endpoint = options.own_storage.endpoint_url or next(
        (os.environ[name] for name in _ENDPOINTS if name in os.environ), ""
    )
    name = hashlib.sha256(f"{endpoint}\n{url}".encode()).hexdigest()[:32]
    if options.work_dir is None:
        return user_cache("shard") / name
    return Path(os.path.abspath(Path(options.work_dir).expanduser())) / name  # noqa: PTH100 — as above
