"""Sealing of a dataset. The index is built from markers of finished shards. The manifest is written last (SHARD-2)."""

from __future__ import annotations

import hashlib
import statistics
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from streamvid.buckets.frames import FrameRate
from streamvid.dataset.captions import captions_to_json
from streamvid.dataset.index import (
    MAX_SHARDS_PER_FILE,
    ClipEntry,
    MediaItem,
    RowGroup,
    SampleRow,
    SourceEntry,
    TablePlace,
    encode_rejections,
    encode_samples,
    encode_shards,
    named_by_content,
)
from streamvid.dataset.manifest import (
    Counts,
    FileInfo,
    Fingerprints,
    Manifest,
    ManifestFiles,
    MediaInfo,
    NativeClips,
    ShardInfo,
    manifest_to_json,
    offsets_path,
)
from streamvid.dataset.sealed_json import MANIFEST
from streamvid.dataset.tar import energon_files
from streamvid.errors import StorageError
from streamvid.sharder.build import Marker, load_marker, marker_path, packets_path, shard_sizes
from streamvid.sharder.media_columns import MediaColumn
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.planning.assign import PlannedSample
from streamvid.sharder.planning.plan import PlannedShard, ShardPlan
from streamvid.sharder.probing import Progress
from streamvid.sharder.windows import copied
from streamvid.sharder.work.staging import Staging
from streamvid.storage import LocalStore, Store


def planned_paths(plan: ShardPlan) -> list[str]:
    """Return the paths of all tars and offsets files in the plan."""
    return [path for shard in plan.shards for path in (shard.path, offsets_path(shard.path))]


