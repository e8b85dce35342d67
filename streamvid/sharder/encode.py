"""Encoding native clips, in workers that a file may kill: each waits in the staging folder until its shard is cut.

Shards are cut by bytes, so that all clips must be encoded before the first is written: the staging folder holds them
all for a while. What was found of each is in a journal, so that no run encodes a clip twice (SHARD-1).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamvid.buckets import Bucket
from streamvid.errors import DecodeError, ProbeError, SourceError, StorageError
from streamvid.host.journal import Journal, Key
from streamvid.sharder.assign import Assignment, PlannedSample
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.probing import MAX_REASON_CHARS, Progress, file_state
from streamvid.sharder.rejections import Reason
from streamvid.sharder.source.extra_media import MediaFile
from streamvid.sharder.source.media import Media
from streamvid.sharder.source.records import Record, Rejection
from streamvid.sharder.source.spool import SpooledFile
from streamvid.sharder.windows import Clip, Timing, Window
from streamvid.sharder.work.pool import Crash, Pool, WorkerLimits, timed_out
from streamvid.sharder.work.staging import Staging
from streamvid.sharder.work.worker import clock_paused
from streamvid.storage import LocalStore, StorageOptions
from streamvid.video.encode.profiles import Encoding
from streamvid.video.encode.timeline import Timeline, make_timeline

if TYPE_CHECKING:
    from streamvid.video.container import Source
    from streamvid.video.encode.clip import EncodedClip

ENCODE_VERSION = 1


def encode_all(assignment: Assignment, options: ShardOptions, staging: Staging, progress: Progress) -> Assignment:
    """The samples with their clips, encoded where they are not yet; those that cannot be are rejections."""
    wanted = {job.key: job for sample in assignment.samples for job in jobs_of(sample)}
    staging.clips.mkdir(exist_ok=True)
    _remove_all_but({_name(key) for key in wanted}, staging.clips)
    journal = Journal(staging.encode_journal, journal_header(options))
    todo = [key for key in wanted if not _holds(journal.findings.get(key), options)]
    done = len(wanted) - len(todo)
    progress("encode", done, len(wanted))
    with journal:
        for key, finding in _run([wanted[key] for key in todo], options, staging):
            journal.add(key, finding)
            done += 1
            progress("encode", done, len(wanted))
    samples: list[PlannedSample] = []
    rejections = list(assignment.rejections)
    for sample in assignment.samples:
        jobs = jobs_of(sample)
        clips = [_clip(journal.findings[job.key], staging.clips / _name(job.key), job, options) for job in jobs]
        reasons = [(job.label, clip) for job, clip in zip(jobs, clips, strict=True) if isinstance(clip, Reason)]
        if reasons:
            label, found = reasons[0]
            reason = f"{sample.window_name}{label}{found}"[:MAX_REASON_CHARS]
            kind = "medium" if label else found.kind
            rejections.append(Rejection(sample.record.row, sample.record.source, reason, kind))
        else:
            samples.append(_with_clips(sample, [clip for clip in clips if isinstance(clip, Clip)]))
    return replace(assignment, samples=tuple(samples), rejections=tuple(rejections))


def restore_clips(
    samples: Sequence[PlannedSample], options: ShardOptions, staging: Staging, progress: Progress
) -> None:
    """Encode again what these samples need and an earlier run removed; remove what none of them needs.

    Raises StorageError where that gives other bytes than before.
    """
    wanted = {job.key: job for sample in samples for job in jobs_of(sample)}
    staging.clips.mkdir(exist_ok=True)
    _remove_all_but({_name(key) for key in wanted}, staging.clips)
    store = LocalStore(staging.clips)
    missing = [job for key, job in wanted.items() if store.size(_name(key)) != job.clip.num_bytes]
    for done, (key, finding) in enumerate(_run(missing, options, staging)):
        if finding.get("sha256") != wanted[key].clip.sha256:
            raise StorageError(
                f"{wanted[key].file.source} was encoded before, and again gives other bytes; delete {staging.folder} "
                "and run the same command again"
            )
        progress("encode", len(wanted) - len(missing) + done + 1, len(wanted))


@dataclass(frozen=True, slots=True)
class Job:
    """One clip to encode: of a sample's own file, or of one of its further media.

    clip: what is known of it. follows: the Timing, as text, of the clip whose frames a medium takes, at its times.
    """

    file: Record | MediaFile
    clip: Clip
    window: Window
    bucket: Bucket
    follows: str = ""
    is_still: bool = False
    is_mask: bool = False
    label: str = ""

    @property
    def key(self) -> Key:
        """What tells one clip from another, of one encoding."""
        window, bucket = self.window, self.bucket
        own = (*file_state(self.file), window.start, window.num_frames, bucket.height, bucket.width)
        if not self.label:
            return own
        return (*own, "mask" if self.is_mask else "medium", hashlib.sha256(self.follows.encode()).hexdigest()[:16])


def jobs_of(sample: PlannedSample) -> list[Job]:
    """What a sample needs encoded: its clip, then its media."""
    jobs = [Job(sample.record, sample.clip, sample.window, sample.bucket)]
    for medium in sample.media:
        window = Window(0, 1, 1) if medium.is_still else sample.window
        follows = "" if medium.is_still else sample.probe.timing
        facts = (medium.is_still, medium.column.is_mask, f"{medium.file.label}: ")
        jobs.append(Job(medium.file, medium.clip, window, sample.bucket, follows, *facts))
    return jobs


def _with_clips(sample: PlannedSample, clips: Sequence[Clip]) -> PlannedSample:
    media = (replace(medium, clip=clip) for medium, clip in zip(sample.media, clips[1:], strict=True))
    return replace(sample, clip=clips[0], media=tuple(media))


def _run(jobs: Sequence[Job], options: ShardOptions, staging: Staging) -> Iterator[tuple[Key, dict[str, Any]]]:
    """(key, finding) of each sample's clip, as they are done."""
    limits = WorkerLimits(options.work.encode_timeout_seconds, options.work.worker_memory_bytes)
    shared = {
        "folder": str(staging.clips),
        "encoding": options.clips.encoding.to_json(),
        "fps": None if options.rate is None else str(options.rate),
        "hdr": options.hdr,
    }

    def task(number: int) -> dict[str, Any]:
        return {**shared, **_task(jobs[number], options.worker_storage)}

    num_workers = min(options.work.workers, max(1, len(jobs)))
    with Pool(f"{__name__}:encode_sample", num_workers, limits, staging.lock_fd) as pool:
        for number, answer in pool.run(len(jobs), task):
            finding = _of_crash(answer, options) if isinstance(answer, Crash) else answer
            if "rejected" in finding:
                finding["worker_limits"] = _worker_limits(options)
            yield jobs[number].key, finding


