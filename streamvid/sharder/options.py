"""What the user may ask of the sharder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

from streamvid.buckets import Bucket, BucketTable
from streamvid.buckets.config import BucketConfig
from streamvid.buckets.frames import FrameRate
from streamvid.errors import ConfigError
from streamvid.sharder.bucket_options import bucket_config_of, buckets_json, check_model, rate_asked
from streamvid.sharder.source.captions import check_caption_options
from streamvid.sharder.source.extra_media import MediaColumn, media_columns
from streamvid.storage import StorageOptions
from streamvid.storage.options import MAX_RANGE_BYTES
from streamvid.video.encode.profiles import Encoding, encoder_versions
from streamvid.video.limits import LIMITS, Limits

CLIPS = ("copy", "native", "text")
LAYOUTS = ("metadata", "folder", "lists", "imagefolder", "parquet", "tars", "dataset")
MAX_WORKERS = 1024
MIN_SHARD_BYTES = 1000
_NATIVE_ONLY = ("codec", "crf", "gop", "max_clip_seconds", "min_psnr")
_CHOICES = {"clips": CLIPS, "layout": (None, *LAYOUTS), "verify": (None, "decode", "probe"), "hdr": ("refuse", "allow")}
_NATIVE_SIDES = range(16, 8193, 2)


def available_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class ShardOptions:
    """How records become shards. One of `buckets`, `resolution` with `num_frames`, `height` with `width`, `max_pixels`
    and `bucket_config` (a file, a preset's name or a BucketConfig) says which buckets there are; `BucketConfig` says
    what these and min_ar, max_ar, num_ar_buckets, max_frames, frame_rule, policy (its fields) and assign mean.

    `caption_column=""` stands for "no captions"; several columns, or a list in one, are captions of one sample.
    caption_weight_column: a list of numbers, how often each is drawn.   caption_lines: a .txt beside a video holds one
    caption a line. Sizes are bytes, times seconds, `val_fraction` is a share from 0 to
    below 1. Only what changes the result is kept in the manifest: `workers`, `overwrite`, `storage`, `work_dir` and the
    limits on a worker do not. Raises ConfigError for a value that cannot be.

    layout: how the source is laid out, one of LAYOUTS; None: told by what is there.   base_path: what relative paths of
        metadata start from; None: the folder of the source.

    media_columns: further media of each sample and the columns that name their files: {"control": "control_video"};
        "reference?" takes rows without one, "image:", "video:" or "mask:" before a name says what it is.

    where: a condition that rows must meet, "aesthetic > 5 and motion > 0.2", as `where=` of a loader: on the metadata's
        columns, text (the caption) and source, and on width, height, num_frames, fps, duration_seconds and aspect_ratio
        of the source. Rows of which it is not true, or not known, are rejections; one on metadata alone saves probing.

    clips: "copy" stores each source file as it is; "native" stores it at its bucket's size, encoded for fast decoding;
        "text" takes metadata without any file: each row with a caption is a sample of a dataset of texts.
    hdr: "refuse" PQ and HLG, or "allow" them, as they are.   verify: "decode" decodes every frame of a source, so that
        damage is a rejection; "probe" one key frame. None: "decode" for native, which has no other; "probe" for copies.

    storage: how buckets are reached, of the source and of the dataset.   work_dir: of a dataset in a bucket: the local
        folder of what is unfinished (clips that are encoded, tars, what was probed); None: in the user's caches.

    fps, fps_rule: at which rate clips are read, a FrameRate's: "resample" (each frame the source's nearest in time),
        "cap" or "fix_frame_rate"; None: every frame, or what bucket_config says. Copies keep their frames, and readers
        choose among them; native clips have those alone, and know "resample" only.
    Only for native clips: codec, crf, gop: as `Encoding` has them.   max_clip_seconds: longer sources are cut into
        windows, each a sample.
        min_psnr: clips with a lower PSNR-Y, in decibels, are rejected.
    """

    metadata: str | Path | None = None
    layout: str | None = None
    base_path: str | Path | None = None
    video_column: str | None = None
    caption_column: str | Sequence[str] | None = None
    caption_weight_column: str | None = None
    caption_lines: bool = False
    media_columns: Mapping[str, str] = field(default_factory=dict)
    where: str | None = None
    buckets: tuple[Bucket, ...] | None = None
    resolution: tuple[str, ...] = ()
    num_frames: tuple[int, ...] = ()
    multiple: int = 16
    min_ar: float | Fraction | None = None
    max_ar: float | Fraction | None = None
    num_ar_buckets: int | None = None
    max_pixels: int | None = None
    height: int | None = None
    width: int | None = None
    max_frames: int | None = None
    frame_rule: str | None = None
    bucket_config: BucketConfig | str | Path | None = None
    policy: Mapping[str, Any] = field(default_factory=dict)
    assign: str | None = None
    clips: str = "copy"
    codec: str | None = None
    crf: float | None = None
    gop: int | None = None
    fps: float | Fraction | None = None
    fps_rule: str | None = None
    max_clip_seconds: float | None = None
    min_psnr: float | None = None
    verify: str | None = None
    hdr: str = "refuse"
    val_fraction: float = 0.0
    shard_size_bytes: int = 512 * 10**6
    seed: int = 0
    workers: int = field(default_factory=available_cpus)
    overwrite: bool = False
    max_clip_bytes: int = 2 * 2**30
    probe_timeout_seconds: float = 60.0
    encode_timeout_seconds: float = 4 * 3600.0
    worker_memory_bytes: int = 4 * 2**30
    storage: StorageOptions | Mapping[str, Any] = field(default_factory=StorageOptions)
    work_dir: str | Path | None = None
    config: BucketConfig = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "storage", StorageOptions.of(self.storage))
        # Read once: a file that changes meanwhile changes nothing.
        object.__setattr__(self, "config", bucket_config_of(self))
        check_model(self.config, self.frame_rate)
        limits: tuple[tuple[str, float, float, float], ...] = (
            ("shard_size_bytes", self.shard_size_bytes, MIN_SHARD_BYTES, 2**50),
            ("workers", self.workers, 1, MAX_WORKERS),
            ("seed", self.seed, 0, 2**63 - 1),
            ("max_clip_bytes", self.max_clip_bytes, 1, 8 * 2**30 - 1),
            ("worker_memory_bytes", self.worker_memory_bytes, 2**28, 2**60),
        )
        for name, value, least, most in limits:
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ConfigError(f"{name}={value!r}: allowed are the integers {least} to {most}")
        if not 0 <= self.val_fraction < 1:
            raise ConfigError(f"val_fraction={self.val_fraction!r}: allowed is 0 to below 1, as 0.01")
        for name in ("probe_timeout_seconds", "encode_timeout_seconds"):
            if not 0 < getattr(self, name) <= 7 * 86400:
                raise ConfigError(f"{name}={getattr(self, name)!r}: allowed is above 0 to {7 * 86400}")
        check_caption_options(self.caption_column, self.caption_weight_column, self.caption_lines)
        if self.where is not None and (not isinstance(self.where, str) or not self.where.strip()):
            raise ConfigError(
                f"where={self.where!r}: expected a condition, as 'aesthetic > 5 and motion > 0.2', or None"
            )
        _ = self.media
        self._check_clips()

    def _check_clips(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                named = ", ".join(str(choice) for choice in allowed if choice)
                raise ConfigError(f"{name}={getattr(self, name)!r}: allowed are {named}")
        if self.is_text:
            self._check_text()
        if not self.is_native:
            for name in _NATIVE_ONLY:
                value = getattr(self, name)
                if value is not None:
                    stores = "stores files as they are" if self.clips == "copy" else "has no files"
                    raise ConfigError(
                        f"{name}={_shown(value)} stands beside clips={self.clips!r}, which {stores}; "
                        f"give clips='native' (--clips native), or leave {name} out"
                    )
            return
        if self.frame_rate.rule not in ("native", "resample"):
            raise ConfigError(
                f"fps_rule={self.frame_rate.rule!r} stands beside clips='native', whose frames are those nearest "
                "in time; take 'resample', or clips='copy'"
            )
        if self.verify == "probe":
            raise ConfigError(
                "verify='probe' stands beside clips='native': encoding decodes every frame; leave verify out"
            )
        if self.max_clip_seconds is not None and not 0 < self.max_clip_seconds <= 86400:
            raise ConfigError(f"max_clip_seconds={self.max_clip_seconds!r}: allowed is above 0 to 86400, as 20")
        if self.min_psnr is not None and not 0 < self.min_psnr <= 100:
            raise ConfigError(f"min_psnr={self.min_psnr!r}: allowed is above 0 to 100 decibels, as 35")
        for bucket in () if self.config.is_dynamic else self.table.candidates:
            if bucket.height not in _NATIVE_SIDES or bucket.width not in _NATIVE_SIDES:
                raise ConfigError(
                    f"bucket {bucket.id} is {bucket.width}x{bucket.height}; sides of native clips are even, from 16 to "
                    f"{_NATIVE_SIDES[-1]}: choose another size, or clips='copy'"
                )
        _ = self.encoding, self.rate

    def _check_text(self) -> None:
        for name in ("video_column", "media_columns", "verify", "base_path"):
            value = getattr(self, name)
            if value:
                raise ConfigError(
                    f"{name}={value!r} stands beside clips='text', which has no files; leave one of them out"
                )
        if self.caption_column == "" or self.caption_lines:
            raise ConfigError(
                "clips='text' makes samples of captions alone: leave caption_column='' and caption_lines out"
            )

    @property
    def own_storage(self) -> StorageOptions:
        """How this process reaches object stores."""
        return StorageOptions.of(self.storage)

    @property
    def worker_storage(self) -> StorageOptions:
        """How each worker does: all of them together keep to the limits."""
        whole = self.own_storage
        return replace(
            whole,
            max_requests=max(1, whole.max_requests // self.workers),
            max_bytes_in_flight=max(MAX_RANGE_BYTES, whole.max_bytes_in_flight // self.workers),
        )

    @cached_property
    def media(self) -> tuple[MediaColumn, ...]:
        """Further media of each sample."""
        return media_columns(self.media_columns)

    @property
    def is_native(self) -> bool:
        return self.clips == "native"

    @property
    def is_text(self) -> bool:
        """Whether samples have no picture."""
        return self.clips == "text"

    @property
    def needs_timing(self) -> bool:
        """Whether it matters when each frame of a source is shown."""
        is_timed = self.rate is not None or self.max_clip_seconds is not None
        return (self.is_native and is_timed) or bool(self.media_columns)

    @cached_property
    def encoding(self) -> Encoding:
        """How native clips are encoded."""
        return Encoding(self.codec or "h264", self.crf, self.gop or 0)

    @cached_property
    def rate(self) -> Fraction | None:
        """The frame rate that native clips are resampled to; None: their source's, as that of copies always is."""
        return self.frame_rate.fps if self.is_native else None

    @cached_property
    def frame_rate(self) -> FrameRate:
        """At which rate clips are read."""
        if self.fps is None:
            return self.config.frame_rate
        return rate_asked(self.fps, self.fps_rule)

    @property
    def limits(self) -> Limits:
        """What is taken in of a source."""
        return replace(LIMITS, allow_hdr=self.hdr == "allow")

    @property
    def table(self) -> BucketTable:
        """The buckets that clips are assigned to; ConfigError where sizes follow the clips."""
        return self.config.table

    def encoding_json(self) -> dict[str, Any]:
        """All that decides the bytes of a native clip but its source and size."""
        return {
            **self.encoding.to_json(),
            "fps": None if self.rate is None else str(self.rate),
            "versions": encoder_versions(),
        }

    def to_json(self) -> dict[str, Any]:
        """What of the options decides the dataset's content, for the manifest. What is not asked for is left out."""
        value = {
            **buckets_json(self.config),
            "clips": self.clips,
            "max_clip_bytes": self.max_clip_bytes,
            "seed": self.seed,
            "shard_size_bytes": self.shard_size_bytes,
            "val_fraction": self.val_fraction,
        }
        if self.hdr != "refuse":
            value["hdr"] = self.hdr
        if self.where is not None:
            value["where"] = self.where
        if self.media:
            value["media"] = [str(medium) for medium in self.media]
        if not self.is_native:
            return {**value, "verify": "decode"} if self.verify == "decode" else value
        own = {"max_clip_seconds": self.max_clip_seconds, "min_psnr": self.min_psnr}
        return {
            **value,
            "encoding": self.encoding_json(),
            **{name: asked for name, asked in own.items() if asked is not None},
        }


def _shown(value: object) -> str:
    return str(value) if isinstance(value, Fraction) else repr(value)
