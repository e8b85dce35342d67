"""Building one shard: an idempotent unit of work with a name that the plan fixed (SHARD-1)."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamvid.dataset.manifest import offsets_path
from streamvid.dataset.packets import encode_packets
from streamvid.dataset.tar import Member, scan_tar, tar_index, write_shard
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


def shard_task(shard: PlannedShard, staging: Staging, folder: Path, storage: StorageOptions) -> dict[str, Any]:
    """All that a worker needs to build a shard, as JSON. `folder`: the plan's own in the staging folder."""
    samples = [_sample_task(sample) for sample in shard.samples]
    # Not where a file lies: another machine may have it elsewhere.
    facts = [_placeless(sample) for sample in samples]
    return {
        "dest": staging.store.url,
        "storage": asdict(storage),
        "staging": str(folder),
        "path": shard.path,
        "samples": samples,
        "input_sha256": hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest(),
    }


def _placeless(task: Mapping[str, Any]) -> dict[str, Any]:
    value = {name: value for name, value in task.items() if name not in ("path", "media")}
    return value | ({"media": [_placeless(medium) for medium in task["media"]]} if task.get("media") else {})


def _sample_task(sample: PlannedSample) -> dict[str, Any]:
    media = [{**_file_task(medium.clip, medium.file), "extension": medium.extension} for medium in sample.media]
    return {
        "key": sample.key,
        **_file_task(sample.clip, sample.record),
        "text": sample.record.caption or "",
        "json": sample_json(sample),
        **({"media": media} if media else {}),
    }


def _file_task(clip: Clip, file: Record | MediaFile) -> dict[str, Any]:
    """What is stored of a file, and what proves it."""
    proof = {"sha256": clip.sha256} if clip.sha256 else {"version": file.version}
    facts = {"path": clip.path, "source": file.source, "num_bytes": clip.num_bytes, "extension": clip.extension}
    return {**facts, **proof}


def sample_json(sample: PlannedSample) -> str:
    """The `.json` member: what foreign readers get to know of a sample. Sizes in pixels, times in seconds."""
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
    """Where it stands that a shard is finished, and what is in it."""
    return staging / f"{Path(path).stem}.json"


def packets_path(staging: Path, path: str) -> Path:
    """Where a finished shard's packet table waits for the sealing."""
    return staging / f"{Path(path).stem}.packets"


