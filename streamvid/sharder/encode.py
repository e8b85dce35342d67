"""Encoding native clips, in workers that a hostile file may kill.

Shards are cut by bytes, so all clips are encoded before the first shard is written; until then they wait in the staging
folder. A journal holds the findings, so that no run encodes a clip twice (SHARD-1).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamvid.buckets import Bucket
from streamvid.errors import StorageError
from streamvid.host.journal import Journal, Key
from streamvid.sharder.assign import Assignment, PlannedSample
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.probing import MAX_REASON_CHARS, Finding, Progress, attempt, file_state, rejected
from streamvid.sharder.rejections import Reason
from streamvid.sharder.source.extra_media import MediaFile
from streamvid.sharder.source.media import Media
from streamvid.sharder.source.records import Record, Rejection
from streamvid.sharder.source.spool import SpooledFile
from streamvid.sharder.windows import Clip, Timing, Window
from streamvid.sharder.work.pool import Crash, Pool, WorkerLimits, timed_out
from streamvid.sharder.work.staging import Staging
from streamvid.sharder.work.worker import clock_paused
from streamvid.storage import LocalStore
from streamvid.video.encode.profiles import Encoding
from streamvid.video.encode.timeline import Timeline, make_timeline
from streamvid.video.limits import LIMITS

if TYPE_CHECKING:
    from streamvid.video.container import Source

ENCODE_VERSION = 1


def encode_all(assignment: Assignment, options: ShardOptions, staging: Staging, progress: Progress) -> Assignment:
    """Encode the clips that are not encoded yet; return samples with clips, and rejections for the others."""
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
    """Encode again the clips that these samples need and an earlier run removed; remove all others.

    Raises StorageError if the bytes differ from those of before.
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
    """One clip to encode: a sample's own file, or one of its conditioning inputs.

    clip: what is known of it.   follows: the Timing, as text, of the clip whose frames and times the input follows.
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
        """Return what distinguishes one clip from another with the same encoding."""
        window, bucket = self.window, self.bucket
        own = (*file_state(self.file), window.start, window.num_frames, bucket.height, bucket.width)
        if not self.label:
            return own
        return (*own, "mask" if self.is_mask else "medium", hashlib.sha256(self.follows.encode()).hexdigest()[:16])


def jobs_of(sample: PlannedSample) -> list[Job]:
    """Return the jobs of a sample: its clip, then its conditioning inputs."""
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


def _run(jobs: Sequence[Job], options: ShardOptions, staging: Staging) -> Iterator[tuple[Key, Finding]]:
    """Yield the key and the finding of each job, as they are done."""
    limits = WorkerLimits(options.work.encode_timeout_seconds, options.work.worker_memory_bytes)
    num_workers = min(options.work.workers, max(1, len(jobs)))

    def task(number: int) -> dict[str, Any]:
        return asdict(EncodeTask.of(jobs[number], options, staging.clips))

    with Pool(f"{__name__}:encode_sample", num_workers, limits, staging.lock_fd) as pool:
        for number, answer in pool.run(len(jobs), task):
            finding: Finding = _of_crash(answer, options) if isinstance(answer, Crash) else answer
            if "rejected" in finding:
                finding["worker_limits"] = _worker_limits(options)
            yield jobs[number].key, finding


@dataclass(frozen=True, slots=True)
class EncodeTask:
    """One clip to encode, for a worker. folder, name: where the clip goes.   follows: as Job has it."""

    media: Media
    window: Window
    height: int
    width: int
    follows: str
    encoding: Encoding
    fps: str | None
    allow_hdr: bool
    folder: str
    name: str

    @staticmethod
    def of(job: Job, options: ShardOptions, folder: Path) -> EncodeTask:
        """Return the task of a job."""
        return EncodeTask(
            media=job.file.media(options.worker_storage),
            window=job.window,
            height=job.bucket.height,
            width=job.bucket.width,
            follows=job.follows,
            # Edges carry the meaning of a mask: it is stored without loss.
            encoding=Encoding("ffv1") if job.is_mask else options.clips.encoding,
            fps=None if options.rate is None else str(options.rate),
            allow_hdr=options.hdr == "allow",
            folder=str(folder),
            name=_name(job.key),
        )

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> EncodeTask:
        """Return the task that `asdict` gave the fields of."""
        parts = {
            "media": Media.from_json(value["media"]),
            "window": Window(**value["window"]),
            "encoding": Encoding(**value["encoding"]),
        }
        return EncodeTask(**{**value, **parts})

    def encode(self, source: Source) -> Finding:
        """Encode the opened file into the folder."""
        from streamvid.video.encode.clip import encode_clip

        fps = None if self.fps is None else Fraction(self.fps)
        encoded = encode_clip(
            source,
            height=self.height,
            width=self.width,
            encoding=self.encoding,
            start=self.window.start,
            num_frames=self.window.num_frames,
            fps=fps,
            timeline=self._timeline(fps) if self.follows else None,
            limits=replace(LIMITS, allow_hdr=self.allow_hdr),
        )
        LocalStore(Path(self.folder)).put(self.name, encoded.data)
        kept = {field.name for field in fields(Clip)} & {field.name for field in fields(encoded)}
        finding: Finding = {name: getattr(encoded, name) for name in sorted(kept)}
        digest = hashlib.sha256(encoded.data).hexdigest()
        return {**finding, "num_bytes": len(encoded.data), "psnr_y": round(encoded.psnr_y, 4), "sha256": digest}

    def _timeline(self, fps: Fraction | None) -> Timeline:
        """Return frames and times of the clip that a conditioning input follows."""
        timing = Timing.from_text(self.follows)
        return make_timeline(
            tuple(timing.timestamps),
            timing.time_base,
            timing.last_duration,
            start=self.window.start,
            num_frames=self.window.num_frames,
            fps=fps,
            usual_rate=timing.usual_rate,
        )


def encode_sample(value: dict[str, Any]) -> Finding:
    """Encode a clip into the staging folder. Runs in a worker.

    Raises SourceError if the file is no longer the one that was probed, StorageError if writing fails.
    """
    task = EncodeTask.from_json(value)
    media = task.media
    media.check_unchanged()
    if media.has_checksum:
        data = media.read()
        finding = attempt("encoding", lambda: task.encode(data))
    elif media.is_remote:
        with SpooledFile(media, Path(task.folder).parent, clock_paused) as file:
            finding = attempt("encoding", lambda: task.encode(file))
            if file.error is not None:  # a demuxer may have taken it for the end of the file
                raise file.error
    else:
        with media.opened() as local:
            finding = attempt("encoding", lambda: task.encode(local))
    media.check_unchanged()
    return finding


def read_encoded(path: Path, source: str, sha256: str) -> bytes:
    """Read an encoded clip. Raises StorageError if its bytes are not those that were written."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}; run the same command again") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        path.unlink(missing_ok=True)
        raise StorageError(f"the clip encoded of {source} was damaged on the disk; run the same command again")
    return data


