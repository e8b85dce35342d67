"""Publishing of the next version of a dataset, by one process at a time.

A version is published by creating the file of its manifest, which only one process can do, and by replacing
`manifest.json` afterwards. If a process ends in between, the next writer replaces it. All files that a version names
are written before, so that a dataset is always either the old or the new version.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

from streamvid.cluster.lease import Lease, acquire
from streamvid.dataset.manifest import (
    Change,
    FileInfo,
    Manifest,
    base_digest,
    content_digest,
    index_files,
    manifest_to_json,
    plan_digest,
    read_manifest,
)
from streamvid.dataset.reader import Dataset
from streamvid.dataset.sealed_json import MANIFEST
from streamvid.dataset.shard_table import ShardTable, exact_sum
from streamvid.dataset.tar import ENERGON_FOLDER, energon_files
from streamvid.dataset.versions.open import read_version, version_path
from streamvid.errors import DatasetError
from streamvid.storage import LocalStore, Store

LEASES, RUN = ".staging/leases", "run"
"""Folder of leases, and name of the lease of a process that changes the dataset alone."""
_CHANGED = (
    "another process has changed the dataset meanwhile, so this change was not made and nothing is lost; run the same "
    "command again"
)


def described(draft: Manifest, shards: ShardTable) -> Manifest:
    """Return a manifest with the buckets, counts and fingerprints that follow from its shard table."""
    used = set(shards.bucket_id.names)
    buckets = tuple(bucket for bucket in draft.buckets if bucket.id in used)
    base = base_digest(shards.content_lines(), index_files(draft), draft.frame_rate, draft.media)
    counts = replace(
        draft.counts,
        samples=exact_sum(shards.num_samples),
        shards=len(shards),
        num_bytes=exact_sum(shards.num_bytes),
    )
    fingerprints = replace(
        draft.fingerprints,
        plan=plan_digest(buckets, shards.plan_lines(), draft.draws),
        base=base,
        content=content_digest(base, draft.columns),
    )
    return replace(draft, buckets=buckets, counts=counts, fingerprints=fingerprints)


class Writing:
    """Right to publish the next version of a dataset, held by one process at a time.

    newest: the manifest from which the next version is made.
    """

    def __init__(self, store: Store, lease: Lease) -> None:
        self.store, self.newest, self._lease = store, _rolled_forward(store), lease

    @cached_property
    def dataset(self) -> Dataset:
        """The newest version."""
        return Dataset(self.store, manifest=self.newest)

    def publish(self, draft: Manifest, change: Change) -> Manifest:
        """Publish `draft` as the next version and return it. All its files must have been written.

        The files for other readers are the exception: if `draft` lists them as in `with_energon_files`, they are
        replaced while the version is published.

        Raises DatasetError if another process has published a version or has taken over the lease. Then nothing has
        changed.
        """
        store, old = self.store, self.newest
        parent = FileInfo.of(version_path(old.version), manifest_to_json(old))
        store.create(parent.path, manifest_to_json(old))
        new = replace(draft, version=old.version + 1, parent=parent, change=change)
        data, path = manifest_to_json(new), version_path(new.version)
        self._lease.renew()
        if not store.create(path, data) and store.read(path) != data:
            raise DatasetError(f"{store.url}: {_CHANGED}")
        _make_newest(store, old, new)
        self.newest = new
        self.__dict__.pop("dataset", None)
        return new


@contextmanager
def writing(store: Store) -> Iterator[Writing]:
    """Hold the lease on a dataset while its next version is made. Raises DatasetError if another process holds it."""
    read_manifest(store)  # raises an error if there is no dataset, before anything is written
    lease = acquire(store, LEASES, RUN, lambda _: True)
    try:
        yield Writing(store, lease)
    finally:
        lease.release()
        if isinstance(store, LocalStore):
            with contextlib.suppress(OSError):  # not empty
                for folder in (LEASES, ".staging"):
                    (store.root / folder).rmdir()


def _rolled_forward(store: Store) -> Manifest:
    """Return the newest version. If a process ended while it published a version, finish its work first."""
    newest = read_manifest(store)
    while store.size(version_path(newest.version + 1)) is not None:
        old, newest = newest, read_version(store, newest.version + 1)
        _make_newest(store, old, newest)
    return newest


def with_energon_files(draft: Manifest, shards: ShardTable) -> Manifest:
    """Return a manifest that lists the files for other readers with the contents that follow from its shard table."""
    files = tuple(FileInfo.of(path, data) for path, data in energon_files(shards).items())
    paths = {file.path for file in files}
    other = (*(file for file in draft.files.other if file.path not in paths), *files)
    return replace(draft, files=replace(draft.files, other=other))


def _make_newest(store: Store, old: Manifest, new: Manifest) -> None:
    """Replace the files for other readers if they differ between the versions, and then manifest.json."""
    if _energon_files(new) - _energon_files(old):
        for path, data in energon_files(Dataset(store, manifest=new).shards).items():
            store.put(path, data)
    store.put(MANIFEST, manifest_to_json(new))


def _energon_files(manifest: Manifest) -> set[FileInfo]:
    return {file for file in manifest.files.other if file.path.startswith(f"{ENERGON_FOLDER}/")}