def encode_sample(task: dict[str, Any]) -> dict[str, Any]:
    """Encode a clip into the staging folder; what is known of it, or {"rejected": reason}. Runs in a worker.

    Raises SourceError where the file is no longer the one that was probed, StorageError where writing fails.
    """
    media = Media.from_json(task["media"])
    media.check_unchanged()
    if media.has_checksum:
        finding = _find(task, media.read())
    elif media.is_remote:
        with SpooledFile(media, Path(task["folder"]).parent, clock_paused) as file:
            finding = _find(task, file)
            if file.error is not None:  # a demuxer may have taken it for the end of the file
                raise file.error
    else:
        with media.opened() as local:
            finding = _find(task, local)
    media.check_unchanged()
    return finding


def _find(task: dict[str, Any], source: Source) -> dict[str, Any]:
    finding: dict[str, Any]
    try:
        encoded = _encode(task, source)
    except (ProbeError, DecodeError) as error:
        finding = {"rejected": str(error), "kind": getattr(error, "kind", "") or "damaged"}
    except (SourceError, StorageError):
        raise
    except OSError as error:
        finding = {"rejected": f"cannot be read: {error.strerror or error}", "kind": "unreadable-file"}
    except MemoryError:
        finding = {"rejected": "needs more memory than worker_memory_bytes allows", "kind": "memory"}
    except Exception as error:  # noqa: BLE001 — one odd file among a million must not end the run, and is not lost
        said = f"encoding failed on it, which is a fault of streamvid: {type(error).__name__}: {error}"
        finding = {"rejected": said, "kind": "fault"}
    else:
        LocalStore(Path(task["folder"])).put(task["name"], encoded.data)
        finding = {
            **{name: getattr(encoded, name) for name in _KEPT},
            "psnr_y": round(encoded.psnr_y, 4),
            "sha256": hashlib.sha256(encoded.data).hexdigest(),
        }
    return finding


