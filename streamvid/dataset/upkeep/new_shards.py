"""Shards of a new version that are made from existing shards: kept, copied under a new name, or rewritten."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from streamvid.dataset.integrity import check_size, read_shards, read_verified, verify
from streamvid.dataset.manifest import MAX_BUILD_ID, FileInfo, ShardInfo, offsets_path, shard_path
from streamvid.dataset.passes import Progress, in_parallel, shard_files
from streamvid.dataset.reader import Dataset
from streamvid.dataset.removed import ShardName
from streamvid.dataset.tar import Member, scan_tar, tar_index, write_shard
from streamvid.dataset.upkeep.copy_file import FileCopier
from streamvid.dataset.versions.moved import read_moved
from streamvid.errors import IntegrityError, StorageError
from streamvid.storage import CachedStore, LocalStore, Store

Int64s = npt.NDArray[np.int64]
ShardChange = Literal["kept", "copied", "written"]
"""Ways to make a shard: keep its tar unchanged, copy the tar under a new name, or rewrite it."""

_HASHES = 16


@dataclass(frozen=True, eq=False)
class Part:
    """Samples that a new shard takes from an existing shard.

    rows: ascending positions among the existing shard's samples.
    """

    dataset: Dataset
    shard: ShardInfo
    rows: Int64s

    @staticmethod
    def whole(dataset: Dataset, shard: ShardInfo) -> Part:
        """Return the part that contains all samples of a shard."""
        return Part(dataset, shard, np.arange(shard.num_samples))

    @property
    def stored_rows(self) -> Int64s:
        """Positions of the samples in the existing tar."""
        kept = self.dataset.kept_rows(self.shard)
        return self.rows if kept is None else kept[self.rows].astype(np.int64)

    @property
    def is_whole(self) -> bool:
        """True if the part contains all samples of the tar."""
        return len(self.rows) == self.dataset.num_stored(self.shard)


@dataclass(frozen=True, eq=False)
class NewShard:
    """One shard of the new version. A shard that is not rewritten has one part, which contains all samples of a tar."""

    bucket_id: str
    number: int
    build_id: int
    split: str
    parts: tuple[Part, ...]
    change: ShardChange

    @staticmethod
    def kept(dataset: Dataset, shard: ShardInfo) -> NewShard:
        """Return the entry for an existing shard that stays unchanged."""
        part = Part.whole(dataset, shard)
        return NewShard(shard.bucket_id, shard.number, shard.build_id, shard.split, (part,), "kept")

    @property
    def path(self) -> str:
        return shard_path(self.bucket_id, self.number, self.build_id)

    @property
    def num_samples(self) -> int:
        return sum(len(part.rows) for part in self.parts)


@dataclass(frozen=True, slots=True)
class TarFacts:
    """Sizes and checksums of a shard's files. offsets: maps member names to data offsets; None if unchanged."""

    num_bytes: int
    sha256: str
    offsets_num_bytes: int
    offsets_sha256: str
    offsets: dict[str, int] | None = None


def taken_names(dataset: Dataset, dead: Sequence[ShardInfo]) -> set[ShardName]:
    """Return the names of all shards that a dataset has or had. dead: output of `dead_shards`."""
    moved = read_moved(dataset.store, dataset.manifest.files.moved)
    names = {(row.bucket_id, row.number, row.build_id) for row in moved}
    return names | {(shard.bucket_id, shard.number, shard.build_id) for shard in (*dataset.shards, *dead)}


def build_id_of(parts: Sequence[Part], number: int, taken: set[ShardName]) -> int:
    """Return a build id that depends only on the shard's content and results in an unused name.

    taken: names of all shards in all versions. The function adds the new name to `taken`.
    """
    digest = hashlib.sha256(str(number).encode())
    for part in parts:
        digest.update(f"\n{part.shard.path} {part.shard.sha256} ".encode())
        digest.update(part.stored_rows.astype("<i8").tobytes())
    bucket_id = parts[0].shard.bucket_id
    for salt in range(_HASHES):
        value = int.from_bytes(hashlib.sha256(digest.digest() + bytes([salt])).digest()[:4], "big") % MAX_BUILD_ID
        if value and (bucket_id, number, value) not in taken:
            taken.add((bucket_id, number, value))
            return value
    raise AssertionError("the first 16 candidate names for a new shard are already in use")


def dead_shards(dataset: Dataset) -> list[ShardInfo]:
    """Return the shards that the stored shard table still lists although they have no samples left."""
    if not dataset.manifest.files.removed:
        return []
    there = {shard.path for shard in dataset.shards}
    return [shard for shard in read_shards(dataset.store, dataset.manifest.files.shards) if shard.path not in there]


def store_shards(
    dest: Store, shards: Sequence[NewShard], folder: Path, workers: int, progress: Progress
) -> list[TarFacts]:
    """Write or copy the tars of new shards to `dest`. Return the TarFacts of each shard, in the order of `shards`.

    folder: scratch folder, which must be on the file system of `dest` if `dest` is local.
    """
    store = _Storing(dest, folder)
    total, done = sum(shard.change != "kept" for shard in shards), 0
    facts = []
    with contextlib.closing(in_parallel(store.store, shards, workers)) as results:
        for shard, found in zip(shards, results, strict=True):
            facts.append(found)
            if shard.change != "kept":
                done += 1
                progress("shards", done, total)
    return facts


