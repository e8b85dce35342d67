"""Building one shard: an idempotent unit of work with a name that the plan fixed (SHARD-1)."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamvid.dataset.manifest import offsets_path
from streamvid.dataset.packets import encode_packets
from streamvid.dataset.tar import scan_tar, tar_index, write_shard
from streamvid.errors import StorageError
from streamvid.sharder.assign import PlannedSample
from streamvid.sharder.encode import read_encoded, restore_clips
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.plan import PlannedShard, ShardPlan
from streamvid.sharder.probing import Progress
from streamvid.sharder.source.extra_media import MediaFile
from streamvid.sharder.source.media import Media
from streamvid.sharder.source.records import Record
from streamvid.sharder.windows import TEXT_EXTENSION, Clip
from streamvid.sharder.work.pool import Crash, Pool, WorkerLimits
from streamvid.sharder.work.staging import Staging, put_note
from streamvid.storage import StorageOptions, Store, open_store

if TYPE_CHECKING:
    from streamvid.video.clip_index import ClipIndex


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file to store, and the proof that it is still the one that was planned.

    sha256: of an encoded clip.   version: of a source file that is copied. The other one is empty.
    """

    path: str
    source: str
    num_bytes: int
    extension: str
    sha256: str = ""
    version: str = ""

    @staticmethod
    def of(clip: Clip, file: Record | MediaFile) -> StoredFile:
        """Return what is stored for a file."""
        version = "" if clip.sha256 else file.version
        return StoredFile(clip.path, file.source, clip.num_bytes, clip.extension, clip.sha256, version)

    def read(self, storage: StorageOptions) -> bytes:
        """Read the bytes to store. Raises SourceError for a changed file, StorageError for a damaged encoded clip."""
        if self.sha256:
            return read_encoded(Path(self.path), self.source, self.sha256)
        return Media(self.path, self.source, self.num_bytes, self.version, storage).read()


@dataclass(frozen=True, slots=True)
class StoredSample:
    """The members of one sample: its clip, its conditioning inputs, its caption and its `.json`."""

    key: str
    clip: StoredFile
    text: str
    json: str
    media: tuple[StoredFile, ...] = ()

    @staticmethod
    def of(sample: PlannedSample) -> StoredSample:
        """Return the members of a planned sample."""
        media = (
            replace(StoredFile.of(medium.clip, medium.file), extension=medium.extension) for medium in sample.media
        )
        clip = StoredFile.of(sample.clip, sample.record)
        return StoredSample(sample.key, clip, sample.record.caption or "", sample_json(sample), tuple(media))

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> StoredSample:
        """Return the sample that `asdict` gave the fields of."""
        media = tuple(StoredFile(**medium) for medium in value["media"])
        return StoredSample(value["key"], StoredFile(**value["clip"]), value["text"], value["json"], media)

    @property
    def clip_name(self) -> str:
        """Name of the clip's member in the tar."""
        return f"{self.key}.{self.clip.extension}"

    @property
    def media_names(self) -> list[str]:
        """Names of the members of conditioning inputs."""
        return [f"{self.key}.{medium.extension}" for medium in self.media]


