"""Bucket configuration: the buckets, and the rule that assigns clips to them.

buckets | opensora | resolution x num_frames | size (height, width or max_pixels)     declared buckets
    └─ ratios, multiple ─┴─► classes of sizes, largest area first
ClipFacts ─ frame_rate ─► frames ─ policy, keep probabilities ─► Choices: buckets with exact probabilities
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from math import inf
from typing import Literal

from streamvid.buckets.bucket import MAX_NUM_FRAMES, Bucket, parse_bucket
from streamvid.buckets.classes import (
    Candidates,
    Choices,
    ClipFacts,
    Shape,
    SizeClass,
    candidates,
    exact_choices,
    size_class,
    walk,
)
from streamvid.buckets.frames import FrameRate, FrameRule
from streamvid.buckets.geometry import MAX_SIDE, check_multiple, dynamic_size
from streamvid.buckets.model import ModelRule
from streamvid.buckets.opensora import OpenSora, OpenSoraConfig
from streamvid.buckets.policy import Policy
from streamvid.buckets.ratios import Ratios
from streamvid.buckets.table import BucketTable, why_none
from streamvid.config import check_options, option, require_integer
from streamvid.errors import ConfigError

_DIFFSYNTH_RULE = FrameRule(4, 1)
_MAX_KNOWN = 1 << 16


@dataclass(frozen=True)
class SizeRule:
    """One size for all clips, or sizes that depend on each clip's own size, as in DiffSynth-Studio.

    height, width: size of all clips, in pixels.
    max_pixels: maximum number of pixels per frame. Each clip keeps its own size, but larger clips are scaled down to
        this number of pixels, and each side is rounded down to a multiple of `multiple`.
    max_frames: maximum frame count; shorter clips are trimmed to the largest count that the frame rule (4k+1 by
        default) allows.
    """

    max_pixels: int | None = option(
        None,
        help="Maximum number of pixels per frame; larger clips are scaled down.",
        metavar="N",
        minimum=1,
        maximum=MAX_SIDE**2,
    )
    height: int | None = option(None, help="Height of all clips, in pixels.", metavar="PX", minimum=1, maximum=MAX_SIDE)
    width: int | None = option(None, help="Width of all clips, in pixels.", metavar="PX", minimum=1, maximum=MAX_SIDE)
    max_frames: int | None = option(
        None,
        help="Maximum frame count; requires --max-pixels, or --height and --width.",
        metavar="N",
        minimum=1,
        maximum=MAX_NUM_FRAMES,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if (self.height is None) != (self.width is None):
            alone, missing = ("height", "width") if self.width is None else ("width", "height")
            raise ConfigError(
                f"{alone}={getattr(self, alone)} requires {missing}; set both for one fixed size, or max_pixels for "
                "sizes that depend on each clip's shape"
            )


@dataclass(frozen=True)
class PresetInfo:
    """Origin of a shipped configuration, for information only.

    own_choice: names or globs of buckets that streamvid chose and that do not come from `source`.
    """

    name: str = ""
    source: str = ""
    notes: str = ""
    own_choice: tuple[str, ...] = ()


@dataclass(frozen=True)
class BucketConfig:
    """Buckets, and the rule that assigns clips to them. Use one of these options to declare the buckets:

    buckets: explicit buckets, as `Bucket` or as text ("832x480@81").
    opensora: buckets in Open-Sora format, with keep probabilities and batch sizes.
    resolution, num_frames: named resolutions and frame counts; each ratio of each resolution gets one bucket per frame
        count.
    size: one size (height and width), or each clip's own size up to max_pixels; requires max_frames or num_frames.

    Other options:
    ratios: rule that converts resolutions to sizes, and the divisor of every side.
    frame_rate: frame rate at which clips are read, and the rule that selects the frames.
    frame_rule: rule for every frame count except 1.
    model: model that must accept every bucket.
    assign: "draw" stores a clip in one bucket, drawn once; "all" stores it in each bucket to which it may be assigned.
    For invalid options, raises a ConfigError that names the field and its value.
    """

    buckets: tuple[Bucket, ...] = option(
        (),
        help="Explicit buckets, such as '832x480@81,480x832@81', or '2s,5s' for audio.",
        metavar="WxH@F,...",
        group="",
    )
    opensora: OpenSoraConfig | None = None
    resolution: tuple[str, ...] = option((), help="Named resolutions.", metavar="LIST", group="", shown_default="256px")
    num_frames: tuple[int, ...] = option(
        (), help="Frame counts; include 1 to accept images.", metavar="LIST", group="", shown_default="1,17,33"
    )
    size: SizeRule = option(default_factory=SizeRule)
    ratios: Ratios = option(default_factory=Ratios)
    frame_rate: FrameRate = option(default_factory=FrameRate, flag="")
    frame_rule: FrameRule | None = option(None, help="Rule for frame counts, such as 4k+1.", metavar="RULE")
    model: ModelRule | None = None
    policy: Policy = option(default_factory=Policy)
    assign: Literal["draw", "all"] = option(
        "draw",
        help="Buckets per clip: one, drawn when sharding; or all that match, with one drawn per epoch.",
    )
    about: PresetInfo = option(default_factory=PresetInfo, flag="")

    def __post_init__(self) -> None:
        check_options(self)
        self._take_text()
        _check_fields(self)
        _check_buckets(self)

    def _take_text(self) -> None:
        """Parse values given as text, and convert lists to tuples."""
        if self.frame_rule is not None:
            object.__setattr__(self, "frame_rule", FrameRule.of(self.frame_rule))
        given = [parse_bucket(b, self.multiple) if isinstance(b, str) else b for b in self.buckets]
        object.__setattr__(self, "buckets", tuple(given))
        for name in ("resolution", "num_frames"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def multiple(self) -> int:
        """Required divisor of every side, in pixels."""
        return self.ratios.multiple

    @property
    def is_dynamic(self) -> bool:
        """True if sizes depend on the clips, so that the list of buckets is not known in advance."""
        return self.size.max_pixels is not None

    @cached_property
    def table(self) -> BucketTable:
        """Distinct buckets that accept clips. Raises ConfigError if sizes depend on the clips (max_pixels)."""
        if self.is_dynamic:
            raise ConfigError(
                f"max_pixels={self.size.max_pixels}: there is no list of buckets, because sizes depend on the clips; "
                "set buckets or resolution instead"
            )
        return BucketTable(self._buckets)

    @property
    def batch_sizes(self) -> dict[str, int]:
        """Mapping from bucket id to samples per rank per step. Empty if `bucket_config` does not set batch sizes."""
        return {} if self._opensora is None else dict(self._opensora.batch_sizes)

    def choices(self, facts: ClipFacts) -> Choices:
        """Return the buckets to which a clip may be assigned, with exact probabilities."""
        is_timed = self.frame_rate.rule not in ("native", "cap") and not facts.is_image
        if is_timed and _rate(facts) is None and facts.seconds is None:
            reason = f"the clip's duration is unknown, but frame_rate rule {self.frame_rate.rule} requires it"
            return Choices((), reason, "unknown-duration")
        return self.fit(self._num_frames(facts), facts.height, facts.width, facts.is_image)

    def fit(self, num_frames: int, height: int, width: int, is_image: bool = False) -> Choices:
        """Return the choices for a clip that has `num_frames` frames at the target rate."""
        # Frames beyond those of the longest bucket that the clip can fill do not matter if there is such a bucket.
        place = bisect_right(self._frame_counts, num_frames)
        found = self._fit(self._frame_counts[place - 1] if place else num_frames, height, width, is_image)
        return found if found.options or not place else self._fit(num_frames, height, width, is_image)

    def _fit(self, *shape: int) -> Choices:
        if shape not in self._known:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            num_frames, height, width, is_image = shape
            self._known[shape] = self._find(Shape(num_frames, height, width, bool(is_image), self.spare_frames))
        return self._known[shape]

    @cached_property
    def _known(self) -> dict[tuple[int, ...], Choices]:
        """Cache of choices by clip shape. Most clips in a dataset have one of a few shapes."""
        return {}

    @cached_property
    def _frame_counts(self) -> list[int]:
        """Frame counts at which a video becomes long enough for additional buckets, in ascending order."""
        counts = set(self.counts)
        if not self.is_dynamic:
            counts = {one.num_frames for group in self._classes for size in group.sizes for one in size.buckets}
        return sorted(count + self.spare_frames for count in counts)

    def _find(self, clip: Shape) -> Choices:
        if min(clip.height, clip.width) < 1:
            return Choices(
                (), (f"the size is {clip.width}x{clip.height}; width and height must be at least 1"), "too-small"
            )
        classes = self._classes_for(clip)
        if not classes:
            scaled = f"scaled to at most max_pixels={self.size.max_pixels}"
            reason = f"{clip.width}x{clip.height}, {scaled}, has a side shorter than multiple={self.multiple}"
            return Choices((), reason, "too-small")
        groups = tuple(candidates(classes, clip, self._policy))
        if not groups:
            kind, reason = why_none(classes, clip, self._policy)
            return Choices((), reason, kind)
        found = tuple(exact_choices(groups).items())
        rest = Choices(found).rest
        if not found:
            reason = "all buckets that the clip fits have keep probability 0 in bucket_config; raise a probability"
        else:
            reason = f"the clip was excluded at random: the keep probabilities exclude {float(rest):.4g} of such clips"
        return Choices(found, reason, "probability") if rest else Choices(found)

    def walk(self, facts: ClipFacts, uniforms: Iterator[float]) -> Bucket | None:
        """Return the bucket that Open-Sora 2 would assign to the clip if it drew the numbers in `uniforms`."""
        clip = Shape(self._num_frames(facts), facts.height, facts.width, facts.is_image, self.spare_frames)
        return walk(self._candidates(clip), uniforms, facts.is_image)

    @cached_property
    def spare_frames(self) -> int:
        """Number of frames that a video needs beyond its bucket's count: 1 with Open-Sora 1 rules, 0 otherwise."""
        return int(self.opensora is not None and self.opensora.is_v1)

    @property
    def keeps_all(self) -> bool:
        """True if every keep probability is 1."""
        keeps = [keep for group in self._classes for keep in group.keep.values()]
        return all(keep.accept == 1 and not keep.skip for keep in keeps)

    def check_rate(self, rate: FrameRate) -> None:
        """Raise ConfigError unless the model accepts the buckets and `rate`, the frame rate at which clips are read."""
        if self.model is not None and self.is_dynamic:
            # __post_init__ has checked the sizes and frame counts, which depend on the clips.
            self.model.check_rate(rate)
        elif self.model is not None:
            self.model.check_all(self.table.buckets, rate)

    def _num_frames(self, facts: ClipFacts) -> int:
        if facts.is_image:
            return 1
        seconds = facts.seconds
        rate = _rate(facts)
        if seconds is None and rate is not None:
            seconds = facts.num_frames / Fraction(rate)
        return self.frame_rate.num_frames(facts.num_frames, rate, seconds)

    def _candidates(self, clip: Shape) -> Iterator[Candidates]:
        return candidates(self._classes_for(clip), clip, self._policy)

    def _classes_for(self, clip: Shape) -> tuple[SizeClass, ...]:
        """Return the classes for a clip. The result is empty if the clip is smaller than the smallest possible size."""
        if self.size.max_pixels is None:
            return self._classes
        height, width = dynamic_size(clip.height, clip.width, self.size.max_pixels, self.multiple)
        return (_one_size(height, width, self.counts),) if min(height, width) else ()

    @cached_property
    def _classes(self) -> tuple[SizeClass, ...]:
        return self.table.classes if self._opensora is None else self._opensora.classes

    @cached_property
    def _opensora(self) -> OpenSora | None:
        return None if self.opensora is None else self.opensora.read(self.ratios)

    @property
    def _buckets(self) -> tuple[Bucket, ...]:
        if self.buckets:
            return self.buckets
        if self._opensora is not None:
            return self._opensora.buckets
        if self.size.height is not None and self.size.width is not None:
            return tuple(Bucket(count, self.size.height, self.size.width) for count in self.counts)
        return tuple(
            Bucket(count, height, width, resolution, ratio)
            for resolution in self.resolution
            for ratio, (height, width) in self.ratios.of(resolution).items()
            for count in self.num_frames
        )

    @property
    def short_clip_rule(self) -> FrameRule:
        """Rule for trimming clips that have fewer than max_frames frames."""
        return self.frame_rule or (_DIFFSYNTH_RULE if self.model is None else self.model.frame_rule)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Frame counts of a configuration that declares its buckets with `size`."""
        if self.size.max_frames is None:
            return self.num_frames
        rule = self.short_clip_rule
        return tuple(count for count in range(1, self.size.max_frames + 1) if count == 1 or rule.allows(count))

    @cached_property
    def _policy(self) -> Policy:
        is_sized = self.is_dynamic or self.size.height is not None
        return replace(self.policy, min_area=Fraction(0)) if is_sized and self.policy.min_area is None else self.policy


def _rate(facts: ClipFacts) -> float | None:
    """Return the frame rate, or None if the rate is unknown or invalid. Metadata may contain any number."""
    return facts.fps if facts.fps is not None and 0 < facts.fps < inf else None


@lru_cache(maxsize=4096)
def _one_size(height: int, width: int, counts: tuple[int, ...]) -> SizeClass:
    return size_class([Bucket(count, height, width) for count in counts], {})


def _check_fields(config: BucketConfig) -> None:
    """Raise ConfigError if a field is missing or invalid, or if two fields cannot be combined."""
    form = _form(config)
    _check_counts(config, form)
    if form not in ("bucket_config", "resolution"):
        for name in ("tables", "min_ar", "max_ar", "num_ar_buckets"):
            if getattr(config.ratios, name):
                shown = "ratios" if name == "tables" else name
                raise ConfigError(
                    f"{shown} cannot be combined with {form}; omit {shown}, or replace {form} with resolution"
                )
    _check_numbers(config)


def _check_buckets(config: BucketConfig) -> None:
    """Raise ConfigError for a bucket that the frame rule or the model does not accept."""
    if config.is_dynamic:
        _check_dynamic(config)
        return
    for bucket in config.table.buckets:
        if config.frame_rule is not None and not bucket.is_image:
            config.frame_rule.check(bucket.num_frames, f"bucket {bucket.id}")
        if config.model is not None:
            config.model.check(bucket)
    if config.policy.frames == "longest" and not config.keeps_all:
        raise ConfigError(
            "policy frames='longest' cannot be combined with keep probabilities below 1, because a clip that is not "
            "kept moves on to the next resolution; use another frames policy, or set all keep probabilities to 1"
        )


def _form(config: BucketConfig) -> str:
    """Return the name of the option that declares the buckets.

    Raises ConfigError unless the configuration uses exactly one of the options that declare buckets.
    """
    ways = {
        "buckets": bool(config.buckets),
        "bucket_config": config.opensora is not None,
        "resolution": bool(config.resolution),
        "max_pixels": config.size.max_pixels is not None,
        "height and width": config.size.height is not None,
    }
    given = [name for name, is_given in ways.items() if is_given]
    if len(given) != 1:
        found = f"{' and '.join(given)} cannot be combined" if given else "no buckets are given"
        raise ConfigError(
            f"{found}; set exactly one of buckets (such as 832x480@81), bucket_config, resolution with num_frames, "
            "height with width, or max_pixels"
        )
    return given[0]


def _check_counts(config: BucketConfig, form: str) -> None:
    counts = {"num_frames": config.num_frames or None, "max_frames": config.size.max_frames}
    given = [name for name, value in counts.items() if value is not None]
    if form in ("buckets", "bucket_config"):
        if given:
            raise ConfigError(
                f"{given[0]}={counts[given[0]]!r} cannot be combined with {form}, which has its own frame counts; "
                f"omit {given[0]}"
            )
        return
    if form == "resolution" and given != ["num_frames"]:
        raise ConfigError("resolution requires num_frames, such as (1, 17, 33), and cannot be combined with max_frames")
    if len(given) != 1:
        raise ConfigError(
            f"{form} with {' and '.join(given) or 'neither num_frames nor max_frames'}: set exactly one of "
            "num_frames, such as (17, 81), and max_frames, such as 81 (frame_rule then determines the length of "
            "shorter clips)"
        )


def _check_numbers(config: BucketConfig) -> None:
    for count in config.num_frames:
        require_integer("num_frames", count, 1, MAX_NUM_FRAMES)
    for name, side in (("height", config.size.height), ("width", config.size.width)):
        if side is not None:
            check_multiple(name, side, config.multiple)
    if config.size.max_frames is not None:
        config.short_clip_rule.check(config.size.max_frames, "max_frames")


def _check_dynamic(config: BucketConfig) -> None:
    field = "num_frames" if config.num_frames else "max_frames"
    for count in reversed(config.counts):
        if config.frame_rule is not None and count > 1:
            config.frame_rule.check(count, field)
        if config.model is not None:
            config.model.check_num_frames(count, f"{field} for {config.model.name}")
    if config.model is not None and config.multiple % config.model.multiple:
        raise ConfigError(
            f"multiple={config.multiple} with max_pixels: {config.model.name} requires sides that are multiples of "
            f"{config.model.multiple}; set multiple to {config.model.multiple}"
        )
