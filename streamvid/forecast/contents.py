"""Contents of a sealed dataset: buckets, splits, columns, and rejections by kind. `streamvid stats` prints them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from streamvid.dataset.filter.filter import Filter, count_matches, filter_of_view
from streamvid.dataset.manifest import FORMAT_VERSION, NativeClips
from streamvid.dataset.reader import Dataset
from streamvid.sharder.rejections import OF_CLIP, OF_FILE, RejectedKind, by_kind

_WITH_CAPTIONS = ("text_sha256", "captions")
"""Columns that are added along with `text` when captions are annotated."""
_HAS_AUDIO = "has_audio"
MAX_COUNTED_SHARDS = 4096
"""Maximum number of shards for which samples with audio are counted. Counting takes one small read per shard."""


@dataclass(frozen=True, slots=True)
class BucketContents:
    """Samples in one bucket of one split.

    shape: (frames, height, width).
    """

    bucket_id: str
    shape: tuple[int, int, int]
    split: str
    num_samples: int
    num_shards: int
    num_bytes: int

    @property
    def pixels_per_sample(self) -> int:
        """Number of pixels per delivered sample, over all frames."""
        frames, height, width = self.shape
        return frames * height * width

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON-serializable values."""
        return {
            "bucket": self.bucket_id,
            "shape": list(self.shape),
            "split": self.split,
            "samples": self.num_samples,
            "shards": self.num_shards,
            "bytes": self.num_bytes,
        }


@dataclass(frozen=True, slots=True)
class AddedColumns:
    """User columns that one run of `streamvid annotate` added, and their total file size in bytes."""

    columns: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """One rejected input row."""

    row: int
    source: str
    reason: str
    kind: str


_SPLITTING = ("max_clip_seconds", "time_columns", "curation", "cut")
"""Build options that can turn one file into several clips."""