_KEPT = (
    *("num_bytes", "extension", "codec", "num_frames", "fps", "duration_seconds", "width", "height"),
    *("encode_seconds",),
)


def _encode(task: dict[str, Any], source: Source) -> EncodedClip:
    from streamvid.video.encode.clip import encode_clip
    from streamvid.video.limits import LIMITS

    fps = None if task["fps"] is None else Fraction(task["fps"])
    return encode_clip(
        source,
        height=task["height"],
        width=task["width"],
        encoding=Encoding.from_json(task["encoding"]),
        start=task["start"],
        num_frames=task["num_frames"],
        fps=fps,
        timeline=_followed(task, fps) if task["follows"] else None,
        limits=replace(LIMITS, allow_hdr=task["hdr"] == "allow"),
    )


def _followed(task: dict[str, Any], fps: Fraction | None) -> Timeline:
    """Frames and times of the clip that a medium follows."""
    timing = Timing.from_text(task["follows"])
    return make_timeline(
        tuple(timing.timestamps),
        timing.time_base,
        timing.last_duration,
        start=task["start"],
        num_frames=task["num_frames"],
        fps=fps,
        usual_rate=timing.usual_rate,
    )


def read_encoded(path: Path, source: str, sha256: str) -> bytes:
    """An encoded clip's bytes; StorageError where they are not those that were written."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}; run the same command again") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        path.unlink(missing_ok=True)
        raise StorageError(f"the clip encoded of {source} was damaged on the disk; run the same command again")
    return data


def journal_header(options: ShardOptions) -> dict[str, Any]:
    """The rules that findings depend on."""
    rules = {"encoding": options.encoding_json(), "limits": asdict(options.limits)}
    return {"encode_version": ENCODE_VERSION, **rules}


def _holds(finding: dict[str, Any] | None, options: ShardOptions) -> bool:
    """Whether a clip need not be encoded again. What was rejected under other limits is tried once more."""
    return finding is not None and finding.get("worker_limits", _worker_limits(options)) == _worker_limits(options)


def _worker_limits(options: ShardOptions) -> list[float]:
    return [options.work.encode_timeout_seconds, options.work.worker_memory_bytes]


def _name(key: Key) -> str:
    return f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:40]}.clip"


def _task(job: Job, storage: StorageOptions) -> dict[str, Any]:
    window, bucket = job.window, job.bucket
    return {
        "media": job.file.media(storage).to_json(),
        "start": window.start,
        "num_frames": window.num_frames,
        "height": bucket.height,
        "width": bucket.width,
        "follows": job.follows,
        "name": _name(job.key),
        # Edges of a mask are what it says: nothing is lost of them.
        **({"encoding": Encoding("ffv1").to_json()} if job.is_mask else {}),
    }


def _clip(finding: dict[str, Any], path: Path, job: Job, options: ShardOptions) -> Clip | Reason:
    """The clip, or the reason why there is none."""
    if "rejected" in finding:
        # No path of this machine goes into a sealed dataset (SHARD-1).
        reason = str(finding["rejected"]).replace(job.file.path, job.file.source)
        return Reason(reason, finding.get("kind", "damaged"))
    clip = Clip(path=str(path), **finding)
    if clip.num_frames < job.bucket.num_frames and not job.is_still:
        reason = f"its clip has {clip.num_frames} frames, the bucket {job.bucket.id} takes {job.bucket.num_frames}"
        return Reason(reason, "too-few-frames")
    if job.label:  # how good a medium has to be is nobody's promise
        return clip
    if options.clips.min_psnr is not None and (clip.psnr_y or 0.0) < options.clips.min_psnr:
        reason = f"its clip has a PSNR-Y of {clip.psnr_y:.2f} dB, below min_psnr={options.clips.min_psnr:g}"
        return Reason(f"{reason}; a lower crf keeps more of it", "min-psnr")
    return clip


def _of_crash(crash: Crash, options: ShardOptions) -> dict[str, Any]:
    if timed_out(crash):
        reason = f"encoding took longer than encode_timeout_seconds={options.work.encode_timeout_seconds:g}"
        return {"rejected": reason, "kind": "timeout"}
    return {"rejected": f"the decoder or the encoder crashed on it ({crash})", "kind": "crash"}


def _remove_all_but(names: set[str], folder: Path) -> None:
    for entry in os.scandir(folder):
        if entry.name not in names:
            Path(entry.path).unlink()