def read_marker(task: dict[str, Any], sizes: Mapping[str, int]) -> dict[str, Any] | None:
    """The marker of a shard that is finished and was built of the same input; None where it is to be built.

    sizes: bytes of what is in the store, by path.
    """
    try:
        marker = json.loads(marker_path(Path(task["staging"]), task["path"]).read_bytes())
        there = (sizes.get(task["path"]), sizes.get(offsets_path(task["path"])))
        is_whole = there == (marker["num_bytes"], marker["offsets_num_bytes"])
        packets = packets_path(Path(task["staging"]), task["path"]).read_bytes()
        is_whole = is_whole and hashlib.sha256(packets).hexdigest() == marker["packets_sha256"]
        return dict(marker) if is_whole and marker["input_sha256"] == task["input_sha256"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def shard_sizes(store: Store) -> dict[str, int]:
    """Bytes of every tar and its offsets that are in the store, by path."""
    return {state.path: state.num_bytes for state in store.files("shards")}


def build_all(plan: ShardPlan, staging: Staging, options: ShardOptions, progress: Progress) -> None:
    """Build every shard that is not finished yet. Raises what `build_shard` does.

    Encoded clips are removed as soon as no unfinished shard needs them.
    """
    folder = staging.plan_folder(plan.sha256)

    def task(number: int) -> dict[str, Any]:
        return shard_task(plan.shards[number], staging, folder, options.worker_storage)

    staging.fetch_markers(folder, [marker_path(folder, shard.path).stem for shard in plan.shards])
    sizes = shard_sizes(staging.store)
    todo = [number for number in range(len(plan.shards)) if read_marker(task(number), sizes) is None]
    done = len(plan.shards) - len(todo)
    if options.clips.is_native:
        waiting = [sample for number in todo for sample in plan.shards[number].samples]
        restore_clips(waiting, options, staging, progress)
    uses = Counter(path for number in todo for path in _clip_paths(plan.shards[number]))
    progress("build", done, len(plan.shards))
    with Pool(
        f"{__name__}:build_shard", min(options.work.workers, max(1, len(todo))), WorkerLimits(), staging.lock_fd
    ) as pool:
        for number, answer in pool.run(len(todo), lambda index: task(todo[index])):
            if isinstance(answer, Crash):
                raise StorageError(
                    f"cannot write {plan.shards[todo[number]].path}: its worker was ended by {answer}, twice. SIGKILL "
                    "(9) mostly means that memory ran out: run the same command again with fewer workers"
                )
            done += 1
            if options.clips.is_native:
                _drop_clips(plan.shards[todo[number]], uses)
            progress("build", done, len(plan.shards))


def _drop_clips(shard: PlannedShard, uses: Counter[str]) -> None:
    """Remove the encoded clips of a shard that is finished, but for those that another one still needs."""
    uses.subtract(_clip_paths(shard))
    for path in set(_clip_paths(shard)):
        if not uses[path]:
            Path(path).unlink(missing_ok=True)


def _clip_paths(shard: PlannedShard) -> Iterator[str]:
    for sample in shard.samples:
        yield sample.clip.path
        yield from (medium.clip.path for medium in sample.media)


def build_shard(task: dict[str, Any]) -> None:
    """Write a shard, its offsets and then its marker, each whole or not at all. Runs in a worker.

    Raises SourceError where a file is no longer the one that was probed, StorageError where writing fails or an encoded
    clip is damaged.
    """
    folder, path = Path(task["staging"]), str(task["path"])
    temporary = folder / f"{Path(path).stem}.{os.getpid()}.tmp"
    temporary_offsets = temporary.with_suffix(".idx.tmp")
    storage = StorageOptions(**task["storage"])
    store = open_store(task["dest"], storage)
    clips = _Clips()
    try:
        with temporary.open("w+b") as file:
            write_shard(file, _samples(task["samples"], storage, clips))
            file.flush()
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            members = list(scan_tar(file))
            num_bytes = file.seek(0, os.SEEK_END)
        offsets = tar_index(members)
        temporary_offsets.write_bytes(offsets)
        store.put(offsets_path(path), temporary_offsets)
        store.put(path, temporary)
        packets = encode_packets(clips.indexes) if any(clips.indexes) else b""
        put_note(store, packets_path(folder, path), packets)
        marker = {
            "input_sha256": task["input_sha256"],
            "num_bytes": num_bytes,
            "sha256": digest,
            "offsets_num_bytes": len(offsets),
            "offsets_sha256": hashlib.sha256(offsets).hexdigest(),
            "clip_offsets": _clip_offsets(members, task["samples"]),
            "clip_sha256": clips.sha256,
            "media_offsets": _media_offsets(members, task["samples"]),
            "media_sha256": clips.media_sha256,
            "packets_sha256": hashlib.sha256(packets).hexdigest(),
        }
        put_note(store, marker_path(folder, path), json.dumps(marker).encode())
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
        temporary_offsets.unlink(missing_ok=True)


@dataclass
class _Clips:
    """What is noted of each clip while its shard is written."""

    sha256: list[str] = field(default_factory=list)
    media_sha256: list[list[str]] = field(default_factory=list)
    indexes: list[ClipIndex | None] = field(default_factory=list)


def _samples(
    samples: list[dict[str, Any]], storage: StorageOptions, clips: _Clips
) -> Iterator[tuple[str, dict[str, bytes]]]:
    from streamvid.video.clip_index import index_clip
    from streamvid.video.limits import STORED_LIMITS

    for sample in samples:
        is_text = sample["extension"] == TEXT_EXTENSION
        data = sample["text"].encode() if is_text else _data(sample, storage)
        media = {medium["extension"]: _data(medium, storage) for medium in sample.get("media", ())}
        clips.sha256.append(hashlib.sha256(data).hexdigest())
        clips.media_sha256.append([hashlib.sha256(medium).hexdigest() for medium in media.values()])
        clips.indexes.append(None if is_text else index_clip(data, STORED_LIMITS))
        own = {sample["extension"]: data, "txt": sample["text"].encode(), "json": sample["json"].encode()}
        yield sample["key"], {**media, **own}


def _data(file: Mapping[str, Any], storage: StorageOptions) -> bytes:
    """What is to be stored of a file."""
    if "sha256" in file:
        return read_encoded(Path(file["path"]), file["source"], file["sha256"])
    facts = {name: file[name] for name in ("path", "source", "num_bytes", "version")}
    return Media(**facts, storage=storage).read()


def _clip_offsets(members: list[Member], samples: list[dict[str, Any]]) -> list[int]:
    offsets = {member.name: member.offset for member in members}
    return [offsets[f"{sample['key']}.{sample['extension']}"] for sample in samples]


def _media_offsets(members: list[Member], samples: list[dict[str, Any]]) -> list[list[int]]:
    offsets = {member.name: member.offset for member in members}
    return [
        [offsets[f"{sample['key']}.{medium['extension']}"] for medium in sample.get("media", ())] for sample in samples
    ]
