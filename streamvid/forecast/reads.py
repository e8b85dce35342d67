"""What a loader would read and hold, told from the index before it is made: for `streamvid plan`."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamvid.buckets.bucket import Bucket, is_named_by
from streamvid.dataset.arrow import numbers_of
from streamvid.dataset.passes import DEFAULT_WORKERS, in_parallel
from streamvid.dataset.reader import Dataset
from streamvid.errors import ConfigError
from streamvid.forecast.epochs import HostCosts
from streamvid.loader.arguments import memory_options
from streamvid.loader.delivery.clip_part import ClipPart, clip_part
from streamvid.loader.delivery.fetch import IndexRows, check_row, finish_row
from streamvid.loader.delivery.requests import BatchRequest
from streamvid.loader.mix import MixPart
from streamvid.loader.setup import Given, Setup, ring_bytes, set_up
from streamvid.loader.view.view import ViewOptions
from streamvid.plan import Cursor, World
from streamvid.storage import MAX_RANGE_BYTES, near_spans
from streamvid.video.picture import Pixels

if TYPE_CHECKING:
    import pyarrow as pa

Int64Array = npt.NDArray[np.int64]

MAX_SCANNED_SHARDS = 4096
"""Of a dataset with more shards, so many, spread evenly, stand for all."""

_WASTE = ("crop_fraction", "upscale")
_SCANNED = ("clip_bytes", "window_num_frames", "clip_width", "clip_height", *_WASTE)
_NUM_PLACES, _SAMPLES_A_PLACE = 5, 64
_CLOSED_GOP = 8  # frames decoded before the first wanted one where nothing was looked at: half a native key interval


def open_run(dataset: str | Path | Dataset, num_ranks: int, rank: int = 0, **arguments: Any) -> Setup:
    """What a VideoLoader of these arguments would be made of, nothing of it running. Raises as VideoLoader does."""
    from streamvid.loader.loader import VideoLoader

    known = inspect.signature(VideoLoader).parameters
    # Arguments that are one field together in Given go into it by their own names.
    view = ViewOptions(**{name: arguments.pop(name) for name in ViewOptions.__slots__ if name in arguments})
    given = {field.name: known[field.name].default for field in fields(Given) if field.name in known}
    own = {"view": view, "world": World(rank, num_ranks), "num_workers": 0, **arguments}
    return set_up(Given(**(given | own | {"dataset": dataset})))


# ------------------------------------------------------------------------------------------- deliveries: exact


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """One batch that a rank will be handed.

    step: of the epoch, from 0.   keys: of its samples, in the batch's order.   member_bytes: of their clips in the
    tars; read_bytes: what of them is read, a window's packets or the whole clip.   num_requests: that an object store
    would see for them.   num_frames_decoded: packets that go through a decoder, by sample.
    """

    epoch: int
    step: int
    bucket_id: str
    keys: tuple[str, ...]
    member_bytes: int
    read_bytes: int
    num_requests: int
    num_repeats: int
    num_frames_decoded: tuple[int, ...]


def planned_batches(setup: Setup, num_epochs: int = 1) -> Iterator[PlannedBatch]:
    """Every batch of the run's rank, in order, as the loader will hand them out where no sample is bad.

    Reads index rows and packet tables, and no clip. Raises IntegrityError, StorageError or DatasetError.
    """
    rows, start = IndexRows(), setup.selection.plan(Cursor())
    for request in setup.selection.requests(start, num_epochs):
        yield _batch(request, rows)


def _batch(request: BatchRequest, rows: IndexRows) -> PlannedBatch:
    plan, num_done = request.position
    found = [_part(rows, request, number) for number in range(len(request.samples))]
    spans: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for sample, (row, part) in zip(request.samples, found, strict=True):
        if part is None:
            continue
        first = row["clip_offset"] + part.first_byte
        place = (sample.part.number, sample.shard_info.path)
        spans.setdefault(place, []).append((first, first + part.num_bytes))
    return PlannedBatch(
        epoch=plan.cursor.epoch,
        step=num_done - 1,
        bucket_id=request.bucket.id,
        keys=tuple(row["key"] for row, _ in found),
        member_bytes=sum(row["clip_bytes"] for row, _ in found),
        read_bytes=sum(part.num_bytes for _, part in found if part is not None),
        num_requests=sum(_num_requests(of_shard) for of_shard in spans.values()),
        num_repeats=sum(sample.is_repeat for sample in request.samples),
        num_frames_decoded=tuple(_num_decoded(row, part) for row, part in found),
    )


def _part(rows: IndexRows, request: BatchRequest, number: int) -> tuple[dict[str, Any], ClipPart | None]:
    """(index row, what is read of its clip; None where it has none)."""
    sample = request.samples[number]
    row = rows.row(sample)
    if request.bucket.is_text:
        check_row(row, sample.shard_info, 0)
        return row, None
    finish_row(row, sample, request.bucket.num_frames)
    return row, clip_part(row, rows.packets(sample, row), row["view"].pick)


def _num_requests(spans: Sequence[tuple[int, int]]) -> int:
    longer = sum((end - start - 1) // MAX_RANGE_BYTES for start, end in spans)
    return len(near_spans(spans)) + longer


def _num_decoded(row: Mapping[str, Any], part: ClipPart | None) -> int:
    if part is None:
        return 0
    if part.window is not None:
        return len(part.window.packets)
    there = int(row["window_num_frames"])
    return there if part.numbers is None else min(there, part.numbers[-1] + 1)


# --------------------------------------------------------------------------------------------- what the index says


@dataclass(frozen=True)
class BucketScan:
    """What the index says of a bucket's samples that pass the filter.

    num_samples: looked at, of num_all.   first: int64 (shards,), where each shard's samples begin in clip_bytes, int64;
    None where not every shard was looked at.   crop, upscale: their means over samples, None where not recorded.
    frames: stored for each sample on the mean.   pixels: of a stored frame on the mean.
    """

    bucket: Bucket
    num_samples: int
    num_all: int
    mean_bytes: float
    frames: float
    pixels: float
    crop: float | None
    max_crop: float | None
    upscale: float | None
    first: Int64Array | None
    clip_bytes: Int64Array | None

    def sizes(self, shards: Int64Array, places: Int64Array) -> Int64Array:
        """Bytes of samples' clips, int64: their mean for all where not every shard was looked at."""
        if self.first is None or self.clip_bytes is None:
            return np.full(len(shards), round(self.mean_bytes), np.int64)
        found: Int64Array = self.clip_bytes[self.first[shards] + places]
        return found

    def to_json(self) -> dict[str, Any]:
        """Means, and the waste that is known. frames_unused_share: of stored frames, those that one pass leaves out."""
        return {
            "clip_bytes_mean": self.mean_bytes,
            "clip_frames_mean": self.frames,
            "frames_unused_share": 1 - self.bucket.num_frames / self.frames if self.frames else 0.0,
            "crop_mean": self.crop,
            "crop_max": self.max_crop,
            "upscale_mean": self.upscale,
            "samples_looked_at": self.num_samples,
        }


