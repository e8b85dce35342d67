"""Which bucket takes a clip.

Buckets compete in classes, one for a named resolution and one for explicit sizes of about one area, from the largest
area down. A class passes over a source much smaller than itself; else the ratio nearest to the source's wins, and of
that size the most frames that the clip can fill. With every frame count in every size this is the order of Open-Sora 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamvid.buckets.bucket import Bucket
from streamvid.buckets.classes import Shape, SizeClass, candidates, classes_of
from streamvid.buckets.geometry import DEFAULT_MULTIPLE, aspect_table
from streamvid.buckets.policy import Policy
from streamvid.buckets.reasons import why_none
from streamvid.errors import ConfigError, NoBucketError

_DEFAULT_POLICY = Policy()


@dataclass(frozen=True)
class BucketTable:
    """The buckets that a dataset is cut into, and the rule that assigns clips to them.

    `candidates` may name one (resolution, T, H, W) under several nominal ratios, as coarse aspect tables do: the first
    stands for all in `buckets`, and every ratio takes part in the assignment. ConfigError for none or a repeated one.
    """

    candidates: tuple[Bucket, ...]
    classes: tuple[SizeClass, ...] = field(init=False, repr=False, compare=False)

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        listed = tuple(buckets)
        if not listed:
            raise ConfigError("buckets is empty: give at least one, as '832x480@81'")
        ids = [bucket.id for bucket in listed]
        repeated = sorted({name for name in ids if ids.count(name) > 1}) if len(set(ids)) < len(ids) else []
        if repeated:
            raise ConfigError(f"buckets names {', '.join(repeated)} more than once; keep one of each")
        object.__setattr__(self, "candidates", listed)
        object.__setattr__(self, "classes", classes_of([bucket for bucket in listed if not bucket.is_text]))

    @classmethod
    def from_resolutions(
        cls, resolutions: Sequence[str], num_frames: Sequence[int], multiple: int = DEFAULT_MULTIPLE
    ) -> BucketTable:
        """Every ratio of every resolution with every frame count; 1 among `num_frames` makes buckets for images."""
        return cls(
            Bucket(frames, height, width, resolution, ratio)
            for resolution in resolutions
            for ratio, (height, width) in aspect_table(resolution, multiple).items()
            for frames in num_frames
        )

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The distinct buckets, in the order given."""
        first: dict[tuple[str | None, tuple[int, int, int]], Bucket] = {}
        for bucket in self.candidates:
            first.setdefault((bucket.resolution, bucket.shape), bucket)
        return tuple(first.values())

    def to_json(self) -> list[dict[str, Any]]:
        """Plain list of all candidates, from which `from_json` makes a table that assigns alike."""
        return [bucket.to_json() for bucket in self.candidates]

    @classmethod
    def from_json(cls, rows: Iterable[dict[str, Any]]) -> BucketTable:
        """Table of what `to_json` gave; ConfigError for anything unfit."""
        return cls(Bucket.from_json(row) for row in rows)

    def assign(self, num_frames: int, height: int, width: int, is_image: bool = False) -> Bucket:
        """The bucket for a clip of `num_frames` frames (at the target fps) of height x width pixels (after rotation).

        Images take one-frame buckets and nothing else does; an image's `num_frames` is not looked at. NoBucketError
        says why there is none; ConfigError if a number is less than 1.
        """
        for name, value in (("num_frames", num_frames), ("height", height), ("width", width)):
            if value < 1:
                raise ConfigError(f"{name}={value}: a clip has at least 1")
        clip = Shape(num_frames, height, width, is_image)
        for found in candidates(self.classes, clip, _DEFAULT_POLICY):
            return found.buckets[0]
        kind, reason = why_none(self.classes, clip, _DEFAULT_POLICY)
        raise NoBucketError(reason, kind=kind)
