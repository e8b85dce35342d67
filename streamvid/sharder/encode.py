"""Creation of clips in worker processes, which isolate crashes caused by hostile files.

Native clips are encoded, and copies of a part of a file are cut from it. The shard plan depends on the sizes of the
clips, so all clips are made before the first shard is written. Until then, they are stored in the staging folder. A
journal stores the results, so that later runs can reuse them (SHARD-1).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import repeat

from streamvid.buckets.bucket import Bucket
from streamvid.dataset.tabular.rows import Rows
from streamvid.errors import Rejected, StorageError
from streamvid.host.findings import Key
from streamvid.host.journal import FileState
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.planning.assign import Assignment, PlannedSample, window_name
from streamvid.sharder.probing import (
    MAX_REASON_CHARS,
    Progress,
    file_state,
    note,
    rejection_of,
    run_units,
)
from streamvid.sharder.source.extra_media import MediaFile
from streamvid.sharder.source.records import Record, Rejection
from streamvid.sharder.units.cut_unit import CutUnit, cut_file
from streamvid.sharder.units.encode_unit import EncodeUnit, encode_file
from streamvid.sharder.units.probe_unit import Finding
from streamvid.sharder.windows import Clip, Window
from streamvid.sharder.work.staging import ENCODES, Staging
from streamvid.sharder.work.tasks import Remaining, TasksUnfinished
from streamvid.video.cropping import NO_MARGINS, Margins
from streamvid.video.encode.audio_profiles import DEFAULT_AUDIO_CODEC, MadeAudioCodec

ENCODE_VERSION = 6
CUT_VERSION = 2

_CUTS_PER_UNIT = 64
_ENOUGH_CLIPS = 100
_logger = logging.getLogger(__name__)


def encode_all(assignment: Assignment, options: ShardOptions, staging: Staging, progress: Progress) -> Assignment:
    """Encode or cut the missing clips. Return an assignment that rejects samples whose clips could not be made.

    Raises TasksUnfinished if other tasks have not finished their clips yet.
    """
    wanted = _wanted(assignment.samples, options)
    if staging.share.is_whole:
        staging.clips(options).keep({_name(key) for key in wanted})
    journal = staging.journal(ENCODES, journal_header(options))
    share = [job.key for unit in staging.share.of(_units(wanted.values())) for job in unit]
    todo = [key for key in share if not _holds(journal.findings.get(key), options)]
    done = len(share) - len(todo)
    progress("encode", done, len(share))
    growth = _Growth()
    with journal:
        for key, finding in _run([wanted[key] for key in todo], options, staging):
            note(journal, key, finding)
            growth.add(wanted[key], finding)
            done += 1
            progress("encode", done, len(share))
    growth.warn()
    journal.refresh()
    if num_missing := sum(key not in journal.findings for key in wanted):
        raise TasksUnfinished(Remaining("encode", num_missing, len(wanted)))
    rejections = list(assignment.rejections)
    samples = Rows.of(PlannedSample, _encoded(assignment.samples, journal.findings, options, rejections))
    return replace(assignment, samples=samples, rejections=tuple(rejections))


def _encoded(
    samples: Iterable[PlannedSample],
    findings: Mapping[Key, Finding],
    options: ShardOptions,
    rejections: list[Rejection],
) -> Iterator[PlannedSample]:
    """Yield the samples together with the clips that were made for them.

    Samples whose clips could not be made are added to `rejections` instead.
    """
    for sample in samples:
        clips = []
        for job in jobs_of(sample, options):
            try:
                clips.append(_clip(findings[job.key], job, options))
            except Rejected as error:
                reason = f"{window_name(sample.window, sample.probe)}{job.label}{error}"[:MAX_REASON_CHARS]
                kind = "medium" if job.label else error.kind
                rejections.append(Rejection(sample.record.row, sample.record.source, reason, kind))
                break
        else:
            media = (replace(medium, clip=clip) for medium, clip in zip(sample.media, clips[1:], strict=True))
            yield replace(sample, clip=clips[0], media=tuple(media)) if clips else sample


def restore_clips(
    samples: Iterable[PlannedSample], options: ShardOptions, staging: Staging, progress: Progress
) -> None:
    """Recreate the missing clips of these samples.

    Remove the clips of other samples, unless other tasks may need them.

    Raises StorageError if a clip cannot be recreated with the same bytes.
    """
    wanted, clips = _wanted(samples, options), staging.clips(options)
    if staging.share.is_whole:
        clips.keep({_name(key) for key in wanted})
    sizes = clips.sizes()
    missing = [job for key, job in wanted.items() if sizes.get(_name(key)) != job.clip.num_bytes]
    for done, (key, finding) in enumerate(_run(missing, options, staging)):
        if finding.get("sha256") != wanted[key].clip.sha256:
            reason = finding.get("rejected", "the new clip has different bytes")
            raise StorageError(
                f"a clip from {wanted[key].file.source} is missing and cannot be recreated: {reason}; run the command "
                "with --abandon (streamvid.sharder.sharder.abandon) to remove the unfinished work, then start again"
            )
        progress("encode", len(wanted) - len(missing) + done + 1, len(wanted))


@dataclass(frozen=True, slots=True)
class Job:
    """Job that encodes a file or cuts a clip from it. The file is a sample's source or one of its conditioning inputs.

    clip: the clip, with the facts that are known before it is made.
    follows: for conditioning videos and audio, the Timing of the sample's source as text; otherwise "".
    audio_seconds: for conditioning audio, the time in seconds from the file's time zero to the end of the audio; None
        for other files.
    source_bytes: size of a source video in bytes, multiplied by the fraction of its frames that the window contains; 0
        for other files.
    bars: black bars to crop; see Record.
    """

    file: Record | MediaFile
    clip: Clip
    window: Window
    bucket: Bucket
    follows: str = ""
    is_still: bool = False
    is_mask: bool = False
    label: str = ""
    source_bytes: float = 0.0
    is_cut: bool = False
    audio_seconds: float | None = None
    bars: Margins = NO_MARGINS

    @property
    def key(self) -> Key:
        """Key that identifies the clip among all clips with the same encoding settings."""
        window, bucket = self.window, self.bucket
        if self.is_cut:  # it is the same for all buckets
            return (*file_state(self.file), window.start, window.num_frames)
        own = (*file_state(self.file), window.start, window.num_frames, bucket.height, bucket.width)
        if not self.label:
            return (*own, "bars", *self.bars) if any(self.bars) else own
        kind = "mask" if self.is_mask else "medium" if self.audio_seconds is None else "audio"
        return (*own, kind, hashlib.sha256(self.follows.encode()).hexdigest()[:16])


def jobs_of(sample: PlannedSample, options: ShardOptions) -> list[Job]:
    """Return the jobs for a sample: one job for its clip, then one job per file of its conditioning inputs.

    Copies that are whole source files need no jobs.
    """
    probe = sample.probe
    if not options.clips.is_native:
        is_cut = sample.clip.is_made
        return [Job(sample.record, sample.clip, sample.window, sample.bucket, is_cut=True)] if is_cut else []
    share = 0.0 if probe.is_image else sample.record.num_bytes * sample.window.num_frames / probe.num_frames
    record = sample.record
    jobs = [Job(record, sample.clip, sample.window, sample.bucket, source_bytes=share, bars=record.bars)]
    for medium in sample.media:
        window = Window(0, 1, 1) if medium.is_still else sample.window
        follows = "" if medium.is_still else sample.probe.timing
        facts = (medium.is_still, medium.column.is_mask, f"{medium.file.label}: ")
        seconds = medium.probe.audio_end_seconds if medium.column.is_audio else None
        job = Job(medium.file, medium.clip, window, sample.bucket, follows, *facts, audio_seconds=seconds)
        jobs.append(job)
    return jobs


def _run(jobs: Sequence[Job], options: ShardOptions, staging: Staging) -> Iterator[tuple[Key, Finding]]:
    """Yield the key and the finding of each job as the job finishes."""
    limit, paths = "encode_timeout_seconds", [job.file.path for job in jobs]
    clips, units = staging.clips(options), _units(jobs)

    def unit(number: int) -> EncodeUnit | CutUnit:
        job = units[number][0]
        if job.is_cut:
            windows = tuple((_name(job.key), job.window) for job in units[number])
            is_verified, has_audio = options.verify == "decode", options.clips.made_audio is not None
            return CutUnit(job.file.media(clips.storage), windows, is_verified, has_audio, clips, options.limits)
        return EncodeUnit(
            media=job.file.media(clips.storage),
            name=_name(job.key),
            window=job.window,
            bucket=job.bucket,
            follows=job.follows,
            is_mask=job.is_mask,
            bars=job.bars,
            max_bytes=_max_bytes(job, options),
            clips=clips,
            encoding=options.clips.encoding,
            audio=_audio_codec(job, options),
            seconds=None if job.audio_seconds is None else Fraction(job.audio_seconds),
            fps=options.rate,
            limits=options.limits,
        )

    uses = [*paths, clips.dest] if clips.is_shared else paths
    what, handler = ("encoding", encode_file) if options.clips.is_native else ("cutting", cut_file)
    for number, answer in run_units(what, handler, uses, len(units), unit, options, limit, staging.lock_fd):
        for job, finding in zip(units[number], answer.get("clips", repeat(answer)), strict=False):
            limits = {"worker_limits": _worker_limits(options)} if "rejected" in finding else {}
            yield job.key, {**finding, **limits}


def _audio_codec(job: Job, options: ShardOptions) -> MadeAudioCodec | None:
    """Return the codec in which a job stores audio, or None to omit the audio. Conditioning audio is always stored."""
    if job.audio_seconds is not None:
        return options.clips.made_audio or DEFAULT_AUDIO_CODEC
    return None if job.label else options.clips.made_audio


def _units(jobs: Iterable[Job]) -> list[list[Job]]:
    """Group jobs into units of work. Clips from one file are cut together, so that its packets are read only once."""
    units: list[list[Job]] = []
    latest: dict[FileState, list[Job]] = {}
    for job in jobs:
        mine = latest.get(file_state(job.file)) if job.is_cut else None
        if mine is None or len(mine) >= _CUTS_PER_UNIT:
            mine = latest[file_state(job.file)] = []
            units.append(mine)
        mine.append(job)
    return units


def journal_header(options: ShardOptions) -> dict[str, object]:
    """Return the journal's header, which contains the settings that determine the findings."""
    limits = asdict(options.limits)
    if not options.clips.is_native:
        return {"cut_version": CUT_VERSION, "cut": options.cut_json(), "verify": options.verify, "limits": limits}
    rules = {"encoding": options.encoding_json(), "limits": limits}
    return {"encode_version": ENCODE_VERSION, **rules, "max_growth": options.clips.max_growth}


