"""A bucket configuration: which buckets there are, and by which rule clips go to them.

buckets | bucket_config | resolution x num_frames | height, width | max_pixels     what there is
    └─ ratios, multiple ─┴─► classes of sizes, largest area first
ClipFacts ─ frame_rate ─► frames ─ policy, keep probabilities ─► Choices: buckets with exact probabilities
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from math import inf
from pathlib import Path
from typing import Any

from streamvid.buckets.bucket import Bucket
from streamvid.buckets.checks import check_buckets, check_fields
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
from streamvid.buckets.geometry import dynamic_size
from streamvid.buckets.model import ModelRule
from streamvid.buckets.opensora import Form, OpenSora, read_form
from streamvid.buckets.policy import Policy
from streamvid.buckets.ratios import Ratios
from streamvid.buckets.table import BucketTable, why_none
from streamvid.errors import ConfigError

_DIFFSYNTH_RULE = FrameRule(4, 1)
_MAX_KNOWN = 1 << 16


@dataclass(frozen=True)
class BucketConfig:
    """Which buckets there are, in one of five ways, and how clips are assigned to them.

    buckets: explicit ones.
    bucket_config: Open-Sora's form (`opensora.py`); probabilities: opensora-v2 or opensora-v1.2, the meaning of pairs.
    resolution, num_frames: every ratio of every named resolution, with every frame count.
    height, width: one size, taken as it is; with max_frames or num_frames.
    max_pixels: each clip's own size, scaled down to so many pixels and rounded down to the multiple (DiffSynth-Studio).
        With max_frames a shorter clip takes as many of its frames as `frame_rule` allows (4k+1 where none is given).

    ratios: how resolutions become sizes, and what every side is a multiple of.   frame_rate: which of a clip's frames
    count.   frame_rule: what every frame count but 1 keeps.   model: which every bucket has to suit.
    assign: "draw": a clip is stored in one bucket, drawn once; "all": in each that it may go to.
    name, source, notes, own_choice: of a preset; they decide nothing.
    Raises ConfigError, naming field and value, for what cannot be.
    """

    buckets: tuple[Bucket, ...] = ()
    bucket_config: Form = field(default_factory=dict)
    resolution: tuple[str, ...] = ()
    num_frames: tuple[int, ...] = ()
    max_pixels: int | None = None
    height: int | None = None
    width: int | None = None
    max_frames: int | None = None
    ratios: Ratios = field(default_factory=Ratios)
    probabilities: str | None = None
    frame_rate: FrameRate = field(default_factory=FrameRate)
    frame_rule: FrameRule | None = None
    model: ModelRule | None = None
    policy: Policy = field(default_factory=Policy)
    assign: str = "draw"
    name: str = ""
    source: str = ""
    notes: str = ""
    own_choice: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        check_buckets(self)

    @property
    def multiple(self) -> int:
        """What every side is a multiple of, in pixels."""
        return self.ratios.multiple

    @property
    def is_dynamic(self) -> bool:
        """Whether sizes follow the clips, so that no list of buckets is known beforehand."""
        return self.max_pixels is not None

    @cached_property
    def table(self) -> BucketTable:
        """The distinct buckets that may take clips. ConfigError under max_pixels, where sizes follow the clips."""
        if self.is_dynamic:
            raise ConfigError(f"max_pixels={self.max_pixels} has no list of buckets: sizes follow the clips")
        return BucketTable(self._buckets)

    @property
    def batch_sizes(self) -> dict[str, int]:
        """Bucket id → samples a rank and step, where bucket_config gives them."""
        return dict(self._opensora.batch_sizes) if self.bucket_config else {}

    def choices(self, facts: ClipFacts) -> Choices:
        """Where a clip may go, with exact probabilities."""
        is_timed = self.frame_rate.rule not in ("native", "cap") and not facts.is_image
        if is_timed and _rate(facts) is None and facts.seconds is None:
            reason = f"has no known duration, which frame_rate rule {self.frame_rate.rule} needs"
            return Choices((), reason, "unknown-duration")
        return self.fit(self._num_frames(facts), facts.height, facts.width, facts.is_image)

    def fit(self, num_frames: int, height: int, width: int, is_image: bool = False) -> Choices:
        """`choices` of a clip that has so many frames at its target rate already."""
        clip = Shape(num_frames, height, width, is_image)
        if clip not in self._known:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[clip] = self._find(clip)
        return self._known[clip]

    @cached_property
    def _known(self) -> dict[Shape, Choices]:
        """Most clips of a dataset are of a few shapes."""
        return {}

    def _find(self, clip: Shape) -> Choices:
        if min(clip.height, clip.width) < 1:
            return Choices((), f"{clip.width}x{clip.height} has no pixels", "too-small")
        classes = self._classes_for(clip)
        if not classes:
            return Choices((), f"{clip.width}x{clip.height} has a side below multiple={self.multiple}", "too-small")
        groups = tuple(candidates(classes, clip, self._policy))
        if not groups:
            kind, reason = why_none(classes, clip, self._policy)
            return Choices((), reason, kind)
        found = tuple(exact_choices(groups).items())
        rest = Choices(found).rest
        if not found:
            reason = "could fill buckets whose keep probabilities in bucket_config are all 0; raise one of them"
        else:
            reason = f"was drawn to be left out, as {float(rest):.4g} of such clips by its keep probabilities"
        return Choices(found, reason, "probability") if rest else Choices(found)

    def walk(self, facts: ClipFacts, uniforms: Iterator[float]) -> Bucket | None:
        """The bucket that Open-Sora 2 gives the clip where its draws are `uniforms`, taken as many as there."""
        clip = Shape(self._num_frames(facts), facts.height, facts.width, facts.is_image)
        return walk(self._candidates(clip), uniforms, facts.is_image)

    @property
    def keeps_all(self) -> bool:
        """Whether no keep probability is below 1."""
        keeps = [keep for group in self._classes for keep in group.keep.values()]
        return all(keep.accept == 1 and not keep.skip for keep in keeps)

    def to_json(self) -> dict[str, Any]:
        """Plain fields, as a YAML file has them, without what is at its default; `from_json` reads them back."""
        from streamvid.buckets.document import to_fields

        return to_fields(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> BucketConfig:
        """BucketConfig of what `to_json` gave; ConfigError for anything unfit."""
        from streamvid.buckets.document import from_fields

        return from_fields(fields)

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
        """Empty where the clip is smaller than any size may be."""
        if self.max_pixels is None:
            return self._classes
        height, width = dynamic_size(clip.height, clip.width, self.max_pixels, self.multiple, None, None)
        return (_one_size(height, width, self.counts),) if min(height, width) else ()

    @cached_property
    def _classes(self) -> tuple[SizeClass, ...]:
        return self._opensora.classes if self.bucket_config else self.table.classes

    @cached_property
    def _opensora(self) -> OpenSora:
        return read_form(self.bucket_config, self.probabilities, self.ratios)

    @property
    def _buckets(self) -> tuple[Bucket, ...]:
        if self.buckets or self.bucket_config:
            return self.buckets or self._opensora.buckets
        if self.height is not None and self.width is not None:
            return tuple(Bucket(count, self.height, self.width) for count in self.counts)
        return tuple(
            Bucket(count, height, width, resolution, ratio)
            for resolution in self.resolution
            for ratio, (height, width) in self.ratios.of(resolution).items()
            for count in self.num_frames
        )

    @property
    def short_clip_rule(self) -> FrameRule:
        """What a clip shorter than max_frames is cut to."""
        return self.frame_rule or (_DIFFSYNTH_RULE if self.model is None else self.model.frame_rule)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Frame counts where one size, or none, is given."""
        if self.max_frames is None:
            return self.num_frames
        rule = self.short_clip_rule
        return tuple(count for count in range(1, self.max_frames + 1) if count == 1 or rule.allows(count))

    @cached_property
    def _policy(self) -> Policy:
        is_sized = self.is_dynamic or self.height is not None
        return replace(self.policy, min_area=Fraction(0)) if is_sized and self.policy.min_area is None else self.policy


def load_bucket_config(path: str | Path, overrides: Sequence[str] = ()) -> BucketConfig:
    """The configuration in a YAML file, or the preset of that name; of Open-Sora's own `.py`, its `bucket_config`.

    overrides: `field=value` each, the value in YAML. ConfigError names every mistake.
    """
    from streamvid.buckets.document import read_file  # which is built on this one

    return read_file(path, overrides)


def _rate(facts: ClipFacts) -> float | None:
    """What is no rate, as metadata may have it, is not known."""
    return facts.fps if facts.fps is not None and 0 < facts.fps < inf else None


@lru_cache(maxsize=4096)
def _one_size(height: int, width: int, counts: tuple[int, ...]) -> SizeClass:
    return size_class([Bucket(count, height, width) for count in counts], {})
