"""Verification of one shard against the manifest and the index: sizes and, in a deep check, every byte."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from streamvid.dataset.integrity import until_right
from streamvid.dataset.manifest import FileInfo, ShardInfo
from streamvid.dataset.passes import read_blocks, shard_files
from streamvid.dataset.reader import Dataset
from streamvid.errors import IntegrityError, StorageError, StreamvidError
from streamvid.storage import FileState, Store

MAX_KEYS = 100
MISSING, SIZE, CHECKSUM, UNREADABLE = "missing", "size", "checksum", "unreadable"
CONTENT = "content"
"""Intact bytes that contradict the rest of the dataset; a copy cannot repair them."""

_ATTEMPTS = 3  # to read a file that is replaced during a read, or whose version was damaged in transit
_COLUMNS = ("key", "text", "text_sha256", "clip_offset", "clip_bytes", "clip_sha256")
_PACKETS = ("packets_offset", "packets_bytes", "packets_sha256")


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem with one file.

    what: kind of problem: "missing", "size" (in bytes), "checksum" (SHA-256), "unreadable", or "content" if the file
        is intact but contradicts the rest of the dataset.
    bucket_id, shard: bucket and shard of the affected samples, or "" if several shards share the file.
    keys: keys of at most MAX_KEYS affected samples.
    num_keys: number of affected samples; 0 if no clip, caption or packet table is affected.
    """

    path: str
    what: str
    expected: str
    found: str
    bucket_id: str = ""
    shard: str = ""
    keys: tuple[str, ...] = ()
    num_keys: int = 0

    def __str__(self) -> str:
        text = f"{self.path}: {self.what}: expected {self.expected}, found {self.found}"
        if not self.num_keys:
            return text + ("; no clip is affected" if self.shard and self.what == CHECKSUM else "")
        named = ", ".join(self.keys[:3]) + (", …" if self.num_keys > 3 and self.keys else "")
        where = f" of bucket {self.bucket_id}" if self.bucket_id else ""
        return f"{text}; samples affected: {self.num_keys}{where}" + (f" ({named})" if named else "")


@dataclass
class ShardFindings:
    """Result of verifying one shard.

    states: states of the tar and of the offsets file; empty unless both have the right size.
    keys: keys of the samples if a later version deliberately deleted the shard; otherwise None.
    """

    shard: ShardInfo
    problems: list[Problem] = field(default_factory=list)
    states: tuple[FileState, ...] = ()
    num_bytes_read: int = 0
    keys: tuple[str, ...] | None = None

    def add(self, problem: Problem, keys: Sequence[str] = (), *, is_lost: bool = False) -> None:
        """Add a problem that affects the samples in `keys` or, with `is_lost`, all samples of the shard."""
        shard, num_keys = self.shard, self.shard.num_samples if is_lost else len(keys)
        shown = tuple(keys[:MAX_KEYS])
        self.problems.append(
            replace(problem, bucket_id=shard.bucket_id, shard=shard.path, keys=shown, num_keys=num_keys)
        )


def check_states(
    dataset: Dataset, shard: ShardInfo, is_index_right: bool, deleted: Collection[str] = ()
) -> ShardFindings:
    """Verify that the files of a shard exist and have the right sizes, and return the findings.

    deleted: paths of tars that a later version deleted.
    """
    findings = ShardFindings(shard)
    if shard.path in deleted and dataset.store.state(shard.path) is None:
        findings.keys = tuple(_keys(dataset, shard) if is_index_right else ())
        return findings
    states = []
    for file in shard_files(shard):
        state = dataset.store.state(file.path)
        problem = problem_of_state(file, state)
        if state is not None and problem is None:
            states.append(state)
        elif problem is not None:
            is_tar = file.path == shard.path
            findings.add(problem, _keys(dataset, shard) if is_tar and is_index_right else (), is_lost=is_tar)
    findings.states = tuple(states) if len(states) == 2 else ()
    return findings


