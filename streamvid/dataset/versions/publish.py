"""Publication of the next version of a dataset by one process at a time.

A version is published by creating the file of its manifest, which only one process can do, and by replacing
`manifest.json` afterwards. If a process ends between these steps, the next writer replaces `manifest.json`. All files
of a version are written first, so that a reader always sees either the old or the new version.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from streamvid.cluster.lease import Lease, held
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
from streamvid.dataset.tar import energon_files
from streamvid.dataset.versions.open import read_version, version_path, without_reader_files
from streamvid.errors import DatasetError
from streamvid.storage import LocalStore, Store

LEASES, RUN = ".staging/leases", "run"
"""Folder of leases, and name of the lease of a process that changes the dataset alone."""
_PUT_BYTES = 64 * 2**20
_CHANGED = (
    "another process changed the dataset in the meantime, so this change was not made; nothing is lost. Run the "
    "same command again"
)


def described(draft: Manifest, shards: ShardTable) -> Manifest:
    """Return the manifest with the buckets, counts and fingerprints that are derived from the shard table."""
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
    """Right to publish the next version of a dataset. Only one process at a time has this right.

    newest: the manifest from which the next version is made.
    """

    def __init__(self, store: Store, lease: Lease) -> None:
        self.store, self.newest, self._lease = store, _rolled_forward(store), lease

    @cached_property
    def dataset(self) -> Dataset:
        """The newest version."""
        return Dataset(self.store, manifest=self.newest)

    def publish(self, draft: Manifest, change: Change, shards: ShardTable | None = None) -> Manifest:
        """Publish `draft` as the next version, and return its manifest.

        All files of the version must have been written.

        shards: shard table of the version, without removed samples, if it differs from the previous version's table.
            The fields derived from this table are set (see `described`), and the `.nv-meta/` files are written.

        Raises DatasetError if another process has published a version or has taken over the lease. In that case,
        nothing has changed.
        """
        store, old = self.store, self.newest
        others = {} if shards is None else energon_files(shards)
        if shards is not None:
            draft = described(_with_reader_files(draft, others), shards)
        parent = FileInfo.of(version_path(old.version), manifest_to_json(old))
        store.create(parent.path, manifest_to_json(old))
        new = replace(draft, version=old.version + 1, parent=parent, change=change)
        data, path = manifest_to_json(new), version_path(new.version)
        self._lease.renew()
        if not store.create(path, data) and store.read(path) != data:
            raise DatasetError(f"{store.url}: {_CHANGED}")
        _put_reader_files(store, new, old, others)
        store.put(MANIFEST, data)
        self.newest = new
        self.__dict__.pop("dataset", None)
        return new


@contextmanager
def writing(store: Store) -> Iterator[Writing]:
    """Hold the lease on a dataset while its next version is being made.

    Raises DatasetError if another process holds the lease.
    """
    read_manifest(store)  # raises an error if there is no dataset, before anything is written
    with held(store, LEASES, RUN) as lease:
        yield Writing(store, lease)


def _rolled_forward(store: Store) -> Manifest:
    """Return the newest version. If a process ended while publishing a version, complete the publication first."""
    if isinstance(store, LocalStore):
        for torn in (store.root / version_path(1)).parent.glob(".*.tmp"):  # of a process that was killed
            torn.unlink(missing_ok=True)
    newest = read_manifest(store)
    while store.size(version_path(newest.version + 1)) is not None:
        old, newest = newest, read_version(store, newest.version + 1)
        if set(old.files.other) != set(newest.files.other):
            _put_reader_files(store, newest, old, energon_files(Dataset(store, manifest=newest).shards))
        store.put(MANIFEST, manifest_to_json(newest))
    return newest


def _with_reader_files(draft: Manifest, others: dict[str, bytes]) -> Manifest:
    """Return the manifest with its `.nv-meta/` files replaced by the given files."""
    listed = without_reader_files(draft).files.other
    found = (FileInfo.of(path, data) for path, data in others.items())
    return replace(draft, files=replace(draft.files, other=(*listed, *found)))


def _put_reader_files(store: Store, new: Manifest, old: Manifest, others: dict[str, bytes]) -> None:
    """Replace each `.nv-meta/` file whose content differs in the new version. All versions use the same file names."""
    there = set(old.files.other)
    for file in new.files.other:
        if file.path in others and file not in there:
            store.put(file.path, others[file.path])


def put_file(store: Store, path: str, data: bytes) -> None:
    """Write a new index file. A large file is uploaded in parts, from a temporary file."""
    if store.is_local or len(data) <= _PUT_BYTES:
        store.put(path, data)
        return
    with tempfile.TemporaryDirectory(prefix="streamvid-") as folder:
        local = Path(folder) / "index"
        local.write_bytes(data)
        store.put(path, local)
