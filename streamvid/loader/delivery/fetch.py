"""Bytes of samples: their index rows, and the parts of their clips that are wanted, read into shared memory."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamvid.dataset.features.sidecar import Sidecar
from streamvid.dataset.features.tables import MemberTable, SidecarShard
from streamvid.dataset.manifest import ShardInfo
from streamvid.dataset.reader import Dataset
from streamvid.errors import IntegrityError, StreamvidError
from streamvid.loader.delivery.clip_part import ClipPart, read_ranges
from streamvid.loader.delivery.kept import Kept, Name
from streamvid.loader.mix import MixPart, SampleRequest
from streamvid.loader.view.view import view_of
from streamvid.storage import read_content

if TYPE_CHECKING:
    import pyarrow as pa

    from streamvid.dataset.packets import PacketTables
    from streamvid.loader.workers.encoded import Place
    from streamvid.video.clip_index import ClipIndex

_ROW_COLUMNS = ("key", "fps", "clip_offset", "clip_bytes", "clip_sha256", "window_num_frames")
_PLACE_COLUMNS = ("packets_offset", "packets_bytes", "packets_sha256")
_CACHED_BYTES = 64 * 2**20
_MAX_FRAMES = (1 << 31) - 1
_SHA256_BYTES = 32


@dataclass(frozen=True, slots=True)
class _ShardRows:
    columns: dict[str, pa.Array]
    place: Place | None  # of the packet table
    numbers: npt.NDArray[np.int32] | None  # of the rows that pass the part's filter; None: of all
    num_bytes: int


class IndexRows:
    """Index rows of the shards used last, as Arrow columns of 64 MiB together or, where one is larger, of that one, and
    as much of packet tables.

    Safe to use from several of the loader's threads: one reads what is not there, others that need it wait for it.
    """

    def __init__(self, cached_bytes: int = _CACHED_BYTES) -> None:
        self._rows: Kept[_ShardRows] = Kept(cached_bytes)
        self._tables: Kept[PacketTables] = Kept(cached_bytes)
        self._members: Kept[MemberTable] = Kept(cached_bytes)

    @property
    def num_bytes(self) -> int:
        """Kept of rows."""
        return self._rows.num_bytes

    def row(self, sample: SampleRequest) -> dict[str, Any]:
        """One sample's row: the format's columns that decoding needs, and under "columns" those asked for, by name.

        "place" is that of the shard's packet table, None where it has none, and "row" the clip's number there. Where a
        sidecar's tensors are delivered, what is said of the clip is said of them; "is_missing": there are none.

        Raises IntegrityError, StorageError or DatasetError.
        """
        part = sample.part
        rows = self._rows.get(_shard_name(sample), partial(_read_rows, sample))
        number = sample.place
        if rows.numbers is not None:
            number = int(rows.numbers[number])
        row = {name: rows.columns[name][number].as_py() for name in (*_own_columns(part), *part.text.needed)}
        columns = {name: rows.columns[column][number].as_py() for name, column in part.columns.items()}
        row["media"] = {medium.name: rows.columns[medium.column][number].as_py() for medium in part.media}
        row |= {"columns": columns, "place": rows.place, "row": number}
        return row if part.sidecar is None else row | self._member(part.sidecar, sample, number)

    def _member(self, sidecar: Sidecar, sample: SampleRequest, number: int) -> dict[str, Any]:
        members = self._members.get(_shard_name(sample), partial(sidecar.members, sample.shard_info))
        place = members.place(number, sample.shown_visit)
        offset, num_bytes, sha256 = place or (0, 0, bytes(_SHA256_BYTES))
        own = {"clip_offset": offset, "clip_bytes": num_bytes, "clip_sha256": sha256, "place": None}
        return own if place is not None else own | {"is_missing": True}

    def packets(self, sample: SampleRequest, row: dict[str, Any]) -> ClipIndex | None:
        """The packet index of the clip of a `row` of `sample`, None where it has none. Raises as `row` does."""
        place = row["place"]
        if place is None:
            return None
        return self._tables.get(_shard_name(sample), partial(_read_packets, sample, place)).clip(row["row"])

    def warm(self, sample: SampleRequest) -> None:
        """Read what `row` and `packets` need of a sample's shard. Raises nothing: who needs it reads it again."""
        with contextlib.suppress(StreamvidError):
            rows = self._rows.get(_shard_name(sample), partial(_read_rows, sample))
            sidecar = sample.part.sidecar
            if sidecar is not None:
                self._members.get(_shard_name(sample), partial(sidecar.members, sample.shard_info))
            elif rows.place is not None:
                self._tables.get(_shard_name(sample), partial(_read_packets, sample, rows.place))

    def has(self, sample: SampleRequest) -> bool:
        """Whether the rows of a sample's shard are there, or on their way."""
        return self._rows.has(_shard_name(sample))


def _own_columns(part: MixPart) -> tuple[str, ...]:
    return _ROW_COLUMNS if part.rate.fps is None else (*_ROW_COLUMNS, "duration_seconds")


def _shard_name(sample: SampleRequest) -> Name:
    return sample.part.number, sample.bucket_id, sample.shard


def _read_packets(sample: SampleRequest, place: Place) -> PacketTables:
    _, offset, num_bytes, sha256, _ = place
    return sample.part.dataset.packets(sample.shard_info, offset, num_bytes, bytes.fromhex(sha256))