def _holds(finding: Finding | None, options: ShardOptions) -> bool:
    """Return True if a finding is still valid.

    A rejection is no longer valid if it was recorded under different worker limits; the clip is then made again.
    """
    return finding is not None and finding.get("worker_limits", _worker_limits(options)) == _worker_limits(options)


def _worker_limits(options: ShardOptions) -> list[float]:
    return [options.work.encode_timeout_seconds, options.work.worker_memory_bytes]


def _name(key: Key) -> str:
    return f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:40]}.clip"


def _clip(finding: Finding, job: Job, options: ShardOptions) -> Clip:
    """Return the clip that a job made.

    Raises Rejected if the clip could not be made or does not satisfy the options.
    """
    if (rejection := rejection_of(finding, job.file.path, job.file.source)) is not None:
        raise rejection
    clip = Clip(**{**finding, "path": _name(job.key)})
    if clip.num_frames < job.bucket.num_frames and not (job.is_still or job.is_cut or job.audio_seconds is not None):
        reason = f"the clip has {clip.num_frames} frames, but bucket {job.bucket.id} requires {job.bucket.num_frames}"
        raise Rejected(reason, kind="too-few-frames")
    if options.clips.audio == "require" and not (clip.has_audio or job.label):
        raise Rejected(
            "the clip has no audio while its frames are shown, but clips.audio='require' is set", kind="no-audio"
        )
    least = options.clips.min_psnr
    if least is not None and not job.label and (clip.psnr_y or 0.0) < least:
        reason = f"the clip has a PSNR-Y of {clip.psnr_y:.2f} dB, below min_psnr={least:g}"
        raise Rejected(f"{reason}; use a lower crf for higher quality", kind="min-psnr")
    most = _max_bytes(job, options)
    if most is not None and clip.num_bytes > most:
        reason = f"even at the highest crf, the clip is {clip.num_bytes} bytes long, but at most {most:.0f} are allowed"
        raise Rejected(f"{reason} (max_growth={options.clips.max_growth:g})", kind="max-growth")
    return clip


