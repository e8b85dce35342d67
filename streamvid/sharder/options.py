"""Sharder options. The YAML fields and the flags of `streamvid shard` are derived from these classes.

ShardOptions ─┬─ source: SourceOptions ── captions: CaptionOptions
              ├─ buckets: a BucketConfig, a preset's name, the path to a YAML file, or a mapping of its fields
              ├─ clips: ClipOptions
              ├─ curation: CurationOptions
              ├─ work: WorkOptions
              └─ storage: StorageOptions
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from streamvid.buckets.bucket import TEXT_BUCKET, TICKS_PER_SECOND, Bucket
from streamvid.buckets.config import BucketConfig
from streamvid.buckets.document import DEFAULT_BUCKETS, bucket_config_of, stored_buckets
from streamvid.buckets.frames import FrameRate
from streamvid.buckets.table import BucketTable
from streamvid.config import check_options, option
from streamvid.errors import ConfigError
from streamvid.sharder.curation.options import CurationOptions
from streamvid.sharder.source_options import SourceOptions
from streamvid.sharder.work_options import WorkOptions
from streamvid.storage import StorageOptions
from streamvid.storage.options import MAX_RANGE_BYTES
from streamvid.video.encode.audio_profiles import DEFAULT_AUDIO_CODEC, AudioCodec, MadeAudioCodec
from streamvid.video.encode.profiles import Encoding, encoder_versions
from streamvid.video.limits import LIMITS, Limits

DEFAULT_DURATIONS = tuple(Bucket(seconds * TICKS_PER_SECOND, 0, 0) for seconds in (2, 5, 10))
"""Default buckets for audio files."""

_NATIVE_SIDES = range(16, 8193, 2)


def _refuse(given: Mapping[str, object], kind: str) -> None:
    """Raise ConfigError for the first option that has a value. kind: the setting that excludes these options."""
    for name, value in given.items():
        if value:
            raise ConfigError(
                f"{name}={value!r} cannot be combined with {kind}; omit {name}, or choose another clips.kind (--clips)"
            )


def _names(config: BucketConfig) -> str:
    return ", ".join(bucket.id for bucket in config.buckets) or "buckets of this form"


@dataclass(frozen=True)
class ClipOptions:
    """Options for storing clips in shards.

    kind: "copy" stores each source file, or the packets of a part of it, unchanged; "native" encodes each clip at its
        bucket's size for fast decoding; "text" uses metadata without files, and turns each row with a caption into a
        sample; "audio" stores audio files without pictures, in buckets by duration.
    fps, fps_rule: frame rate at which clips are read, and the rule that selects the frames: "resample" (nearest in
        time), "cap" (every nth frame, so that the rate is at most fps) or "fix_frame_rate" (by frame number, as
        DiffSynth does). With fps=None, every frame is read unless the buckets set a rate. Copies keep all frames, and
        readers select from them. Native clips contain only the selected frames, and allow only "resample".
    audio: "keep" stores the audio of clips that have audio; "drop" leaves it out (files that are copied whole stay
        unchanged, but their audio is not indexed, so a loader does not deliver it); "require" rejects each clip that
        has no audio while its frames are shown.
    codec, crf, gop, audio_codec, min_psnr, max_growth: options for native clips only.
    """

    kind: Literal["copy", "native", "text", "audio"] = option(
        "copy",
        help="Content of the shards: copies of files or parts of them, clips encoded for fast reading, captions only, "
        "or audio only.",
        group="",
        flag="--clips",
    )
    codec: str | None = option(
        None, help="Codec for native clips: h264, mjpeg, av1 or ffv1 (lossless).", metavar="NAME", shown_default="h264"
    )
    crf: int | float | None = option(
        None,
        help="Quality of native clips; lower values mean higher quality.",
        metavar="N",
        shown_default="18; av1 24, mjpeg 3",
    )
    gop: int | None = option(
        None, help="Key frame interval for native clips, in frames.", metavar="N", minimum=1, shown_default="16"
    )
    fps: Fraction | float | None = option(
        None, help="Frame rate at which clips are read.", metavar="RATE", group="", shown_default="the source's"
    )
    fps_rule: Literal["resample", "cap", "fix_frame_rate"] | None = option(
        None,
        help="Frames to select: those nearest in time at --fps, every nth without exceeding --fps, or the same ones as "
        "DiffSynth-Studio.",
        shown_default="resample",
    )
    max_clip_seconds: float | None = option(
        None,
        help="Maximum length of a clip in seconds; longer sources are split.",
        metavar="S",
        above=0,
        maximum=86400,
    )
    audio: Literal["keep", "drop", "require"] = option(
        "keep", help="Handling of audio: store it, leave it out, or reject clips without audio."
    )
    audio_codec: AudioCodec | None = option(
        None,
        help="Audio codec for native clips: aac, opus or flac (lossless).",
        metavar="NAME",
        shown_default="aac",
    )
    min_psnr: float | None = option(
        None, help="Minimum PSNR-Y of native clips; clips below it are rejected.", metavar="DB", above=0, maximum=100
    )

    max_growth: float | None = option(
        None,
        help="Maximum size of a native clip relative to its source; larger clips are re-encoded with a higher crf.",
        metavar="RATIO",
        above=0,
    )

    def __post_init__(self) -> None:
        check_options(self)
        self._check_audio()
        if self.fps_rule is not None and self.fps is None:
            raise ConfigError(
                f"fps_rule={self.fps_rule!r} requires a frame rate; also set clips.fps, for example to 16"
            )
        if self.kind == "native":
            _ = self.encoding, self.frame_rate
            if self.max_growth is not None and self.encoding.crf is None:
                raise ConfigError(
                    f"max_growth={self.max_growth!r}: {self.codec} is lossless, so its clips cannot be made smaller; "
                    "omit clips.max_growth, or choose another clips.codec"
                )
            return
        for name in ("codec", "crf", "gop", "audio_codec", "min_psnr", "max_growth", "max_clip_seconds"):
            value = getattr(self, name)
            if value is not None and not (self.kind == "copy" and name == "max_clip_seconds"):
                stores = "has no files" if self.is_text else "encodes nothing"
                raise ConfigError(
                    f"{name}={value!r} cannot be combined with clips.kind={self.kind!r}, which {stores}; set "
                    f"clips.kind='native' (--clips native), or omit clips.{name}"
                )

    def _check_audio(self) -> None:
        if self.is_text and self.audio != "keep":
            raise ConfigError(
                f"audio={self.audio!r} cannot be combined with clips.kind='text', which has no files; omit clips.audio"
            )
        if self.is_audio and self.audio != "keep":
            raise ConfigError(
                f"audio={self.audio!r} cannot be combined with clips.kind='audio', whose samples are audio; omit "
                "clips.audio"
            )
        if self.audio == "drop" and self.audio_codec is not None:
            raise ConfigError(
                f"audio_codec={self.audio_codec!r} cannot be combined with clips.audio='drop', which stores no audio; "
                "omit one of them"
            )

    @property
    def is_native(self) -> bool:
        return self.kind == "native"

    @property
    def made_audio(self) -> MadeAudioCodec | None:
        """Audio codec for encoded and cut clips, or None to omit the audio. Cut clips store audio losslessly."""
        if self.audio == "drop":
            return None
        return (self.audio_codec or DEFAULT_AUDIO_CODEC) if self.is_native else "flac"

    @property
    def is_text(self) -> bool:
        """True if samples consist of captions only."""
        return self.kind == "text"

    @property
    def is_audio(self) -> bool:
        """True if the samples are audio files without pictures."""
        return self.kind == "audio"

    @cached_property
    def encoding(self) -> Encoding:
        """Encoding settings for native clips."""
        return Encoding(self.codec or "h264", self.crf, self.gop or 0)

    @cached_property
    def frame_rate(self) -> FrameRate | None:
        """Frame rate at which clips are read, or None if the buckets determine it."""
        return None if self.fps is None else FrameRate(self.fps_rule or "resample", self.fps)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ShardOptions:
    """Options for the sharder. Nested options may be given as mappings of their fields.

    buckets: a BucketConfig, the name of a preset, the path to a YAML file, or a mapping with the fields of such a file.
        None selects 256px with 1, 17 and 33 frames.
    verify: "decode" decodes every frame of a source, so that damaged files are rejected; "probe" decodes one key frame.
        None selects "probe" for copies. Native clips are always decoded.
    hdr: "refuse" rejects PQ and HLG video; "allow" accepts it unchanged.
    val_fraction: fraction of records to place in the "val" split.
    Raises ConfigError if a value is invalid. The message contains the option, its value and the allowed values.
    """

    source: SourceOptions = option(default_factory=SourceOptions, group="Source")
    buckets: BucketConfig | Mapping[str, Any] | str | Path | None = option(None, flag="")
    clips: ClipOptions = option(default_factory=ClipOptions, group="Clips")
    curation: CurationOptions = option(default_factory=CurationOptions, group="Curation")
    verify: Literal["decode", "probe"] | None = option(
        None,
        help="Frames of each source to decode for verification: all frames, or only one key frame.",
        group="Verification",
        shown_default="probe; native: decode",
    )
    hdr: Literal["refuse", "allow"] = option(
        "refuse", help="Handling of HDR video (PQ or HLG): reject it, or accept it unchanged.", group="Verification"
    )
    trust_metadata: bool = option(
        False,
        help="Plan from the sizes, frame counts and frame rates in the metadata, and probe files during the build.",
        group="Source",
    )
    val_fraction: float = option(
        0.0, help="Fraction of videos to place in the 'val' split.", metavar="SHARE", minimum=0
    )
    shard_size_bytes: int = option(
        512 * 10**6, help="Target shard size.", metavar="SIZE", flag="--shard-size", minimum=1000, maximum=2**50
    )
    seed: int = option(
        0, help="Seed for the stored order of samples.", metavar="N", group="Work", minimum=0, maximum=2**63 - 1
    )
    work: WorkOptions = option(default_factory=WorkOptions, group="Work")
    storage: StorageOptions = option(default_factory=StorageOptions, group="Storage")

    def __post_init__(self) -> None:
        check_options(self)
        if self.val_fraction >= 1:
            raise ConfigError(
                f"val_fraction={self.val_fraction!r}: must be at least 0 and less than 1; for example, 0.01"
            )
        self.config.check_rate(self.frame_rate)
        self._check_trust()
        self._check_curation()
        if self.clips.is_text:
            self._check_text()
        if self.clips.is_audio:
            self._check_audio()
        elif any(bucket.is_audio for bucket in self.config.buckets):
            raise ConfigError(
                f"buckets: {_names(self.config)} contain audio without pictures; set clips.kind='audio' (--clips "
                "audio), or use buckets with a size, such as 832x480@81"
            )
        if self.clips.is_native:
            self._check_native()
        elif self.cuts_copies and self.source.media:
            names = ("source.time_columns", "clips.max_clip_seconds", "curation.scene_cuts")
            given = (self.source.time_columns, self.clips.max_clip_seconds, True)
            cut = next(name for name, value in zip(names, given, strict=True) if value)
            raise ConfigError(
                f"source.media={dict(self.source.media)!r} cannot be combined with {cut} and clips.kind='copy', "
                f"because conditioning inputs are copied whole; set clips.kind='native' (--clips native), or omit {cut}"
            )

    @cached_property
    def config(self) -> BucketConfig:
        """Bucket configuration. It is read once, so that later changes to its file have no effect."""
        if self.clips.is_text:
            if self.buckets is not None or self.clips.fps is not None:
                name = "clips.fps" if self.buckets is None else "buckets"
                raise ConfigError(f"{name} cannot be combined with clips.kind='text', which has no files; omit {name}")
            return BucketConfig(buckets=(TEXT_BUCKET,))
        if self.clips.is_audio and self.buckets is None:
            return BucketConfig(buckets=DEFAULT_DURATIONS)
        config = bucket_config_of(DEFAULT_BUCKETS if self.buckets is None else self.buckets)
        if self.clips.frame_rate is None or self.clips.is_native:  # the rate of native clips is part of their encoding
            return config
        return replace(config, frame_rate=self.clips.frame_rate)

    def _check_trust(self) -> None:
        others = {
            f"clips.kind={self.clips.kind!r}": self.clips.kind != "copy",
            "source.time_columns": bool(self.source.time_columns),
            "clips.max_clip_seconds": bool(self.clips.max_clip_seconds),
            "source.media": bool(self.source.media),
            "buckets.assign='all'": self.config.assign == "all",
        }
        other = next((name for name, is_set in others.items() if is_set), None)
        if self.trust_metadata and other is not None:
            raise ConfigError(
                f"trust_metadata=True cannot be combined with {other}, because trust_metadata requires each "
                "sample to be one unchanged file in one bucket; omit one of them"
            )

    def _check_curation(self) -> None:
        if self.curation.is_on and self.trust_metadata:
            name, value = next((name, value) for name, value in vars(self.curation).items() if value)
            raise ConfigError(
                f"curation.{name}={value!r} cannot be combined with trust_metadata=True, because every file must be "
                "decoded before it is assigned to a shard; omit one of them"
            )
        if self.curation.black_bars and self.source.media and self.clips.is_native:
            raise ConfigError(
                "curation.black_bars=True cannot be combined with source.media and clips.kind='native', because the "
                "bars would be cropped from the clips, but not from the conditioning inputs; omit "
                "curation.black_bars or source.media"
            )

    def _check_audio(self) -> None:
        given = {
            "clips.fps": self.clips.fps,
            "buckets.frame_rate": None if self.config.frame_rate.rule == "native" else self.config.frame_rate,
            "source.time_columns": self.source.time_columns,
            "source.media": self.source.media,
            "source.min_fps": self.source.min_fps,
            "hdr": None if self.hdr == "refuse" else self.hdr,
            "trust_metadata": self.trust_metadata,
            "curation.scores": self.curation.scores,
            "curation.scene_cuts": self.curation.scene_cuts,
            "curation.black_bars": self.curation.black_bars,
            "curation.dedup": self.curation.dedup,
        }
        _refuse(given, "clips.kind='audio', whose files have no pictures and are stored whole")
        if not self.config.buckets or not all(bucket.is_audio for bucket in self.config.buckets):
            raise ConfigError(
                f"buckets: {_names(self.config)} cannot be combined with clips.kind='audio', which requires duration "
                "buckets; set buckets to durations, such as '2s,5s,10s' (--buckets 2s,5s,10s)"
            )

    def _check_text(self) -> None:
        given = {
            "source.video_column": self.source.video_column,
            "source.time_columns": self.source.time_columns,
            "source.media": self.source.media,
            "source.base_path": self.source.base_path,
            "source.min_fps": self.source.min_fps,
            "verify": self.verify,
            "curation.scores": self.curation.scores,
            "curation.scene_cuts": self.curation.scene_cuts,
            "curation.black_bars": self.curation.black_bars,
            "curation.dedup": self.curation.dedup,
        }
        _refuse(given, "clips.kind='text', which has no files")
        if self.source.captions.column == "" or self.source.captions.lines:
            raise ConfigError(
                "clips.kind='text' requires captions from metadata; omit source.captions.column='' "
                "(--caption-column '') and source.captions.lines (--caption-lines)"
            )

    def _check_native(self) -> None:
        if self.frame_rate.rule not in ("native", "resample"):
            name = "buckets.frame_rate.rule" if self.clips.frame_rate is None else "clips.fps_rule"
            raise ConfigError(
                f"{name}={self.frame_rate.rule!r} cannot be combined with clips.kind='native', which selects the "
                "frames nearest in time; set clips.fps and clips.fps_rule='resample', or clips.kind='copy'"
            )
        if self.verify == "probe":
            raise ConfigError(
                "verify='probe' cannot be combined with clips.kind='native', because encoding decodes every frame; "
                "omit verify"
            )
        for bucket in () if self.config.is_dynamic else self.table.candidates:
            if bucket.height not in _NATIVE_SIDES or bucket.width not in _NATIVE_SIDES:
                raise ConfigError(
                    f"bucket {bucket.id} is {bucket.width}x{bucket.height}; sides of native clips must be even and "
                    f"between 16 and {_NATIVE_SIDES[-1]}; choose another size, or set clips.kind='copy' (--clips copy)"
                )

    @property
    def worker_storage(self) -> StorageOptions:
        """Storage options for one worker, with its share of the limits on requests and bytes in flight."""
        whole, workers = self.storage, self.work.workers
        return replace(
            whole,
            max_requests=max(1, whole.max_requests // workers),
            max_bytes_in_flight=max(MAX_RANGE_BYTES, whole.max_bytes_in_flight // workers),
        )

    @property
    def divides_files(self) -> bool:
        """True if a sample may contain only part of its source."""
        cuts = (self.source.time_columns, self.clips.max_clip_seconds is not None, self.curation.scene_cuts)
        return any(cuts)

    @property
    def needs_timing(self) -> bool:
        """True if probing must return the time of each frame."""
        return self.divides_files or self.rate is not None or bool(self.source.media)

    @property
    def cuts_copies(self) -> bool:
        """True if a copied clip may contain only part of its source."""
        return self.divides_files and self.clips.kind == "copy"

    @cached_property
    def makes_clips(self) -> bool:
        """True if clips are encoded or cut before shards are planned."""
        return self.clips.is_native or self.cuts_copies

    @property
    def rate(self) -> Fraction | None:
        """Frame rate to which native clips are resampled; None for copies, or if the source's rate is kept."""
        return self.frame_rate.fps if self.clips.is_native else None

    @cached_property
    def frame_rate(self) -> FrameRate:
        """Frame rate at which clips are read."""
        return self.clips.frame_rate or self.config.frame_rate

    @property
    def limits(self) -> Limits:
        """Limits that probing enforces on source files."""
        return replace(LIMITS, allow_hdr=self.hdr == "allow")

    @property
    def table(self) -> BucketTable:
        """Buckets to which clips are assigned. Raises ConfigError if bucket sizes are derived from the clips."""
        return self.config.table

    def cut_json(self) -> dict[str, object]:
        """Return everything that determines the bytes of a cut clip, except its source."""
        versions = encoder_versions()
        return {"audio": self.clips.made_audio, "versions": {name: versions[name] for name in ("av", "ffmpeg")}}

    def encoding_json(self) -> dict[str, object]:
        """Return everything that determines the bytes of a native clip, except its source and size."""
        fps = None if self.rate is None else str(self.rate)
        own = {"fps": fps, "audio": self.clips.made_audio, "versions": encoder_versions()}
        return {**asdict(self.clips.encoding), **own}

    def to_json(self) -> dict[str, Any]:
        """Return the options that determine the dataset's content, in the form that the manifest stores."""
        value = {
            **stored_buckets(self.config),
            "clips": self.clips.kind,
            "max_clip_bytes": self.source.max_clip_bytes,
            "seed": self.seed,
            "shard_size_bytes": self.shard_size_bytes,
            "val_fraction": self.val_fraction,
        }
        if self.clips.audio != "keep":
            value["audio"] = self.clips.audio
        if self.hdr != "refuse":
            value["hdr"] = self.hdr
        if self.source.where is not None:
            value["where"] = self.source.where
        if self.source.time_columns:
            value["time_columns"] = list(self.source.time_columns)
        if self.source.min_fps is not None:
            value["min_fps"] = float(self.source.min_fps)
        if self.source.media:
            value["media"] = [str(medium) for medium in self.source.media_columns]
        if self.trust_metadata:
            value["trust_metadata"] = True
        if self.curation.is_on:
            value["curation"] = self.curation.to_json()
        if self.verify == "decode" and not self.clips.is_native:
            value["verify"] = "decode"
        if self.makes_clips:
            value |= {"encoding": self.encoding_json()} if self.clips.is_native else {"cut": self.cut_json()}
        own = {name: getattr(self.clips, name) for name in ("max_clip_seconds", "min_psnr", "max_growth")}
        return {**value, **{name: limit for name, limit in own.items() if limit is not None}}