def check_bytes(dataset: Dataset, findings: ShardFindings, is_index_right: bool, stop: threading.Event) -> None:
    """Verify every byte of a shard and its index rows. Add problems to `findings`, the result of `check_states`."""
    shard = findings.shard
    rows = _check_rows(dataset, findings) if is_index_right else []
    found = {problem.path for problem in findings.problems}
    known = {state.path: state for state in findings.states}
    for file in shard_files(shard):
        if file.path in found:
            continue
        clips = ClipChecksums(rows, file.num_bytes) if file.path == shard.path else None
        problem = check_file(dataset.store, file, stop, clips, known.get(file.path))
        findings.num_bytes_read += file.num_bytes
        wrong = clips.wrong() if clips else []
        if problem is None and wrong:
            problem = Problem(file.path, CONTENT, "the clips that the index describes", "other bytes at their offsets")
            findings.add(problem, wrong)
        elif problem is not None and clips is not None and not (problem.what == CHECKSUM and rows):
            findings.add(problem, [row.key for row in rows], is_lost=True)  # the affected samples are unknown
        elif problem is not None:
            findings.add(problem, wrong)


def check_file(
    store: Store,
    file: FileInfo,
    stop: threading.Event,
    clips: ClipChecksums | None = None,
    known: FileState | None = None,
) -> Problem | None:
    """Verify the bytes of a file. Return the problem, or None if the file is intact.

    If the checksum is wrong, the file is read again, because the bytes may have been damaged in transit.

    clips: clip checksums to compute while the file is being read.
    known: current state of the file, if the caller knows it.

    Raises StorageError if the store cannot report whether the file exists.
    """
    state = known or store.state(file.path)
    for attempt in range(_ATTEMPTS):
        problem = problem_of_state(file, state)
        if state is None or problem is not None:
            return problem
        try:
            read = partial(_read, store, file, state.version, stop, clips)
            found = until_right(store, file.path, bytes.fromhex(file.sha256), read).hex()
            break
        except StorageError as error:
            # An unreachable store is not a problem of this file. In that case, the next line raises StorageError.
            state = store.state(file.path)
            if attempt == _ATTEMPTS - 1:
                return problem_of_state(file, state) or Problem(
                    file.path, UNREADABLE, "readable bytes", f"an error ({error})"
                )
    return None if found == file.sha256 else Problem(file.path, CHECKSUM, file.sha256, found)


def _read(store: Store, file: FileInfo, version: str, stop: threading.Event, clips: ClipChecksums | None) -> bytes:
    """Return the SHA-256 of a file. In the same pass, compute the checksums of its clips."""
    digest, start = hashlib.sha256(), 0
    if clips is not None:
        clips.begin()
    for block in read_blocks(store, file.path, file.num_bytes, stop, version):
        digest.update(block)
        if clips is not None:
            clips.update(start, block)
        start += len(block)
    return digest.digest()


def problem_of_state(file: FileInfo, state: FileState | None) -> Problem | None:
    """Return a problem if a file is missing or has the wrong size; otherwise, return None."""
    if state is None:
        return Problem(file.path, MISSING, f"{file.num_bytes} bytes", "nothing")
    if state.num_bytes != file.num_bytes:
        return Problem(file.path, SIZE, f"{file.num_bytes} bytes", f"{state.num_bytes} bytes")
    return None


@dataclass(frozen=True, slots=True)
class IndexedClip:
    """Values from the samples index against which a clip is verified."""

    key: str
    text: str | None
    text_sha256: bytes
    offset: int
    num_bytes: int
    sha256: bytes

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


class ClipChecksums:
    """Checksums of all clips in a tar, computed in one pass over its bytes."""

    def __init__(self, clips: Sequence[IndexedClip], num_bytes: int) -> None:
        self._clips = sorted(clips, key=lambda clip: clip.offset)
        self._num_bytes = num_bytes
        self.begin()

    def begin(self) -> None:
        """Reset all checksums, so that the tar can be read again from the start."""
        self._digests = [hashlib.sha256() for _ in self._clips]
        self._first = 0  # all clips before this one are complete

    def update(self, start: int, block: memoryview) -> None:
        """Add the next bytes of the tar, which begin at `start`."""
        end = start + len(block)
        for number in range(self._first, len(self._clips)):
            clip = self._clips[number]
            if clip.offset >= end:
                return
            if clip.end <= start:
                self._first = number + 1 if number == self._first else self._first
                continue
            self._digests[number].update(block[max(clip.offset, start) - start : min(clip.end, end) - start])

    def wrong(self) -> list[str]:
        """Return the keys of the clips that differ from the index."""
        pairs = zip(self._clips, self._digests, strict=True)
        return [clip.key for clip, digest in pairs if digest.digest() != clip.sha256 or not self._fits(clip)]

    def _fits(self, clip: IndexedClip) -> bool:
        return 0 <= clip.offset <= clip.end <= self._num_bytes


