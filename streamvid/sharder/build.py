"""Shard building. Each shard is an idempotent unit of work, and the plan determines its name (SHARD-1)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamvid.dataset.index import AudioEntry
from streamvid.dataset.manifest import offsets_path
from streamvid.dataset.packets import encode_packets
from streamvid.dataset.tar import scan_tar, tar_index, write_shard
from streamvid.errors import DecodeError, ProbeError, StorageError
from streamvid.sharder.encode import restore_clips
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.planning.assign import PlannedSample
from streamvid.sharder.planning.plan import PlannedShard, ShardPlan
from streamvid.sharder.probing import Progress
from streamvid.sharder.source.extra_media import MediaFile
from streamvid.sharder.source.media import is_remote
from streamvid.sharder.source.records import Record
from streamvid.sharder.windows import Clip, copied
from streamvid.sharder.work.clips import ClipFolder
from streamvid.sharder.work.pool import Crash, Pool
from streamvid.sharder.work.staging import Staging, put_note
from streamvid.sharder.work.tasks import Remaining
from streamvid.storage import LocalStore, StorageOptions, Store, open_store
from streamvid.storage.local import write_reason

if TYPE_CHECKING:
    from streamvid.video.audio.index import AudioIndex
    from streamvid.video.clip_index import ClipIndex


_REQUESTS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class ShardUnit:
    """Unit of work that builds one shard.

    folder: the plan's folder inside the staging folder.
    has_audio: False to omit the clips' audio.
    """

    dest: str
    storage: StorageOptions
    folder: Path
    clips: ClipFolder
    shard: PlannedShard
    has_audio: bool


def input_sha256(shard: PlannedShard) -> str:
    """Return the checksum of everything that determines a shard's bytes."""
    digest = hashlib.sha256()
    for sample in shard.samples:
        # The path of a file is omitted, because it may differ on another machine.
        files = [
            (file.source, clip.num_bytes, extension, clip.sha256 or file.version)
            for extension, file, clip in sample.members
        ]
        digest.update(json.dumps([sample.key, sample.record.caption, sample_json(sample), *files]).encode())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Marker:
    """Record of a finished shard: checksums and sizes of the written files.

    member_offsets: for each sample, the offsets of its clip and conditioning inputs in the tar.
    member_sha256: for each sample, the checksums of the same files in the same order.
    audio: for each sample, the fields of its AudioEntry, or None if the clip has no audio.
    """

    input_sha256: str
    num_bytes: int
    sha256: str
    offsets_num_bytes: int
    offsets_sha256: str
    packets_sha256: str
    member_offsets: list[list[int]]
    member_sha256: list[list[str]]
    audio: list[dict[str, Any] | None]


def sample_json(sample: PlannedSample) -> str:
    """Return the content of a sample's `.json` member, which is meant for other tools.

    Sizes are in pixels, durations in seconds.
    """
    value = {
        "columns": sample.record.columns,
        "duration_seconds": sample.clip.duration_seconds,
        "fps": sample.clip.fps,
        "height": sample.clip.height,
        "key": sample.key,
        "num_frames": sample.clip.num_frames,
        "record_key": sample.record_key,
        "source": sample.record.source,
        "width": sample.clip.width,
    }
    if sample.media:
        value["media"] = [
            {"extension": medium.extension, "name": medium.column.name, "source": medium.file.source}
            for medium in sample.media
        ]
    if sample.record.captions:
        value["captions"] = [{"text": text, "weight": weight} for text, weight in sample.record.captions]
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)


def marker_path(staging: Path, path: str) -> Path:
    """Return the path of a shard's marker."""
    return staging / f"{Path(path).stem}.json"


def packets_path(staging: Path, path: str) -> Path:
    """Return the path of a finished shard's packet table, which is kept until sealing."""
    return staging / f"{Path(path).stem}.packets"


def load_marker(staging: Path, path: str) -> Marker:
    """Load a shard's marker.

    Raises OSError if the file cannot be read, and ValueError or TypeError if it is invalid.
    """
    return Marker(**json.loads(marker_path(staging, path).read_bytes()))


def is_finished(shard: PlannedShard, folder: Path, sizes: Mapping[str, int]) -> bool:
    """Return True if a shard is finished and was built from its current input. sizes: result of `shard_sizes`."""
    try:
        marker = load_marker(folder, shard.path)
        packets = packets_path(folder, shard.path).read_bytes()
    except (OSError, ValueError, TypeError):
        return False
    there = (sizes.get(shard.path), sizes.get(offsets_path(shard.path)))
    is_whole = there == (marker.num_bytes, marker.offsets_num_bytes)
    is_whole = is_whole and hashlib.sha256(packets).hexdigest() == marker.packets_sha256
    return is_whole and marker.input_sha256 == input_sha256(shard)


