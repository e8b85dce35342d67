"""Cached access to the samples index and the packet tables, shard by shard."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamvid.buckets.bucket import Bucket
from streamvid.dataset.features.tables import MemberTable
from streamvid.dataset.manifest import ShardInfo
from streamvid.dataset.reader import Dataset
from streamvid.dataset.tar import KEY, MAX_NAME_BYTES
from streamvid.errors import IntegrityError, StreamvidError
from streamvid.loader.delivery.requests import BatchRequest
from streamvid.loader.mix import MixPart, SampleRequest
from streamvid.loader.view.index_row import MAX_FRAMES, IndexRow, PacketsPlace, sample_file
from streamvid.loader.view.media import media_files
from streamvid.loader.workers.cache import Name, SharedCache
from streamvid.storage import while_wanted

if TYPE_CHECKING:
    import pyarrow as pa

    from streamvid.dataset.packets import PacketTables
    from streamvid.video.clip_index import ClipIndex

_ROW_COLUMNS = ("key", "fps", "clip_offset", "clip_bytes", "clip_sha256", "window_num_frames")
_PACKETS_COLUMNS = ("packets_offset", "packets_bytes", "packets_sha256")
_CACHED_BYTES = 64 * 2**20
_MAX_ASKED = 4096
_LOOKAHEAD = 16  # batches whose index rows are read ahead from an object store
_NO_FEATURES = (0, 0, bytes(32))  # offset, bytes and SHA-256


@dataclass(frozen=True, slots=True)
class _ShardRows:
    columns: dict[str, pa.Array]
    packets: PacketsPlace | None
    numbers: npt.NDArray[np.int32] | None  # row numbers that pass the part's filter; None: all rows
    stored: npt.NDArray[np.int32] | None  # place of each row in the tar; None: its row number
    num_bytes: int


class IndexRows:
    """Cache of the index rows of recently used shards: up to 64 MiB of Arrow columns, but at least one shard.

    Packet tables and feature locations have caches of the same size. Thread-safe: one thread reads missing rows, and
    other threads that need them wait.
    """

    def __init__(self, cached_bytes: int = _CACHED_BYTES) -> None:
        self._rows: SharedCache[_ShardRows] = SharedCache(cached_bytes)
        self._tables: SharedCache[PacketTables] = SharedCache(cached_bytes)
        self._members: SharedCache[MemberTable] = SharedCache(cached_bytes)

    @property
    def num_bytes(self) -> int:
        """Size of the cached rows in bytes."""
        return self._rows.num_bytes

    def row(self, sample: SampleRequest, bucket: Bucket) -> IndexRow:
        """Return the validated index row of a sample of this bucket (SAFE-1).

        If features are delivered, the row's clip is the features file. Raises IntegrityError if the row is invalid,
        and StorageError or DatasetError if the index cannot be read.
        """
        rows = self._rows.get(_shard_name(sample), partial(_read_rows, sample))
        number = sample.place if rows.numbers is None else int(rows.numbers[sample.place])
        key = rows.columns["key"][number].as_py()
        if not isinstance(key, str) or not KEY.fullmatch(key) or len(key) > MAX_NAME_BYTES:
            shown = ascii(str(key)[:100])
            raise IntegrityError(
                f"the index contains the key {shown}, but keys must match {KEY.pattern} and have at most "
                f"{MAX_NAME_BYTES} characters; copy the dataset again"
            )
        try:
            return self._row(sample, bucket, key, number, rows)
        except IntegrityError as error:
            raise IntegrityError(f"{key}: {error}") from error

    def _row(self, sample: SampleRequest, bucket: Bucket, key: str, number: int, rows: _ShardRows) -> IndexRow:
        part = sample.part

        def value(name: str) -> Any:
            return rows.columns[name][number].as_py()

        num_frames = value("window_num_frames")
        place, is_missing = (value("clip_offset"), value("clip_bytes"), value("clip_sha256")), False
        if part.sidecar is not None:
            members = self._members.get(_shard_name(sample), partial(part.sidecar.members, sample.shard_info))
            found = members.place(number, sample.shown_visit)
            place, is_missing = found or _NO_FEATURES, found is None
        clip = sample_file(
            "the clip",
            (*place, num_frames),
            sample.file,
            num_frames=(_least_frames(part, bucket), MAX_FRAMES),
            least_bytes=0 if is_missing else 1,
        )
        return IndexRow(
            key=key,
            clip=clip,
            number=number if rows.stored is None else int(rows.stored[number]),
            packets=None if part.sidecar is not None else rows.packets,
            fps=_known(value("fps")),
            duration_seconds=0.0 if part.rate.fps is None else _known(value("duration_seconds")),
            texts={name: value(name) for name in part.text.needed},
            columns={name: value(column) for name, column in part.columns.items()},
            media={
                medium.name: media_files(value(medium.column) or [], medium, num_frames, sample.shard_info)
                for medium in part.media
            },
            is_missing=is_missing,
        )

    def packets(self, sample: SampleRequest, row: IndexRow) -> ClipIndex | None:
        """Return the packet index of a row's clip, or None if the clip has none. Raises the same errors as `row`."""
        if row.packets is None:
            return None
        return self._tables.get(_shard_name(sample), partial(_read_packets, sample, row.packets)).clip(row.number)

    def ahead(
        self,
        requests: Iterator[BatchRequest],
        submit: Callable[[Callable[[], None]], None],
        is_wanted: Callable[[], bool],
    ) -> Iterator[BatchRequest]:
        """Yield the requests, while the index rows of later requests are read ahead from object stores.

        submit: function that runs a read in another thread.
        is_wanted: function that returns True while the run continues.
        """
        coming: deque[BatchRequest] = deque()
        asked: set[Name] = set()
        for request in requests:
            for name, sample in {_shard_name(sample): sample for sample in request.samples}.items():
                if name not in asked and sample.part.is_remote and not self._rows.has(name):
                    submit(partial(self._warm, sample, is_wanted))
                    asked.add(name)
            if len(asked) > _MAX_ASKED:
                asked.clear()
            coming.append(request)
            if len(coming) > _LOOKAHEAD:
                yield coming.popleft()
        yield from coming

    def _warm(self, sample: SampleRequest, is_wanted: Callable[[], bool]) -> None:
        """Cache the tables that `row` and `packets` need. Suppress errors: the next reader will try again."""
        with while_wanted(is_wanted), contextlib.suppress(StreamvidError):
            rows = self._rows.get(_shard_name(sample), partial(_read_rows, sample))
            sidecar = sample.part.sidecar
            if sidecar is not None:
                self._members.get(_shard_name(sample), partial(sidecar.members, sample.shard_info))
            elif rows.packets is not None:
                self._tables.get(_shard_name(sample), partial(_read_packets, sample, rows.packets))