def _check_rows(dataset: Dataset, findings: ShardFindings) -> list[IndexedClip]:
    """Verify the captions and packets of a shard. Return the shard's clips, or [] if the index rows cannot be used."""
    shard = findings.shard
    try:
        table = dataset.samples(shard, _COLUMNS + _PACKETS)
        if missing := [name for name in _COLUMNS if name != "text" and table.column(name).null_count]:
            raise IntegrityError(f"the index has missing values in {', '.join(missing)}")
    except StorageError:
        raise
    except (StreamvidError, KeyError) as error:
        expected = f"{shard.num_samples} rows for {shard.path}"
        findings.add(Problem(shard.index_path, CONTENT, expected, str(error)), is_lost=True)
        return []
    rows = [IndexedClip(*values) for values in zip(*(table.column(n).to_pylist() for n in _COLUMNS), strict=True)]
    wrong = [row.key for row in rows if hashlib.sha256((row.text or "").encode()).digest() != row.text_sha256]
    if wrong:
        expected, found = "captions with the checksums of the index", "captions with other checksums"
        findings.add(Problem(shard.index_path, CONTENT, expected, found), wrong)
    keys = [row.key for row in rows]
    _check_columns(dataset, findings, keys)
    if dataset.manifest.files.packets:
        place = [table.column(name)[0].as_py() for name in _PACKETS]
        if place != [None, None, None]:
            _check_packets(dataset, findings, keys, place)
    return rows


def _check_columns(dataset: Dataset, findings: ShardFindings, keys: list[str]) -> None:
    """Verify that the rows in a file with columns added later have the same keys as the rows in the samples index."""
    for path in dataset.column_paths(findings.shard):
        try:
            found = dataset.column_rows(findings.shard, path, ["key"]).column("key").to_pylist()
        except StorageError:
            continue  # a missing or short file is a problem of the file
        except (StreamvidError, KeyError) as error:
            expected = f"{len(keys)} rows for {findings.shard.path}"
            findings.add(Problem(path, CONTENT, expected, str(error)), keys, is_lost=True)
            continue
        wrong = [key for key, other in zip(keys, found, strict=True) if key != other]
        if wrong:
            findings.add(Problem(path, CONTENT, "the keys of the samples index", "other keys"), wrong)


def _check_packets(dataset: Dataset, findings: ShardFindings, keys: list[str], place: list[Any]) -> None:
    file = dataset.manifest.files.packets_of(findings.shard.index_path)
    assert file is not None, "the manifest lists packets files"
    wrong, first = [], ""
    try:
        tables = dataset.packets(findings.shard, *place)
    except StorageError:
        return  # a missing or short file is a problem of the file
    except IntegrityError as error:
        problem = Problem(file.path, CHECKSUM, "a packet table that matches its checksum", str(error))
        findings.add(problem, keys, is_lost=True)
        return
    kept = dataset.kept_rows(findings.shard)
    for number, key in enumerate(keys):
        row = number if kept is None else int(kept[number])
        try:
            tables.clip(row)
            tables.audio(row)
        except IntegrityError as error:
            wrong.append(key)
            first = first or str(error)
    if wrong:
        findings.add(Problem(file.path, CONTENT, "an index of each clip's packets", first), wrong)


def _keys(dataset: Dataset, shard: ShardInfo) -> list[str]:
    try:
        return [str(key) for key in dataset.samples(shard, ["key"]).column("key").to_pylist()]
    except StreamvidError:
        return []  # the problem of the index is reported separately