def shard_sizes(store: Store, shards: Sequence[PlannedShard]) -> dict[str, int]:
    """Map the path of each tar and offsets file of these shards to its size in bytes. Missing files are omitted."""
    if all(shard.build_id == 0 for shard in shards):  # the store contains no other dataset
        return {state.path: state.num_bytes for state in store.files("shards")}
    paths = [path for shard in shards for path in (shard.path, offsets_path(shard.path))]
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as threads:
        sizes = zip(paths, threads.map(store.size, paths), strict=True)
        return {path: num_bytes for path, num_bytes in sizes if num_bytes is not None}


def build_all(plan: ShardPlan, staging: Staging, options: ShardOptions, progress: Progress) -> None:
    """Build every unfinished shard of this task. Raises the same errors as `build_shard`.

    Encoded and cut clips are removed when no unfinished shard of this task needs them, unless other tasks may need
    them.
    """
    folder = staging.plan_folder(plan.sha256)
    shards = [shard for shard in staging.share.of(plan.shards) if shard.samples]
    staging.fetch_markers(folder, [marker_path(folder, shard.path).stem for shard in shards])
    sizes = shard_sizes(staging.store, shards)
    todo = [shard for shard in shards if not is_finished(shard, folder, sizes)]
    done = len(shards) - len(todo)
    clips = staging.clips(options)
    _check_space(todo, staging, options)
    if options.makes_clips:
        restore_clips((sample for shard in todo for sample in shard.samples), options, staging, progress)
    uses = Counter(name for shard in todo for name in _made_clips(shard))
    opens_stores = not staging.store.is_local or any(map(is_remote, _paths(todo)))
    progress("build", done, len(shards))
    dest, storage = staging.store.url, options.worker_storage
    with Pool(f"{__name__}:build_shard", options.work.workers, staging.lock_fd, opens_stores=opens_stores) as pool:

        def unit(number: int) -> ShardUnit:
            shard = replace(todo[number], samples=tuple(todo[number].samples))
            return ShardUnit(dest, storage, folder, clips, shard, options.clips.audio != "drop")

        for number, answer in pool.run(len(todo), unit):
            if isinstance(answer, Crash):
                raise StorageError(f"cannot write {todo[number].path}: the worker process died twice ({answer}){_HINT}")
            done += 1
            if options.makes_clips and staging.share.is_whole:
                _drop_clips(todo[number], clips, uses)
            progress("build", done, len(shards))


_HINT = (
    "; see the worker's messages on stderr, then run the same command again. Signal 9 (SIGKILL) usually means that the "
    "system ran out of memory; in that case, free up memory first"
)


def remaining_shards(plan: ShardPlan, staging: Staging) -> Remaining | None:
    """Return how many shards the tasks have not built yet, or None if all are built."""
    folder = staging.plan_folder(plan.sha256)
    notes = staging.notes_of(folder)
    num_missing = sum(marker_path(folder, shard.path).name not in notes for shard in plan.shards if shard.samples)
    return Remaining("build", num_missing, len(plan.shards)) if num_missing else None


def _check_space(todo: Sequence[PlannedShard], staging: Staging, options: ShardOptions) -> None:
    """Raise StorageError if the remaining shards need more disk space than is available."""
    sizes = sorted((shard.clip_bytes for shard in todo), reverse=True)
    keeps_shards = isinstance(staging.store, LocalStore) and not options.makes_clips
    # Encoded and cut clips are removed as soon as their shards are finished, and so are uploaded shards.
    needed = sum(sizes if keeps_shards else sizes[: options.work.workers])
    disk = shutil.disk_usage(staging.folder)
    if disk.total and needed > disk.free:
        raise StorageError(
            f"{staging.folder}: the shards need {needed / 1e6:,.1f} MB of disk space, but only "
            f"{disk.free / 1e6:,.1f} MB is available; free up some space, then run the same command again to resume"
        )


def _drop_clips(shard: PlannedShard, clips: ClipFolder, uses: Counter[str]) -> None:
    """Remove the clips that were made for a finished shard, except clips that another shard still needs."""
    uses.subtract(_made_clips(shard))
    for name in set(_made_clips(shard)):
        if not uses[name]:
            clips.drop(name)


def _made_clips(shard: PlannedShard) -> Iterator[str]:
    """Yield the names of a shard's clips that were encoded or cut. All other clips are the user's own files."""
    return (clip.path for sample in shard.samples for _, _, clip in sample.members if clip.is_made)


def _paths(shards: Iterable[PlannedShard]) -> Iterator[str]:
    """Yield the path or URL of every file that is stored unchanged."""
    members = (member for shard in shards for sample in shard.samples for member in sample.members)
    return (clip.path for _, _, clip in members if not clip.is_made)