@dataclass(frozen=True, slots=True)
class DatasetContents:
    """Contents of a dataset.

    where: condition of the view, or None. Only samples that match the condition are counted.
    num_records: number of input rows.
    rejections: rejected input rows, except rows whose files became samples in a later version.
    stored_clips: (number of clips that are stored in several buckets, number of samples that contain these clips).
    with_audio: number of samples with audio; None if these samples were not counted, because the dataset has no
        pictures, has more than MAX_COUNTED_SHARDS shards, or does not record which samples have audio.
    columns: columns that the user supplied.
    """

    url: str
    version: int
    where: str | None
    clips: str
    plan_fingerprint: str
    content_fingerprint: str
    native: NativeClips | None
    num_records: int
    stored_clips: tuple[int, int]
    buckets: tuple[BucketContents, ...]
    with_audio: int | None
    columns: tuple[str, ...]
    annotations: tuple[AddedColumns, ...]
    rejections: tuple[RejectedRow, ...]
    rejected_by_kind: tuple[RejectedKind, ...]

    @property
    def num_samples(self) -> int:
        """Number of samples in all buckets and splits."""
        return sum(bucket.num_samples for bucket in self.buckets)

    @property
    def num_shards(self) -> int:
        """Number of tars."""
        return sum(bucket.num_shards for bucket in self.buckets)

    @property
    def num_bytes(self) -> int:
        """Total size of all tars in bytes."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def num_windows(self) -> int:
        """Number of windows cut from input rows, including rejected windows.

        The number exceeds `num_records` if sources were split into several windows.
        """
        clips, stored = self.stored_clips
        return self.num_samples - stored + clips + len(self.rejections)

    def to_json(self) -> dict[str, Any]:
        """Return the contents as JSON-serializable values."""
        return {
            "dataset": self.url,
            "format_version": FORMAT_VERSION,
            "clips": self.clips,
            "plan_fingerprint": self.plan_fingerprint,
            "content_fingerprint": self.content_fingerprint,
            "native": None if self.native is None else asdict(self.native),
            "records": self.num_records,
            "samples": self.num_samples,
            "version": self.version,
            "where": self.where,
            "stored_clips": list(self.stored_clips),
            "with_audio": self.with_audio,
            "shards": self.num_shards,
            "bytes": self.num_bytes,
            "buckets": [bucket.to_json() for bucket in self.buckets],
            "columns": list(self.columns),
            "annotations": [{"columns": list(one.columns), "bytes": one.num_bytes} for one in self.annotations],
            "rejections": [asdict(one) for one in self.rejections],
            "rejected_by_kind": [kind.to_json() for kind in self.rejected_by_kind],
        }


def contents_of(dataset: Dataset) -> DatasetContents:
    """Return the contents of a dataset.

    The function reads the shard table, the rejections, and one column of the samples index. It reads more of the index
    for a view, or if later versions may contain samples from rejected files.
    """
    manifest, shards = dataset.manifest, dataset.shards
    chosen = filter_of_view(dataset)
    counts = shards.num_samples if chosen is None else count_matches(dataset, shards, chosen)
    places = [(rows, bucket_id, split) for split in shards.splits for bucket_id, rows in shards.select(split).items()]
    rejections = tuple(_rejections(dataset))
    return DatasetContents(
        url=dataset.url,
        version=manifest.version,
        where=dataset.where,
        clips=manifest.clips,
        plan_fingerprint=manifest.fingerprints.plan,
        content_fingerprint=manifest.fingerprints.content,
        native=manifest.native,
        num_records=manifest.counts.records,
        stored_clips=dataset.stored_clips,
        with_audio=_with_audio(dataset),
        buckets=tuple(
            BucketContents(
                bucket_id=bucket_id,
                shape=manifest.bucket(bucket_id).shape,
                split=split,
                num_samples=int(counts[rows].sum()),
                num_shards=len(rows),
                num_bytes=int(shards.num_bytes[rows].sum()),
            )
            for rows, bucket_id, split in sorted(places, key=lambda place: int(place[0][0]))
        ),
        columns=dataset.user_columns,
        annotations=tuple(
            AddedColumns(
                tuple(name.removeprefix("user.") for name in group.columns if name not in _WITH_CAPTIONS),
                sum(file.num_bytes for file in group.known_files),
            )
            for group in manifest.columns
        ),
        rejections=rejections,
        rejected_by_kind=by_kind((one.kind, one.row, one.source, one.reason) for one in rejections),
    )


def _rejections(dataset: Dataset) -> Iterator[RejectedRow]:
    """Yield the rejected rows.

    Rows are omitted if their file had no samples when it was rejected, but has samples in this version.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    rows = [RejectedRow(**row) for row in dataset.rejections_table().to_pylist()]
    options = dataset.manifest.build.get("options", {})
    is_split = not options.keys().isdisjoint(_SPLITTING)
    kinds = OF_FILE if is_split else OF_FILE | OF_CLIP
    asked = {row.source for row in rows if row.kind in kinds} if dataset.manifest.version > 1 else set()
    added: set[str] = set()
    if asked:
        names = pa.array(sorted(asked), pa.string())
        for shard in dataset.shards:
            sources = dataset.samples(shard, ["source"]).column("source")
            added.update(sources.filter(pc.is_in(sources, value_set=names)).to_pylist())
    yield from (row for row in rows if row.kind not in kinds or row.source not in added)


def _with_audio(dataset: Dataset) -> int | None:
    if dataset.manifest.clips == "text" or len(dataset.shards) > MAX_COUNTED_SHARDS:
        return None
    if _HAS_AUDIO not in dataset.samples_schema.names:
        return None
    # A condition would name the user's column, if there is one of this name; a canonical text names that of the index.
    view = filter_of_view(dataset)
    found = Filter(_HAS_AUDIO, (_HAS_AUDIO,))
    if view is not None:
        found = Filter(f"({view.text}) and {_HAS_AUDIO}", tuple(sorted({*view.columns, _HAS_AUDIO})))
    return int(count_matches(dataset, dataset.shards, found).sum())