def _read_rows(sample: SampleRequest) -> _ShardRows:
    part, shard = sample.part, sample.shard_info
    of_media = [medium.column for medium in part.media]
    kept = list(dict.fromkeys([*_own_columns(part), *part.text.needed, *part.columns.values(), *of_media]))
    places = _PLACE_COLUMNS if part.dataset.manifest.files.packets else ()
    wanted = list(dict.fromkeys([*kept, *places, *(part.subset.filter.columns if part.subset.filter else ())]))
    table = part.dataset.samples(shard, wanted)
    if missing := [name for name in wanted if name not in table.column_names]:
        raise IntegrityError(f"{part.dataset.url}: {shard.index_path} has no column {', '.join(missing)}")
    numbers = None
    if part.subset.filter is not None:
        numbers = part.subset.filter.matching(table)
        counted = int(part.subset.counts[sample.bucket_id][sample.shard])
        if len(numbers) != counted:
            raise IntegrityError(
                f"{part.dataset.url}: {len(numbers)} samples of {shard.path} pass the filter "
                f"{part.subset.filter.text!r}, {counted} were counted; the dataset or the cache of counts has changed: "
                "open the loader again"
            )
    # One array a column: a chunked one looks for the chunk of each row.
    columns = {name: table.column(name).combine_chunks() for name in kept}
    num_bytes = sum(column.nbytes for column in columns.values()) + (0 if numbers is None else numbers.nbytes)
    return _ShardRows(columns, _place(part.dataset, shard, table), numbers, num_bytes)


def _place(dataset: Dataset, shard: ShardInfo, rows: pa.Table) -> Place | None:
    if not dataset.manifest.files.packets:
        return None
    place = [rows.column(name)[0].as_py() for name in _PLACE_COLUMNS]
    if place == [None, None, None]:
        return None
    path, offset, num_bytes, sha256 = dataset.check_place(shard, *place)
    return path, offset, num_bytes, sha256.hex(), shard.num_samples


def finish_row(row: dict[str, Any], sample: SampleRequest, num_frames: int) -> None:
    """Check a row of `IndexRows`; set its "view", what the delivery shows (SAMPLE-1), and its "fps" to what that has.

    Raises IntegrityError, ConfigError.
    """
    part = sample.part
    check_row(row, sample.file, num_frames if part.rate.fps is None else 1)
    row["view"] = view_of(part.view, part.rate, row, num_frames, seed=part.seed, visit=sample.shown_visit)
    row["fps"] = row["view"].pick.delivered_fps


def check_row(row: dict[str, Any], shard: ShardInfo | SidecarShard, least_frames: int) -> None:
    """IntegrityError for an index row (as `IndexRows` gives it) that no clip of the shard can have (SAFE-1)."""
    bounds = {
        "clip_bytes": (0 if row.get("is_missing") else 1, shard.max_clip_bytes, "the shard's max_clip_bytes"),
        "clip_offset": (0, shard.num_bytes - (row["clip_bytes"] or 0), "the shard's num_bytes less clip_bytes"),
        "window_num_frames": (least_frames, _MAX_FRAMES, "at least the bucket's frames"),
    }
    for name, (least, most, why) in bounds.items():
        if not isinstance(row[name], int) or not least <= row[name] <= most:
            raise IntegrityError(
                f"the index says {name}={row[name]!r}, allowed are {least} to {most} ({why}); copy the dataset again"
            )
    if not isinstance(row["key"], str):
        raise IntegrityError(f"the index says key={row['key']!r}, which is no text; copy the dataset again")
    checksum = row["clip_sha256"]
    if not isinstance(checksum, bytes) or len(checksum) != _SHA256_BYTES:
        raise IntegrityError(f"the index says clip_sha256={checksum!r}, which is no checksum; copy the dataset again")


@dataclass(frozen=True, slots=True)
class ClipRead:
    """What reading a part took; `problem` is None, or why its stored bytes are proved bad."""

    seconds: float
    num_bytes: int
    problem: str | None = None


def read_parts(
    source: Dataset | Sidecar,
    shard: ShardInfo | SidecarShard,
    wanted: Sequence[tuple[int, ClipPart, memoryview]],
    *,
    is_again: bool = False,
) -> ClipRead:
    """Fill for each (start of its clip in the tar, part, block) the block, of part.block_bytes, with the packets' table
    and the range, which is not checked here (FETCH-1). All are of one shard; is_again: what came before was wrong.

    Raises StorageError where the store cannot tell what is stored: that is no proof of bad bytes.
    """
    since = time.monotonic()
    ranges = []
    for clip_offset, part, block in wanted:
        if part.window is not None:
            block[: part.table_bytes] = part.window.packets.reshape(-1).view(np.uint8).data
        ranges.append((clip_offset + part.first_byte, block[part.table_bytes :]))
    content = (shard.sha256, shard.num_bytes)
    read = partial(read_content, source.store, shard.path, content, ranges, is_again=is_again)
    problem = read_ranges(source.store, shard.path, ranges, read)
    return ClipRead(time.monotonic() - since, sum(part.num_bytes for _, part, _ in wanted), problem)


class FetchThreads:
    """Up to `num_threads` daemon threads, started as they are needed, that run reads in the order they are given."""

    def __init__(self, num_threads: int) -> None:
        self._max_threads = num_threads
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._num_free = 0  # threads without a job, less jobs without a thread

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job`, which must not raise, on the next free thread."""
        with self._lock:
            self._num_free -= 1
            if self._num_free < 0 and len(self._threads) < self._max_threads:
                name = f"streamvid-fetch-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
                self._num_free += 1
        self._queue.put(job)

    def close(self, timeout_seconds: float | None = None) -> None:
        """Finish what is queued and end the threads; those that a read still holds up after a while end later."""
        for _ in range(self._max_threads):
            self._queue.put(None)
        until = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        for thread in self._threads:
            if thread.is_alive():
                thread.join(None if until is None else max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
            del job
            with self._lock:
                self._num_free += 1