def _least_frames(part: MixPart, bucket: Bucket) -> int:
    if bucket.is_text:
        return 0
    return bucket.num_frames if part.rate.fps is None else 1  # at another rate a frame may be shown several times


def _known(value: float | None) -> float:
    return float(value) if value is not None and 0 < value < math.inf else 0.0


def _shard_name(sample: SampleRequest) -> Name:
    return sample.part.number, sample.bucket_id, sample.shard


def _read_packets(sample: SampleRequest, place: PacketsPlace) -> PacketTables:
    sha256 = bytes.fromhex(place.sha256)
    return sample.part.dataset.packets(sample.shard_info, place.offset, place.num_bytes, sha256)


def _read_rows(sample: SampleRequest) -> _ShardRows:
    part, shard, chosen = sample.part, sample.shard_info, sample.part.subset.filter
    of_media = [medium.column for medium in part.media]
    of_rate = () if part.rate.fps is None else ("duration_seconds",)
    kept = list(dict.fromkeys([*_ROW_COLUMNS, *of_rate, *part.text.needed, *part.columns.values(), *of_media]))
    of_packets = _PACKETS_COLUMNS if part.dataset.manifest.files.packets else ()
    wanted = list(dict.fromkeys([*kept, *of_packets, *(chosen.columns if chosen else ())]))
    table = part.dataset.samples(shard, wanted)
    if missing := [name for name in wanted if name not in table.column_names]:
        raise IntegrityError(
            f"{part.dataset.url}: {shard.index_path} lacks the column(s) {', '.join(missing)}; copy the dataset again"
        )
    numbers = None
    if chosen is not None:
        numbers = chosen.matching(table)
        counted = int(part.subset.counts[sample.bucket_id][sample.shard])
        if len(numbers) != counted:
            raise IntegrityError(
                f"{part.dataset.url}: {len(numbers)} samples of {shard.path} pass the filter {chosen.text!r}, but "
                f"{counted} were counted when the loader was created; the dataset or the cached counts have changed. "
                "Create a new loader"
            )
    # Use one array per column, because a chunked array searches for the chunk of each row.
    columns = {name: table.column(name).combine_chunks() for name in kept}
    num_bytes = sum(column.nbytes for column in columns.values()) + (0 if numbers is None else numbers.nbytes)
    return _ShardRows(
        columns, _packets_place(part.dataset, shard, table), numbers, part.dataset.kept_rows(shard), num_bytes
    )


def _packets_place(dataset: Dataset, shard: ShardInfo, rows: pa.Table) -> PacketsPlace | None:
    if not dataset.manifest.files.packets:
        return None
    place = [rows.column(name)[0].as_py() for name in _PACKETS_COLUMNS]
    if place == [None, None, None]:
        return None
    path, offset, num_bytes, sha256 = dataset.check_place(shard, *place)
    return PacketsPlace(path, offset, num_bytes, sha256.hex(), dataset.num_stored(shard))