def build_shard(unit: ShardUnit) -> None:
    """Write a shard's offsets, tar, packets and marker, in this order. Each file is written atomically.

    Runs in a worker.

    Raises SourceError if a file has changed since it was probed, and StorageError if writing fails or an encoded or
    cut clip is damaged.
    """
    folder, shard = unit.folder, unit.shard
    temporary = folder / f"{Path(shard.path).stem}.{os.getpid()}.tmp"
    temporary_offsets = temporary.with_suffix(".idx.tmp")
    store = open_store(unit.dest, unit.storage)
    clips = _Clips()
    try:
        with temporary.open("w+b") as file:
            write_shard(file, _members(unit, clips))
            file.flush()
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            members = list(scan_tar(file))
            num_bytes = file.seek(0, os.SEEK_END)
        offsets = tar_index(members)
        temporary_offsets.write_bytes(offsets)
        store.put(offsets_path(shard.path), temporary_offsets)
        store.put(shard.path, temporary)
        packets = clips.packets()
        put_note(store, packets_path(folder, shard.path), packets)
        place = {member.name: member.offset for member in members}
        member_offsets = [[place[f"{s.key}.{extension}"] for extension, _, _ in s.members] for s in shard.samples]
        marker = Marker(
            input_sha256=input_sha256(shard),
            num_bytes=num_bytes,
            sha256=digest,
            offsets_num_bytes=len(offsets),
            offsets_sha256=hashlib.sha256(offsets).hexdigest(),
            packets_sha256=hashlib.sha256(packets).hexdigest(),
            member_offsets=member_offsets,
            member_sha256=clips.sha256,
            audio=clips.audio,
        )
        put_note(store, marker_path(folder, shard.path), json.dumps(asdict(marker)).encode())
    except OSError as error:
        raise StorageError(
            f"cannot write a temporary file for {shard.path} in {folder}: {write_reason(error)}"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
        temporary_offsets.unlink(missing_ok=True)


@dataclass
class _Clips:
    """Checksums, packets and audio of the clips in a shard, collected while the shard is written."""

    sha256: list[list[str]] = field(default_factory=list)
    indexes: list[ClipIndex | None] = field(default_factory=list)
    audio: list[dict[str, Any] | None] = field(default_factory=list)
    audio_indexes: list[AudioIndex | None] = field(default_factory=list)

    def packets(self) -> bytes:
        """Return the packet table of the shard, or b"" if none of its clips has a packet index."""
        has_index = any(self.indexes) or any(self.audio_indexes)
        return encode_packets(self.indexes, self.audio_indexes) if has_index else b""


def _members(unit: ShardUnit, clips: _Clips) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield (key, members) for each sample. `members` maps the extension of each tar member to its contents."""
    from streamvid.video.clip_index import index_clip
    from streamvid.video.limits import STORED_LIMITS

    for sample in unit.shard.samples:
        text, is_text = (sample.record.caption or "").encode(), sample.bucket.is_text
        members = {extension: text if is_text else _read(clip, file, unit) for extension, file, clip in sample.members}
        clips.sha256.append([hashlib.sha256(data).hexdigest() for data in members.values()])
        data, bucket = members[sample.clip.extension], sample.bucket
        clips.indexes.append(index_clip(data, STORED_LIMITS) if bucket.has_pictures else None)
        entry, packets = _audio_of(sample, data) if unit.has_audio and not is_text else (None, None)
        clips.audio.append(None if entry is None else asdict(entry))
        # The windows of a video without an index are decoded through its container, and so is their audio.
        clips.audio_indexes.append(packets if bucket.is_audio or clips.indexes[-1] is not None else None)
        yield sample.key, {**members, "txt": text, "json": sample_json(sample).encode()}


def _audio_of(sample: PlannedSample, data: bytes) -> tuple[AudioEntry | None, AudioIndex | None]:
    """Return the index entry and the packet index for a clip's audio.

    Both are None if the clip has no audio. If the audio cannot be decoded, its entry contains no measured facts, so
    that the loader reports the problem (BAD-1).
    """
    from streamvid.video.limits import STORED_LIMITS
    from streamvid.video.survey.audio_facts import index_with_facts
    from streamvid.video.survey.audio_span import read_audio_span

    has_audio = sample.clip.has_audio if sample.clip.is_made else sample.probe.has_audio
    span = read_audio_span(data, STORED_LIMITS) if has_audio else None
    if span is None:
        return None, None
    try:
        index, facts = index_with_facts(data, STORED_LIMITS)
    except (ProbeError, DecodeError):
        facts = index = None
    if facts is None:
        return AudioEntry(span.codec, span.sample_rate, span.num_channels), None
    digits = {"start_seconds": 6, "gap_seconds": 6, "silence_share": 4, "clipping_share": 6, "loudness_lufs": 1}
    values = {name: getattr(facts, name) for name in digits}
    # Decoders of lossy codecs compute with floating-point numbers, whose last digits differ between processors.
    if index is not None and sample.bucket.is_audio:
        index = index.from_first_sample()
    rounded = {name: None if value is None else round(value, digits[name]) for name, value in values.items()}
    return copied(AudioEntry, facts, **rounded), index


def _read(clip: Clip, file: Record | MediaFile, unit: ShardUnit) -> bytes:
    """Return the bytes of a clip.

    Raises SourceError if its source has changed, and StorageError if an encoded or cut clip is damaged.
    """
    if clip.sha256:
        return unit.clips.read(clip.path, file.source, clip.sha256)
    return file.media(unit.storage).read()