def seal(plan: ShardPlan, staging: Staging, options: ShardOptions, progress: Progress) -> None:
    """Write the index, the files for other readers and manifest.json, in this order. Then remove the staging folder."""
    folder = staging.plan_folder(plan.sha256)
    plan = replace(plan, shards=tuple(shard for shard in plan.shards if shard.samples))
    store, temporary = staging.store, LocalStore(folder)
    names = planned_paths(plan)
    if not store.is_local:
        _check_shards(plan, store, folder)
    total = 2 * -(-len(plan.shards) // MAX_SHARDS_PER_FILE) + 7
    done = 0

    def put(path: str, data: bytes) -> None:
        nonlocal done
        names.append(path)
        staging.name_files(folder, names)
        temporary.put("sealing.tmp", data)
        store.put(path, temporary.path("sealing.tmp"))
        done += 1
        progress("seal", done, total)

    def put_named(kind: str, number: int, data: bytes, extension: str = "parquet") -> FileInfo:
        file = named_by_content(kind, number, data, extension)
        put(file.path, data)
        return file

    progress("seal", done, total)
    shards, samples, packets = _write_samples(plan, folder, put_named, options.source.media_columns)
    rejections = encode_rejections([(row.row, row.source, row.reason, row.kind) for row in plan.rejections])
    shards_file, rejections_file = put_named("shards", 0, encode_shards(shards)), put_named("rejections", 0, rejections)
    others = energon_files(shards)
    for path, data in others.items():
        put(path, data)
    files = ManifestFiles(
        shards=(shards_file,),
        samples=tuple(samples),
        rejections=(rejections_file,),
        packets=tuple(packets),
        other=tuple(FileInfo.of(path, data) for path, data in others.items()),
    )
    put(MANIFEST, manifest_to_json(_manifest(plan, options, shards, files)))
    staging.remove()
    progress("seal", total, total)


def _write_samples(
    plan: ShardPlan, folder: Path, put_named: Callable[..., FileInfo], media: Sequence[MediaColumn]
) -> tuple[list[ShardInfo], list[FileInfo], list[FileInfo]]:
    """Write the samples and packets files, each for at most MAX_SHARDS_PER_FILE shards.

    Return the rows of the shard table, the samples files and the packets files.
    """
    shards: list[ShardInfo] = []
    files: list[FileInfo] = []
    packet_files: list[FileInfo] = []
    for start in range(0, len(plan.shards), MAX_SHARDS_PER_FILE):
        part = plan.shards[start : start + MAX_SHARDS_PER_FILE]
        markers = [_marker(shard, folder) for shard in part]
        packets, places = _join_packets(part, folder)
        groups = [
            RowGroup(shard.bucket.id, shard.number, shard.split, list(_rows(shard.samples, marker)), place)
            for shard, marker, place in zip(part, markers, places, strict=True)
        ]
        data = encode_samples(groups, plan.user_types, [medium.name for medium in media])
        packet_files.append(put_named("packets", len(files), packets, "arrows"))
        files.append(put_named("samples", len(files), data))
        shards += [
            _shard_info(shard, marker, files[-1].path, row_group)
            for row_group, (shard, marker) in enumerate(zip(part, markers, strict=True))
        ]
    return shards, files, packet_files


def _join_packets(shards: Sequence[PlannedShard], folder: Path) -> tuple[bytes, list[TablePlace | None]]:
    """Return the joined packet tables of shards, and the location of each table (None if a shard has no packets)."""
    tables = [_packets(shard, folder) for shard in shards]
    places: list[TablePlace | None] = []
    offset = 0
    for table in tables:
        places.append(TablePlace(offset, len(table), hashlib.sha256(table).digest()) if table else None)
        offset += len(table)
    return b"".join(tables), places


def _check_shards(plan: ShardPlan, store: Store, folder: Path) -> None:
    """Raise StorageError if a finished shard has been removed from the store or its size has changed."""
    sizes = shard_sizes(store)
    for shard in plan.shards:
        marker = _marker(shard, folder)
        sizes_noted = {shard.path: marker.num_bytes, offsets_path(shard.path): marker.offsets_num_bytes}
        for path, num_bytes in sizes_noted.items():
            if sizes.get(path) != num_bytes:
                raise StorageError(
                    f"{store.url}: {path} was written with {num_bytes} bytes, but "
                    f"{f'now has {sizes[path]}' if path in sizes else 'no longer exists'}; run the same command again"
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


def _rows(samples: Sequence[PlannedSample], marker: Marker) -> Iterator[SampleRow]:
    noted = zip(samples, marker.member_offsets, marker.member_sha256, strict=True)
    for index, (sample, offsets, digests) in enumerate(noted):
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
            columns=record.columns,
            captions=captions_to_json(record.captions) if record.captions else None,
            media=_media_items(sample, offsets[1:], digests[1:]),
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
        build_id=0,
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
        native=NativeClips(options.encoding_json(), _quality(plan)) if options.clips.is_native else None,
    )


def media_facts(plan: ShardPlan, columns: Sequence[MediaColumn]) -> dict[str, MediaInfo]:
    """Return the description of each conditioning input for the manifest; see dataset/README.md."""
    found: dict[str, MediaInfo] = {}
    for column in columns:
        counts, stills, is_list = [0], [True], False
        for (media,) in plan.samples.tuples("media"):
            mine = [medium for medium in media if medium.column == column]
            counts.append(len(mine))
            stills += [medium.is_still for medium in mine]
            is_list = is_list or any(medium.file.item is not None for medium in mine)
        found[column.name] = MediaInfo(
            column=column.column,
            is_still=all(stills),
            is_mask=column.is_mask,
            is_optional=column.is_optional,
            is_list=is_list,
            max_items=max(1, *counts),
        )
    return found


def _quality(plan: ShardPlan) -> dict[str, object]:
    """Return PSNR-Y statistics of native clips in decibels, overall and per bucket."""
    found: dict[str, array[float]] = {}
    for bucket, psnr_y in plan.samples.tuples("bucket", "clip.psnr_y"):
        found.setdefault(bucket.id, array("d")).append(psnr_y or 0.0)
    of_all = [value for values in found.values() for value in values]
    buckets = {bucket_id: _spread(values) for bucket_id, values in found.items()}
    return {"psnr_y": _spread(of_all), "psnr_y_by_bucket": buckets}


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "min": ordered[0],
        "p5": ordered[(len(ordered) - 1) // 20],
        "median": round(statistics.median(ordered), 4),
        "mean": round(statistics.fmean(ordered), 4),
    }