def scan_buckets(setup: Setup, max_shards: int = MAX_SCANNED_SHARDS) -> dict[str, BucketScan]:
    """Bucket id → what the index says of its samples; a row group of the samples index is read for each shard.

    Of more than `max_shards` shards so many are looked at, spread evenly, one at least in each bucket.
    """
    (part,) = setup.mix.parts
    total = sum(len(counts) for counts in part.counts.values())
    stride = max(1, -(-total // max_shards))
    present = part.dataset.samples_schema.names
    columns = [name for name in _SCANNED if name in present]
    items = [(name, number) for name in part.counts for number in range(0, len(part.counts[name]), stride)]
    tables: dict[str, list[dict[str, Any]]] = {}

    def job(item: tuple[str, int], stop: threading.Event) -> tuple[str, dict[str, Any]]:
        return item[0], _scan_shard(part, *item, columns)

    # What a local disk has at hand takes a processor, and threads would only share it.
    is_local, never = part.dataset.store.is_local, threading.Event()
    found = (job(item, never) for item in items) if is_local else in_parallel(job, items, DEFAULT_WORKERS)
    for name, values in found:
        tables.setdefault(name, []).append(values)
    return {name: _scanned(part, setup.mix.buckets[name], found, stride == 1) for name, found in tables.items()}


def _scan_shard(part: MixPart, bucket_id: str, number: int, columns: Sequence[str]) -> dict[str, Any]:
    wanted = list(dict.fromkeys([*columns, *(part.filter.columns if part.filter else ())]))
    table = part.dataset.samples(part.shard_info(bucket_id, number), wanted)
    if part.filter is not None:
        table = table.take(part.filter.matching(table))
    return {name: _numbers(table.column(name).combine_chunks()) for name in columns}


def _numbers(column: pa.Array) -> npt.NDArray[Any]:
    """A column's numbers, NaN where one is missing."""
    import pyarrow.compute as pc

    return numbers_of(pc.fill_null(column, float("nan")) if column.null_count else column)


def _scanned(part: MixPart, bucket: Bucket, found: Sequence[dict[str, Any]], is_whole: bool) -> BucketScan:
    values = {name: np.concatenate([table[name] for table in found]) for name in found[0]}
    num_bytes, counts = values["clip_bytes"].astype(np.int64), part.counts[bucket.id]
    waste = {name: values[name][np.isfinite(values[name])] if name in values else np.empty(0) for name in _WASTE}
    mean = {name: float(known.mean()) if known.size else None for name, known in waste.items()}
    return BucketScan(
        bucket=bucket,
        num_samples=len(num_bytes),
        num_all=int(counts.sum()),
        mean_bytes=float(num_bytes.mean()),
        frames=float(values["window_num_frames"].mean()),
        pixels=float((values["clip_width"].astype(np.float64) * values["clip_height"]).mean()),
        crop=mean["crop_fraction"],
        max_crop=float(waste["crop_fraction"].max()) if waste["crop_fraction"].size else None,
        upscale=mean["upscale"],
        first=np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64) if is_whole else None,
        clip_bytes=num_bytes if is_whole else None,
    )


# ----------------------------------------------------------------------------------------- reads: from some deliveries


@dataclass(frozen=True, slots=True)
class ReadSample:
    """What some deliveries of a rank read, which stand for all of them.

    read_share: bytes read for each byte of the clips.   requests_a_sample: that an object store would see.
    decoded: bucket id → frames that go through a decoder for each sample.
    """

    num_samples: int
    read_share: float
    requests_a_sample: float
    decoded: Mapping[str, float]


def sample_reads(setup: Setup) -> ReadSample:
    """Look at some batches of the run's rank at five places of its first epoch, their index rows and packet tables."""
    rows, found = IndexRows(), dict[int, PlannedBatch]()
    for place in range(_NUM_PLACES):
        plan, seen = setup.selection.plan(setup.selection.at_share(0, place / _NUM_PLACES)), 0
        for request in setup.selection.requests(plan, 1):
            step = plan.cursor.step + request.position[1]
            if step not in found:  # of a short epoch all of it is looked at, each batch once
                found[step] = _batch(request, rows)
            seen += len(request.samples)
            if seen >= _SAMPLES_A_PLACE:
                break
    return _read_sample(list(found.values()))


def _read_sample(found: Sequence[PlannedBatch]) -> ReadSample:
    num_samples = sum(len(batch.keys) for batch in found)
    decoded: dict[str, list[int]] = {}
    for batch in found:
        decoded.setdefault(batch.bucket_id, []).extend(batch.num_frames_decoded)
    return ReadSample(
        num_samples,
        sum(batch.read_bytes for batch in found) / max(1, sum(batch.member_bytes for batch in found)),
        sum(batch.num_requests for batch in found) / max(1, num_samples),
        {name: sum(counts) / len(counts) for name, counts in decoded.items()},
    )


def decode_ms(scan: BucketScan, reads: ReadSample, costs: HostCosts) -> float:
    """CPU milliseconds a sample of a bucket: as the cost table names it, else by the pixels (an estimate)."""
    bucket, named = scan.bucket, costs.decode_ms or {}
    for key in (bucket.id, bucket.size_at_frames):
        if key in named:
            return named[key]
    globs = {named[key] for key in named if key != "*" and is_named_by(bucket, key)}
    if len(globs) > 1:
        raise ConfigError(f"cost table decode_ms: several globs name bucket {bucket.id}; add {bucket.id!r} itself")
    if globs or "*" in named:
        return globs.pop() if globs else named["*"]
    frames = reads.decoded.get(bucket.id, min(scan.frames, bucket.num_frames + _CLOSED_GOP))
    decoding = frames * scan.pixels * costs.decode_ns_per_pixel
    return (decoding + bucket.num_pixels * costs.make_ns_per_pixel) / 1e6 + costs.sample_ms


def shards_of_a_rank(setup: Setup) -> float:
    """How many shards a rank reads from in an epoch on the mean, were each sample's rank drawn: an estimate."""
    others = 1 - 1 / setup.world.num_ranks
    return sum(float((1 - others ** counts.astype(np.float64)).sum()) for counts in setup.mix.parts[0].counts.values())


# -------------------------------------------------------------------------------------------------------------- memory


def memory_of(
    buckets: Sequence[Bucket],
    batch_sizes: Mapping[str, int],
    max_clip_bytes: int,
    costs: HostCosts,
    prefetch_bytes: int,
    num_ranks: int,
) -> dict[str, Any]:
    """Bytes of host memory: the ring by the loader's own arithmetic, workers as the cost table estimates them.

    max_clip_bytes: of the largest clip, 0 where nobody knows it.
    """

    def ring(pixels: Pixels) -> int:
        return ring_bytes(memory_options(prefetch_bytes, max_clip_bytes, batch_sizes, buckets, pixels), max_clip_bytes)

    is_even = all(bucket.height % 2 == 0 and bucket.width % 2 == 0 for bucket in buckets)
    workers, on_node = costs.num_workers * costs.worker_bytes, min(num_ranks, costs.ranks_per_node)
    return {
        "ring_bytes": ring("rgb24"),
        "ring_bytes_yuv420p": ring("yuv420p") if is_even else None,
        "workers_bytes": workers,
        "per_rank_bytes": ring("rgb24") + workers,
        "ranks_per_node": on_node,
        "per_node_bytes": (ring("rgb24") + workers) * on_node,
    }