@dataclass(frozen=True)
class _Storing:
    dest: Store
    folder: Path

    def store(self, shard: NewShard, stop: threading.Event) -> TarFacts:
        """Store the offsets file of one shard, then its tar. Return the sizes and checksums of both."""
        if shard.change == "written":
            return self._write(shard, stop)
        old = shard.parts[0].shard
        if shard.change == "copied":
            names = (shard.path, offsets_path(shard.path))
            for file, name in reversed(list(zip(shard_files(old), names, strict=True))):
                self._copy(shard.parts[0].dataset.store, file, name, stop)
        return TarFacts(old.num_bytes, old.sha256, old.offsets_num_bytes, old.offsets_sha256)

    def _copy(self, source: Store, file: FileInfo, name: str, stop: threading.Event) -> None:
        if isinstance(source, LocalStore) and isinstance(self.dest, LocalStore):
            local = self.folder / _scratch_name(name)
            with contextlib.suppress(OSError):  # another file system, or one without hard links
                local.hardlink_to(source.path(file.path))
                if local.stat().st_size == file.num_bytes:
                    self.dest.put(name, local)
                    local.unlink(missing_ok=True)  # a rename leaves it if both are links to the same file
                    return
                local.unlink()
        origin = source.origin if isinstance(source, CachedStore) else source
        if self.dest.copy(origin, file.path, name, file.num_bytes):
            return
        FileCopier(source, self.dest, self.folder).copy(file, stop, name)

    def _write(self, shard: NewShard, stop: threading.Event) -> TarFacts:
        local = self.folder / _scratch_name(shard.path)
        index = self.folder / _scratch_name(offsets_path(shard.path))
        try:
            with contextlib.ExitStack() as opened, local.open("w+b") as file:
                write_shard(file, self._samples(shard, opened, stop))
                file.flush()
                file.seek(0)
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                members = list(scan_tar(file))
                num_bytes = file.seek(0, os.SEEK_END)
            offsets = tar_index(members)
            index.write_bytes(offsets)
            self.dest.put(offsets_path(shard.path), index)
            self.dest.put(shard.path, local)
        except OSError as error:
            raise StorageError(
                f"cannot write {shard.path} in {self.folder}: {error.strerror or error}; free disk space there, or set "
                "temp_dir (--temp-dir) to another folder"
            ) from error
        places = {member.name: member.offset for member in members}
        return TarFacts(num_bytes, digest, len(offsets), hashlib.sha256(offsets).hexdigest(), places)

    def _samples(
        self, shard: NewShard, opened: contextlib.ExitStack, stop: threading.Event
    ) -> Iterator[tuple[str, dict[str, bytes]]]:
        """Yield the samples of a new shard, read from the verified tars of its parts."""
        for part in shard.parts:
            with self._verified(part, stop) as tar:
                samples = _by_key(tar)
                if len(samples) != part.dataset.num_stored(part.shard):
                    raise IntegrityError(
                        f"{part.dataset.url}: {part.shard.path} contains {len(samples)} samples, but the index lists "
                        f"{part.dataset.num_stored(part.shard)}; rebuild the dataset"
                    )
                for place in part.stored_rows.tolist():
                    yield samples[place][0].key, {m.extension: _data(tar, m) for m in samples[place]}

    @contextlib.contextmanager
    def _verified(self, part: Part, stop: threading.Event) -> Iterator[BinaryIO]:
        """Verify the checksum of a part's tar, and open the tar. A remote tar is downloaded first."""
        store, tar = part.dataset.store, shard_files(part.shard)[0]
        if isinstance(store, LocalStore):
            verify(store, tar, bytearray())
            with store.path(tar.path).open("rb") as file:
                yield file
            return
        scratch = LocalStore(self.folder)
        name = _scratch_name(f"of {tar.path}")
        FileCopier(store, scratch, self.folder).copy(tar, stop, name)
        try:
            with scratch.path(name).open("rb") as file:
                yield file
        finally:
            scratch.remove(name)


def _scratch_name(path: str) -> str:
    return hashlib.sha256(f"new {path}".encode()).hexdigest()[:32]


def _by_key(tar: BinaryIO) -> list[list[Member]]:
    """Return the members of each sample, in the order of the tar."""
    samples: list[list[Member]] = []
    for member in scan_tar(tar):
        if not samples or samples[-1][0].key != member.key:
            samples.append([])
        samples[-1].append(member)
    return samples


def _data(tar: BinaryIO, member: Member) -> bytes:
    tar.seek(member.offset)
    return tar.read(member.num_bytes)


def bytes_of_samples(part: Part) -> int:
    """Return the number of bytes that the samples of a part occupy in a tar."""
    store, file = part.dataset.store, shard_files(part.shard)[1]
    check_size(store, file)
    offsets = np.frombuffer(read_verified(store, file), "<u8").astype(np.int64)
    return int(np.diff(offsets)[part.stored_rows].sum())
