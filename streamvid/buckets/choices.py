"""Which buckets a clip may go to, with what probability each: as exact fractions, and as a walk with given draws."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from streamvid.buckets.bucket import Bucket
from streamvid.buckets.classes import Candidates


@dataclass(frozen=True, slots=True)
class ClipFacts:
    """What is known of a source, or of a window of it.

    num_frames: as stored, before a frame rate rule takes some of them. height, width: pixels after rotation. fps: its
    average rate, None where unknown. seconds: from its first frame to the end of its last, None where unknown.
    """

    num_frames: int
    height: int
    width: int
    fps: float | None = None
    seconds: Fraction | None = None
    is_image: bool = False


@dataclass(frozen=True, slots=True)
class Choices:
    """The buckets that a clip may go to, each with its probability, in the order in which they are asked.

    The probabilities sum to at most 1; with what is missing the clip goes nowhere. `reason` says why, `kind` in a
    word: too-few-frames, too-small, too-short-for-its-size, no-image-bucket, no-video-bucket, max-upscale, max-crop or
    probability. Both are empty where every clip goes somewhere.
    """

    options: tuple[tuple[Bucket, Fraction], ...]
    reason: str = ""
    kind: str = ""

    def draw(self, u: Fraction | float) -> Bucket | None:
        """The bucket that a number, uniform from 0 to below 1, falls on; None for "nowhere"."""
        end = Fraction(0)
        for bucket, probability in self.options:
            end += probability
            if u < end:
                return bucket
        return None

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All that have a probability above 0."""
        return tuple(bucket for bucket, _ in self.options)

    @property
    def rest(self) -> Fraction:
        """The probability of no bucket."""
        return 1 - sum((probability for _, probability in self.options), Fraction(0))


def exact_choices(groups: Iterable[Candidates]) -> dict[Bucket, Fraction]:
    """Each bucket's probability, those of 0 left out. Stops where every clip has found its place."""
    found: dict[Bucket, Fraction] = {}
    arriving = Fraction(1)
    for group in groups:
        here, leaving = arriving, Fraction(0)
        for bucket in group.buckets:
            keep = group.keep_of(bucket)
            tried = here * (1 - (keep.skip or 0))
            here -= tried
            if taken := tried * keep.accept:
                found[bucket] = found.get(bucket, Fraction(0)) + taken
            leaving += tried - taken
            if not here:  # shorter ones are asked for nothing
                break
        arriving = here + leaving
        if not arriving:
            break
    return found


def walk(groups: Iterable[Candidates], uniforms: Iterator[float], is_image: bool) -> Bucket | None:
    """The bucket that Open-Sora 2 gives a clip whose draws are `uniforms`: as many are taken as there, in order."""
    for group in groups:
        for bucket in group.buckets:
            keep = group.keep_of(bucket)
            if keep.skip is not None and (keep.skip >= 1 or next(uniforms) <= float(keep.skip)):
                continue
            # An image costs a draw even where all are taken.
            if (keep.accept >= 1 and not is_image) or next(uniforms) <= float(keep.accept):
                return bucket
            break
    return None
