"""Sealing of a dataset. The index is built from markers of finished shards. The manifest is written last (SHARD-2)."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from streamvid.buckets.frames import FrameRate
from streamvid.dataset.captions import captions_to_json
from streamvid.dataset.index import (
    MAX_SHARDS_PER_FILE,
    AudioEntry,
    ClipEntry,
    MediaItem,
    RowGroup,
    SampleRow,
    SourceEntry,
    TablePlace,
    encode_rejections,
    encode_samples,
    encode_shards,
)
from streamvid.dataset.manifest import (
    Counts,
    FileInfo,
    Fingerprints,
    Manifest,
    ManifestFiles,
    NativeClips,
    ShardInfo,
    manifest_to_json,
    offsets_path,
)
from streamvid.dataset.sealed_json import MANIFEST
from streamvid.dataset.tar import energon_files
from streamvid.dataset.versions.records import InputRows, encode_records
from streamvid.errors import StorageError
from streamvid.sharder.build import Marker, load_marker, marker_path, packets_path, shard_sizes
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.planning.assign import PlannedSample
from streamvid.sharder.planning.base import Base
from streamvid.sharder.planning.plan import PlannedShard, ShardPlan
from streamvid.sharder.probing import Progress
from streamvid.sharder.sealing.facts import media_facts, quality_of
from streamvid.sharder.sealing.index_files import NO_FILES, IndexFiles
from streamvid.sharder.sealing.next_version import publish_next
from streamvid.sharder.windows import copied
from streamvid.sharder.work.staging import Staging
from streamvid.storage import LocalStore, Store


def planned_paths(plan: ShardPlan) -> list[str]:
    """Return the paths of all tars and offsets files in the plan."""
    return [path for shard in plan.shards for path in (shard.path, offsets_path(shard.path))]


def seal(
    plan: ShardPlan,
    known: InputRows,
    staging: Staging,
    options: ShardOptions,
    progress: Progress,
    base: Base | None = None,
) -> None:
    """Write the index, the files for other tools, and the manifest. Then remove the staging folder.

    known: the input rows to record.
    base: for an append, the dataset whose next version is published. No version is published if there is nothing to
        record.
    """
    folder = staging.plan_folder(plan.sha256)
    plan = replace(plan, shards=tuple(shard for shard in plan.shards if shard.samples))
    store, temporary = staging.store, LocalStore(folder)
    names = planned_paths(plan)
    if not store.is_local:
        _check_shards(plan, store, folder)
    total = 2 * -(-len(plan.shards) // MAX_SHARDS_PER_FILE) + 9
    done = 0

    def put(path: str, data: bytes) -> None:
        nonlocal done
        names.append(path)
        staging.name_files(folder, names)
        temporary.put("sealing.tmp", data)
        store.put(path, temporary.path("sealing.tmp"))
        done += 1
        progress("seal", done, total)

    progress("seal", done, total)
    index = IndexFiles(put, NO_FILES if base is None else base.manifest.files)
    shards, files = _write_index(plan, known, folder, index, options, base)
    if base is not None and (len(known) or shards):
        publish_next(base, plan, files, index, options.source.media_columns)
    elif base is None:
        others = energon_files(shards)
        for path, data in others.items():
            put(path, data)
        files = replace(files, other=tuple(FileInfo.of(path, data) for path, data in others.items()))
        put(MANIFEST, manifest_to_json(_manifest(plan, options, shards, files)))
    staging.remove()
    progress("seal", total, total)


def _write_index(
    plan: ShardPlan,
    known: InputRows,
    folder: Path,
    index: IndexFiles,
    options: ShardOptions,
    base: Base | None,
) -> tuple[list[ShardInfo], ManifestFiles]:
    """Write the index for the planned shards. Return the rows for the shard table and the list of index files."""
    form = _SamplesForm.of(plan, options, base)
    shards, samples, packets = _write_samples(plan, folder, index, form)
    rejections = encode_rejections([(row.row, row.source, row.reason, row.kind) for row in plan.rejections])
    records = encode_records(known, index.number("records") // 2) if len(known) or base is None else []
    for file, data in records:
        index.put(file.path, data)
    return shards, ManifestFiles(
        shards=(index.add("shards", encode_shards(shards)),) if shards or base is None else (),
        samples=tuple(samples),
        rejections=(index.add("rejections", rejections),) if plan.rejections or base is None else (),
        packets=tuple(packets),
        records=tuple(file for file, _ in records),
    )


@dataclass(frozen=True)
class _SamplesForm:
    """Structure of the sample files, which is the same for the whole dataset.

    user_types: maps each user column to its type.
    left_out: columns that are stored in other files.
    media: names of the conditioning inputs.
    has_packets: True if there is a packets file for each sample file.
    """

    user_types: Mapping[str, str]
    left_out: Collection[str]
    media: Sequence[str]
    has_packets: bool

    @staticmethod
    def of(plan: ShardPlan, options: ShardOptions, base: Base | None) -> _SamplesForm:
        media = [medium.name for medium in options.source.media_columns]
        if base is None:
            return _SamplesForm(plan.user_types, (), media, has_packets=True)
        files = base.manifest.files
        has_packets = bool(files.packets) or not files.samples
        return _SamplesForm(base.stored_types, base.added_types(plan.user_types), media, has_packets)


def _write_samples(
    plan: ShardPlan, folder: Path, index: IndexFiles, form: _SamplesForm
) -> tuple[list[ShardInfo], list[FileInfo], list[FileInfo]]:
    """Write the sample files and packets files. Each file covers at most MAX_SHARDS_PER_FILE shards.

    Return the rows for the shard table, the sample files and the packets files.
    """
    shards: list[ShardInfo] = []
    files: list[FileInfo] = []
    packet_files: list[FileInfo] = []
    for start in range(0, len(plan.shards), MAX_SHARDS_PER_FILE):
        part = plan.shards[start : start + MAX_SHARDS_PER_FILE]
        markers = [_marker(shard, folder) for shard in part]
        places: list[TablePlace | None] = [None] * len(part)
        if form.has_packets:
            packets, places = _join_packets(part, folder)
            packet_files.append(index.add("packets", packets, "arrows"))
        groups = [
            RowGroup(
                shard.bucket.id, shard.number, shard.split, list(_rows(shard.samples, marker, form.left_out)), place
            )
            for shard, marker, place in zip(part, markers, places, strict=True)
        ]
        files.append(index.add("samples", encode_samples(groups, form.user_types, form.media)))
        shards += [
            _shard_info(shard, marker, files[-1].path, row_group)
            for row_group, (shard, marker) in enumerate(zip(part, markers, strict=True))
        ]
    return shards, files, packet_files


def _join_packets(shards: Sequence[PlannedShard], folder: Path) -> tuple[bytes, list[TablePlace | None]]:
    """Return the concatenated packet tables of shards, and a list with the location of each shard's table.

    The location is None for a shard without packets."""
    tables = [_packets(shard, folder) for shard in shards]
    places: list[TablePlace | None] = []
    offset = 0
    for table in tables:
        places.append(TablePlace(offset, len(table), hashlib.sha256(table).digest()) if table else None)
        offset += len(table)
    return b"".join(tables), places


def _check_shards(plan: ShardPlan, store: Store, folder: Path) -> None:
    """Raise StorageError if a file of a finished shard has been removed from the store or its size has changed."""
    sizes = shard_sizes(store, plan.shards)
    for shard in plan.shards:
        marker = _marker(shard, folder)
        sizes_noted = {shard.path: marker.num_bytes, offsets_path(shard.path): marker.offsets_num_bytes}
        for path, num_bytes in sizes_noted.items():
            if sizes.get(path) != num_bytes:
                raise StorageError(
                    f"{store.url}: {path} was {num_bytes} bytes long when it was written, but "
                    f"{f'is now {sizes[path]} bytes long' if path in sizes else 'no longer exists'}; run the same "
                    "command again"
                )


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}; run the same command again") from error
    except (ValueError, TypeError) as error:
        raise StorageError(f"{path} is damaged ({error}); run the same command again") from error


def _marker(shard: PlannedShard, folder: Path) -> Marker:
    with _named(marker_path(folder, shard.path)):
        return load_marker(folder, shard.path)


def _packets(shard: PlannedShard, folder: Path) -> bytes:
    with _named(packets_path(folder, shard.path)):
        return packets_path(folder, shard.path).read_bytes()


def _rows(samples: Sequence[PlannedSample], marker: Marker, left_out: Collection[str]) -> Iterator[SampleRow]:
    noted = zip(samples, marker.member_offsets, marker.member_sha256, marker.audio, strict=True)
    for index, (sample, offsets, digests, audio) in enumerate(noted):
        record, probe, clip = sample.record, sample.probe, sample.clip
        yield SampleRow(
            key=sample.key,
            record_key=sample.record_key,
            index=index,
            text=record.caption,
            clip=copied(ClipEntry, clip, offset=offsets[0], sha256=bytes.fromhex(digests[0])),
            source=SourceEntry(
                name=record.source,
                width=probe.width,
                height=probe.height,
                num_bytes=record.num_bytes,
                window_start=sample.window.start,
                window_num_frames=sample.window.num_frames,
                crop_fraction=sample.cropped_share,
                upscale=sample.upscale,
            ),
            columns={name: value for name, value in record.columns.items() if name not in left_out},
            captions=captions_to_json(record.captions) if record.captions else None,
            media=_media_items(sample, offsets[1:], digests[1:]),
            audio=None if audio is None else AudioEntry(**audio),
        )


def _media_items(sample: PlannedSample, offsets: list[int], digests: list[str]) -> dict[str, list[MediaItem]]:
    found: dict[str, list[MediaItem]] = {}
    for medium, offset, digest in zip(sample.media, offsets, digests, strict=True):
        item = copied(
            MediaItem,
            medium.clip,
            source=medium.file.source,
            extension=medium.extension,
            offset=offset,
            sha256=bytes.fromhex(digest),
        )
        found.setdefault(medium.column.name, []).append(item)
    return found


def _shard_info(shard: PlannedShard, marker: Marker, index_path: str, row_group: int) -> ShardInfo:
    return ShardInfo(
        bucket_id=shard.bucket.id,
        number=shard.number,
        build_id=shard.build_id,
        split=shard.split,
        num_samples=len(shard.samples),
        num_bytes=marker.num_bytes,
        sha256=marker.sha256,
        offsets_num_bytes=marker.offsets_num_bytes,
        offsets_sha256=marker.offsets_sha256,
        max_clip_bytes=max(sample.num_bytes for sample in shard.samples),
        index_path=index_path,
        index_row_group=row_group,
    )


def _psnr_y(plan: ShardPlan) -> Iterator[tuple[str, float | None]]:
    """Yield (bucket id, PSNR-Y in decibels) for each sample."""
    return ((bucket.id, psnr_y) for bucket, psnr_y in plan.samples.tuples("bucket", "clip.psnr_y"))


def _manifest(plan: ShardPlan, options: ShardOptions, shards: Sequence[ShardInfo], files: ManifestFiles) -> Manifest:
    # Buckets without samples are omitted, so that a warm-up over all buckets uses only shapes that occur.
    buckets = tuple({shard.bucket.id: shard.bucket for shard in plan.shards}.values())
    # Readers use the rate at which native clips were encoded.
    frame_rate = options.config.frame_rate if options.rate is None else FrameRate("resample", options.rate)
    media = media_facts(plan, options.source.media_columns)
    return Manifest(
        buckets=buckets,
        clips=options.clips.kind,
        counts=Counts(
            records=plan.num_records,
            samples=plan.num_samples,
            rejections=len(plan.rejections),
            shards=len(shards),
            num_bytes=sum(shard.num_bytes for shard in shards),
        ),
        files=files,
        fingerprints=Fingerprints.of(buckets, shards, files.samples, plan.draws, frame_rate, media),
        build=plan.build,
        frame_rate=frame_rate,
        model=options.config.model,
        draws=tuple(plan.draws),
        media=media,
        native=NativeClips(options.encoding_json(), quality_of(_psnr_y(plan))) if options.clips.is_native else None,
    )