def journal_header(options: ShardOptions) -> dict[str, Any]:
    """Return the rules that findings depend on."""
    rules = {"encoding": options.encoding_json(), "limits": asdict(options.limits)}
    return {"encode_version": ENCODE_VERSION, **rules}


def _holds(finding: Finding | None, options: ShardOptions) -> bool:
    """Check that a clip need not be encoded again. A rejection under other limits is tried once more."""
    return finding is not None and finding.get("worker_limits", _worker_limits(options)) == _worker_limits(options)


def _worker_limits(options: ShardOptions) -> list[float]:
    return [options.work.encode_timeout_seconds, options.work.worker_memory_bytes]


def _name(key: Key) -> str:
    return f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:40]}.clip"


def _clip(finding: Finding, path: Path, job: Job, options: ShardOptions) -> Clip | Reason:
    """Return the clip, or the reason why there is none."""
    if "rejected" in finding:
        # No path of this machine goes into a sealed dataset (SHARD-1).
        reason = str(finding["rejected"]).replace(job.file.path, job.file.source)
        return Reason(reason, finding.get("kind", "damaged"))
    clip = Clip(path=str(path), **finding)
    if clip.num_frames < job.bucket.num_frames and not job.is_still:
        reason = f"its clip has {clip.num_frames} frames, the bucket {job.bucket.id} takes {job.bucket.num_frames}"
        return Reason(reason, "too-few-frames")
    if job.label:  # min_psnr is for clips alone
        return clip
    if options.clips.min_psnr is not None and (clip.psnr_y or 0.0) < options.clips.min_psnr:
        reason = f"its clip has a PSNR-Y of {clip.psnr_y:.2f} dB, below min_psnr={options.clips.min_psnr:g}"
        return Reason(f"{reason}; a lower crf keeps more of it", "min-psnr")
    return clip


def _of_crash(crash: Crash, options: ShardOptions) -> Finding:
    if timed_out(crash):
        seconds = options.work.encode_timeout_seconds
        return rejected(f"encoding took longer than encode_timeout_seconds={seconds:g}", "timeout")
    return rejected(f"the decoder or the encoder crashed on it ({crash})", "crash")


def _remove_all_but(names: set[str], folder: Path) -> None:
    for entry in os.scandir(folder):
        if entry.name not in names:
            Path(entry.path).unlink()
