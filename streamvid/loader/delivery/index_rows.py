"""Cached access to the samples index and the packet tables, shard by shard."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamvid.buckets.bucket import Bucket
from streamvid.dataset.arrow import chunk_of, values_of
from streamvid.dataset.features.tables import MemberTable
from streamvid.dataset.manifest import ShardInfo
from streamvid.dataset.reader import Dataset
from streamvid.dataset.tar import KEY, MAX_NAME_BYTES
from streamvid.dataset.versions.later import LaterVersions
from streamvid.errors import IntegrityError, StreamvidError
from streamvid.loader.delivery.requests import BatchRequest
from streamvid.loader.mix import MixPart, SampleRequest
from streamvid.loader.view.audio import HAS_AUDIO
from streamvid.loader.view.index_row import MAX_FRAMES, IndexRow, PacketsPlace, sample_file
from streamvid.loader.view.media import media_files
from streamvid.loader.workers.cache import Name, SharedCache
from streamvid.storage import while_wanted

if TYPE_CHECKING:
    import pyarrow as pa

    from streamvid.dataset.packets import PacketTables
    from streamvid.video.audio.index import AudioIndex
    from streamvid.video.clip_index import ClipIndex

_ROW_COLUMNS = ("key", "fps", "clip_offset", "clip_bytes", "clip_sha256", "window_num_frames")
_PACKETS_COLUMNS = ("packets_offset", "packets_bytes", "packets_sha256")
_CACHED_BYTES = 64 * 2**20
_MAX_ASKED = 4096
_LOOKAHEAD = 16  # batches whose index rows are read ahead from an object store
_MAX_FLOAT32 = 3.4e38  # batches contain frame rates as float32
_NO_FEATURES = (0, 0, bytes(32))  # offset, bytes and SHA-256


@dataclass(frozen=True, slots=True)
class _ShardRows:
    columns: dict[str, Sequence[Any]]
    packets: PacketsPlace | None
    numbers: npt.NDArray[np.int32] | None  # row numbers that pass the part's filter; None: all rows
    stored: npt.NDArray[np.int32] | None  # place of each row in the tar; None: its row number
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _MovedRows:
    """Index rows of a later version's shard, to which samples from an earlier version's shard were moved.

    places: maps sample keys to row numbers.
    """

    part: MixPart
    tar: ShardInfo
    places: Mapping[str, int]
    rows: _ShardRows

    @property
    def num_bytes(self) -> int:
        return self.rows.num_bytes

    def row(self, row: IndexRow) -> IndexRow | None:
        """Return an earlier version's row with the new location of the sample's files.

        Return None if this shard does not contain the sample.
        """
        number = self.places.get(row.key)
        if number is None or self.rows.columns["clip_sha256"][number] != row.clip.sha256:
            return None
        frames = row.clip.num_frames
        place = (self.rows.columns["clip_offset"][number], row.clip.num_bytes, row.clip.sha256, frames)
        media = {
            medium.name: media_files(self.rows.columns[medium.column][number] or [], medium, frames, self.tar)
            for medium in self.part.media
        }
        return replace(
            row,
            clip=sample_file("the clip", place, self.tar, num_frames=(frames, frames)),
            number=number if self.rows.stored is None else int(self.rows.stored[number]),
            packets=self.rows.packets,
            media=media,
            tar=self.tar,
        )


class IndexRows:
    """Cache for the index rows of recently used shards. It holds columns of up to 64 MiB, but at least one shard.

    later: later versions of the datasets, which may have moved samples to other tars.

    Packet tables and feature locations have caches of the same size. Thread-safe: one thread reads missing rows, and
    other threads that need these rows wait.
    """

    def __init__(self, cached_bytes: int = _CACHED_BYTES, later: LaterVersions | None = None) -> None:
        self._later = later or LaterVersions()
        self._moved: SharedCache[_MovedRows] = SharedCache(cached_bytes)
        self._rows: SharedCache[_ShardRows] = SharedCache(cached_bytes)
        self._tables: SharedCache[PacketTables] = SharedCache(cached_bytes)
        self._members: SharedCache[MemberTable] = SharedCache(cached_bytes)

    @property
    def num_bytes(self) -> int:
        """Size of the cached rows in bytes."""
        return self._rows.num_bytes

    def row(self, sample: SampleRequest, bucket: Bucket) -> IndexRow:
        """Return the validated index row of a sample in the given bucket (SAFE-1).

        If features are delivered, the row's clip is the features file. Raises IntegrityError if the row is invalid,
        and StorageError or DatasetError if the index cannot be read.
        """
        rows, number, key = self._key(sample)
        try:
            found = self._row(sample, bucket, key, number, rows)
            return found if bucket.is_text else self._relocated(sample, found)
        except IntegrityError as error:
            raise IntegrityError(f"{key}: {error}") from error

    def key(self, sample: SampleRequest) -> str:
        """Return the key of a sample. Raises the same errors as `row`."""
        return self._key(sample)[2]

    def _key(self, sample: SampleRequest) -> tuple[_ShardRows, int, str]:
        """Return the rows of a sample's shard, the sample's row number and its key."""
        rows = self._rows.get(_shard_name(sample), partial(_read_rows, sample))
        number = sample.place if rows.numbers is None else int(rows.numbers[sample.place])
        key = rows.columns["key"][number]
        if not isinstance(key, str) or not KEY.fullmatch(key) or len(key) > MAX_NAME_BYTES:
            shown = ascii(str(key)[:100])
            raise IntegrityError(
                f"the index contains the key {shown}, but keys must match {KEY.pattern} and have at most "
                f"{MAX_NAME_BYTES} characters; copy the dataset again"
            )
        return rows, number, key

    def _relocated(self, sample: SampleRequest, row: IndexRow) -> IndexRow:
        """Return the row, with the new location of the sample's files if a later version replaced the shard."""
        part = sample.part
        shards = None if part.sidecar else self._later.shards_of(part.number, sample.shard_info)
        if shards is None:
            return row
        for later, shard in shards:
            name = (part.number, shard.path)
            found = self._moved.get(name, partial(_read_moved, later.newest, shard, part)).row(row)
            if found is not None:
                return found
        raise IntegrityError(
            f"a later version of {part.dataset.url} deleted the tar {sample.shard_info.path}, which contained "
            "this sample, and the tars that replace it do not contain the sample; create a new loader, "
            "which opens the newest version"
        )

    def _row(self, sample: SampleRequest, bucket: Bucket, key: str, number: int, rows: _ShardRows) -> IndexRow:
        part = sample.part

        def value(name: str) -> Any:
            return rows.columns[name][number]

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
            has_audio=part.audio is not None and value(HAS_AUDIO) is True,
        )

    def packets(self, sample: SampleRequest, row: IndexRow) -> ClipIndex | None:
        """Return the packet index of a row's clip, or None if the clip has no packet index.

        Raises the same errors as `row`.
        """
        tables = self._tables_of(sample, row)
        return None if tables is None else tables.clip(row.number)

    def audio_packets(self, sample: SampleRequest, row: IndexRow) -> AudioIndex | None:
        """Return the index of a clip's audio packets, or None if the clip has no such index.

        Raises the same errors as `row`.
        """
        tables = self._tables_of(sample, row)
        return None if tables is None else tables.audio(row.number)

    def _tables_of(self, sample: SampleRequest, row: IndexRow) -> PacketTables | None:
        if row.packets is None:
            return None
        return self._packets(sample.part, row.packets, row.tar or sample.shard_info)

    def _packets(self, part: MixPart, place: PacketsPlace, tar: ShardInfo) -> PacketTables:
        name = (part.number, place.path, place.offset)
        return self._tables.get(name, lambda: place.read(part.dataset.store, tar.path))

    def ahead(
        self,
        requests: Iterator[BatchRequest],
        submit: Callable[[Callable[[], None]], None],
        is_wanted: Callable[[], bool],
    ) -> Iterator[BatchRequest]:
        """Yield the requests. Meanwhile, prefetch the index rows that later requests need from object stores.

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
                self._packets(sample.part, rows.packets, sample.shard_info)


def _least_frames(part: MixPart, bucket: Bucket) -> int:
    if bucket.is_text:
        return 0
    return bucket.num_frames if part.rate.fps is None else 1  # at another rate a frame may be shown several times


def _known(value: float | None) -> float:
    return float(value) if value is not None and 0 < value < _MAX_FLOAT32 else 0.0


def _shard_name(sample: SampleRequest) -> Name:
    return sample.part.number, sample.bucket_id, sample.shard


def _read_rows(sample: SampleRequest) -> _ShardRows:
    part, shard, chosen = sample.part, sample.shard_info, sample.part.subset.filter
    of_media = [medium.column for medium in part.media]
    of_rate = () if part.rate.fps is None else ("duration_seconds",)
    of_audio = () if part.audio is None else (HAS_AUDIO,)
    other = (*of_rate, *of_audio, *part.text.needed, *part.columns.values(), *of_media)
    kept = list(dict.fromkeys([*_ROW_COLUMNS, *other]))
    of_packets = _PACKETS_COLUMNS if part.dataset.manifest.files.packets else ()
    wanted = list(dict.fromkeys([*kept, *of_packets, *(chosen.columns if chosen else ())]))
    table = part.dataset.samples(shard, wanted)
    if missing := [name for name in wanted if name not in table.column_names]:
        raise IntegrityError(
            f"{part.dataset.url}: {shard.index_path} lacks columns ({', '.join(missing)}); copy the dataset again"
        )
    numbers = None
    if chosen is not None:
        numbers = chosen.matching(table)
        counted = int(part.subset.counts[sample.bucket_id][sample.shard])
        if len(numbers) != counted:
            raise IntegrityError(
                f"{part.dataset.url}: {len(numbers)} samples in {shard.path} pass the filter {chosen.text!r}, but "
                f"{counted} were counted when the loader was created; the dataset or the cached counts have changed. "
                "Create a new loader"
            )
    whole = table.select(kept).combine_chunks()
    columns = {name: values_of(chunk_of(whole, name)) for name in kept}
    num_bytes = whole.nbytes + (0 if numbers is None else numbers.nbytes)
    return _ShardRows(
        columns, _packets_place(part.dataset, shard, table), numbers, part.dataset.kept_rows(shard), num_bytes
    )


def _read_moved(dataset: Dataset, shard: ShardInfo, part: MixPart) -> _MovedRows:
    names = ["key", "clip_offset", "clip_sha256", *(medium.column for medium in part.media)]
    of_packets = _PACKETS_COLUMNS if dataset.manifest.files.packets else ()
    table = dataset.samples(shard, [*names, *of_packets])
    whole = table.select(names).combine_chunks()
    columns = {name: values_of(chunk_of(whole, name)) for name in names}
    places = {key: number for number, key in enumerate(columns["key"])}
    num_bytes = 2 * whole.nbytes  # keys are held twice
    rows = _ShardRows(columns, _packets_place(dataset, shard, table), None, dataset.kept_rows(shard), num_bytes)
    return _MovedRows(part, shard, places, rows)


def _packets_place(dataset: Dataset, shard: ShardInfo, rows: pa.Table) -> PacketsPlace | None:
    if not dataset.manifest.files.packets:
        return None
    place = [rows.column(name)[0].as_py() for name in _PACKETS_COLUMNS]
    if place == [None, None, None]:
        return None
    path, offset, num_bytes, sha256 = dataset.check_place(shard, *place)
    return PacketsPlace(path, offset, num_bytes, sha256.hex(), dataset.num_stored(shard))