def _max_bytes(job: Job, options: ShardOptions) -> float | None:
    """Return the maximum number of bytes for a video clip, or None if there is no limit."""
    growth = options.clips.max_growth
    return growth * job.source_bytes if growth is not None and job.source_bytes else None


@dataclass
class _Growth:
    """Totals for comparing encoded clips with their sources. A warning is logged once if the clips are larger.

    From the hundredth clip on, the sizes are compared after every clip, so that the warning appears early. They are
    compared once more at the end.
    """

    num_clips: int = 0
    clip_bytes: int = 0
    source_bytes: float = 0.0
    has_warned: bool = False

    def add(self, job: Job, finding: Finding) -> None:
        if job.source_bytes and "rejected" not in finding:
            self.num_clips += 1
            self.clip_bytes += int(finding["num_bytes"])
            self.source_bytes += job.source_bytes
            if self.num_clips >= _ENOUGH_CLIPS:
                self.warn()

    def warn(self) -> None:
        """Log a warning if the clips are larger than their sources and no warning has been logged yet."""
        if self.clip_bytes > self.source_bytes and not self.has_warned:
            self.has_warned = True
            _logger.warning(
                "the %d native clips encoded so far are %.2f times as large as their sources; to store fewer bytes, "
                "use --codec av1 or a higher --crf, or limit the size of each clip with --max-growth",
                self.num_clips,
                self.clip_bytes / self.source_bytes,
            )


def _wanted(samples: Iterable[PlannedSample], options: ShardOptions) -> dict[Key, Job]:
    """Map the key of each job for these samples to the job."""
    return {job.key: job for sample in samples for job in jobs_of(sample, options)}