@dataclass(frozen=True, slots=True)
class ShardTask:
    """All that a worker needs to build a shard. staging: the plan's own folder."""

    dest: str
    storage: StorageOptions
    staging: str
    path: str
    samples: tuple[StoredSample, ...]

    @staticmethod
    def of(shard: PlannedShard, staging: Staging, folder: Path, storage: StorageOptions) -> ShardTask:
        """Return the task of a planned shard."""
        samples = tuple(StoredSample.of(sample) for sample in shard.samples)
        return ShardTask(staging.store.url, storage, str(folder), shard.path, samples)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> ShardTask:
        """Return the task that `asdict` gave the fields of."""
        samples = tuple(StoredSample.from_json(sample) for sample in value["samples"])
        storage = StorageOptions(**value["storage"])
        return ShardTask(value["dest"], storage, value["staging"], value["path"], samples)

    @property
    def input_sha256(self) -> str:
        """Checksum of everything that decides the shard's bytes."""
        digest = hashlib.sha256()
        for sample in self.samples:
            # Not where a file is: another machine may have it elsewhere.
            placeless = [astuple(replace(file, path="")) for file in (sample.clip, *sample.media)]
            digest.update(json.dumps([sample.key, sample.text, sample.json, *placeless]).encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Marker:
    """Record of a finished shard: checksums and sizes of what was written, and the place of each clip in its tar."""

    input_sha256: str
    num_bytes: int
    sha256: str
    offsets_num_bytes: int
    offsets_sha256: str
    packets_sha256: str
    clip_offsets: list[int]
    clip_sha256: list[str]
    media_offsets: list[list[int]]
    media_sha256: list[list[str]]


def sample_json(sample: PlannedSample) -> str:
    """Return the `.json` member, which tells foreign readers about a sample. Sizes are pixels, times seconds."""
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
    """Return the place of a shard's marker."""
    return staging / f"{Path(path).stem}.json"


def packets_path(staging: Path, path: str) -> Path:
    """Return the place where a finished shard's packet table waits for sealing."""
    return staging / f"{Path(path).stem}.packets"


def load_marker(staging: Path, path: str) -> Marker:
    """Load a shard's marker. Raises OSError, and ValueError or TypeError for a file that is not a marker."""
    return Marker(**json.loads(marker_path(staging, path).read_bytes()))


def is_finished(task: ShardTask, sizes: Mapping[str, int]) -> bool:
    """Check that a shard is finished and was built from the same input. sizes: bytes in the store, by path."""
    staging = Path(task.staging)
    try:
        marker = load_marker(staging, task.path)
        packets = packets_path(staging, task.path).read_bytes()
    except (OSError, ValueError, TypeError):
        return False
    there = (sizes.get(task.path), sizes.get(offsets_path(task.path)))
    is_whole = there == (marker.num_bytes, marker.offsets_num_bytes)
    is_whole = is_whole and hashlib.sha256(packets).hexdigest() == marker.packets_sha256
    return is_whole and marker.input_sha256 == task.input_sha256


def shard_sizes(store: Store) -> dict[str, int]:
    """Return the bytes of every tar and of its offsets in the store, by path."""
    return {state.path: state.num_bytes for state in store.files("shards")}


def build_all(plan: ShardPlan, staging: Staging, options: ShardOptions, progress: Progress) -> None:
    """Build every shard that is not finished yet. Raises what `build_shard` does.

    Encoded clips are removed as soon as no unfinished shard needs them.
    """
    folder, shards = staging.plan_folder(plan.sha256), plan.shards

    def task(shard: PlannedShard) -> ShardTask:
        return ShardTask.of(shard, staging, folder, options.worker_storage)

    staging.fetch_markers(folder, [marker_path(folder, shard.path).stem for shard in shards])
    sizes = shard_sizes(staging.store)
    todo = [shard for shard in shards if not is_finished(task(shard), sizes)]
    done = len(shards) - len(todo)
    if options.clips.is_native:
        restore_clips([sample for shard in todo for sample in shard.samples], options, staging, progress)
    uses = Counter(path for shard in todo for path in _clip_paths(shard))
    progress("build", done, len(shards))
    num_workers = min(options.work.workers, max(1, len(todo)))
    with Pool(f"{__name__}:build_shard", num_workers, WorkerLimits(), staging.lock_fd) as pool:
        for number, answer in pool.run(len(todo), lambda index: asdict(task(todo[index]))):
            if isinstance(answer, Crash):
                raise StorageError(
                    f"cannot write {todo[number].path}: its worker was ended by {answer}, twice. SIGKILL (9) mostly "
                    "means that memory ran out: run the same command again with fewer workers"
                )
            done += 1
            if options.clips.is_native:
                _drop_clips(todo[number], uses)
            progress("build", done, len(shards))


def _drop_clips(shard: PlannedShard, uses: Counter[str]) -> None:
    """Remove the encoded clips of a finished shard, apart from those that another shard still needs."""
    uses.subtract(_clip_paths(shard))
    for path in set(_clip_paths(shard)):
        if not uses[path]:
            Path(path).unlink(missing_ok=True)


def _clip_paths(shard: PlannedShard) -> Iterator[str]:
    for sample in shard.samples:
        yield sample.clip.path
        yield from (medium.clip.path for medium in sample.media)


def build_shard(value: dict[str, Any]) -> None:
    """Write a shard, its offsets and then its marker, each whole or not at all. Runs in a worker.

    Raises SourceError for a file that changed since it was probed, StorageError if writing fails or an encoded clip is
    damaged.
    """
    task = ShardTask.from_json(value)
    folder = Path(task.staging)
    temporary = folder / f"{Path(task.path).stem}.{os.getpid()}.tmp"
    temporary_offsets = temporary.with_suffix(".idx.tmp")
    store = open_store(task.dest, task.storage)
    clips = _Clips()
    try:
        with temporary.open("w+b") as file:
            write_shard(file, _members(task, clips))
            file.flush()
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            members = list(scan_tar(file))
            num_bytes = file.seek(0, os.SEEK_END)
        offsets = tar_index(members)
        temporary_offsets.write_bytes(offsets)
        store.put(offsets_path(task.path), temporary_offsets)
        store.put(task.path, temporary)
        packets = encode_packets(clips.indexes) if any(clips.indexes) else b""
        put_note(store, packets_path(folder, task.path), packets)
        place = {member.name: member.offset for member in members}
        marker = Marker(
            input_sha256=task.input_sha256,
            num_bytes=num_bytes,
            sha256=digest,
            offsets_num_bytes=len(offsets),
            offsets_sha256=hashlib.sha256(offsets).hexdigest(),
            packets_sha256=hashlib.sha256(packets).hexdigest(),
            clip_offsets=[place[sample.clip_name] for sample in task.samples],
            clip_sha256=clips.sha256,
            media_offsets=[[place[name] for name in sample.media_names] for sample in task.samples],
            media_sha256=clips.media_sha256,
        )
        put_note(store, marker_path(folder, task.path), json.dumps(asdict(marker)).encode())
    except OSError as error:
        raise StorageError(f"cannot write {task.path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
        temporary_offsets.unlink(missing_ok=True)


@dataclass
class _Clips:
    """Checksums and packets of the clips, gathered while their shard is written."""

    sha256: list[str] = field(default_factory=list)
    media_sha256: list[list[str]] = field(default_factory=list)
    indexes: list[ClipIndex | None] = field(default_factory=list)


def _members(task: ShardTask, clips: _Clips) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield the key and the members of each sample, by extension."""
    from streamvid.video.clip_index import index_clip
    from streamvid.video.limits import STORED_LIMITS

    for sample in task.samples:
        is_text = sample.clip.extension == TEXT_EXTENSION
        data = sample.text.encode() if is_text else sample.clip.read(task.storage)
        media = {medium.extension: medium.read(task.storage) for medium in sample.media}
        clips.sha256.append(hashlib.sha256(data).hexdigest())
        clips.media_sha256.append([hashlib.sha256(medium).hexdigest() for medium in media.values()])
        clips.indexes.append(None if is_text else index_clip(data, STORED_LIMITS))
        own = {sample.clip.extension: data, "txt": sample.text.encode(), "json": sample.json.encode()}
        yield sample.key, {**media, **own}
