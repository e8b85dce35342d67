"""Bucket configuration in Open-Sora format.

    {"256px": {1: [1.0, 45], 33: [[1.0, 0.33], 12]}, "768px_ar16:9": {…}, "1024px_max": {…}}
       │       │     │    └ samples per rank per step, or null
       │       │     └ share of clips to keep: a number, or a pair of numbers
       │       └ frame count; 1 accepts images
       └ area; _max: only the ratio with the most pixels; _ar16:9: only this ratio

Versions of Open-Sora interpret pairs differently, so pairs require the option `probabilities`:

    opensora-v2     The second number is the share of clips that move on to the next lower frame count. A bucket with
                    T frames accepts videos with at least T frames.
    opensora-v1.2   The second number is the share of clips that do not move on. A bucket with T frames accepts
                    videos with at least T + 1 frames. The areas of 240p and 480p differ slightly. These rules also
                    apply to versions 1.1 and 1.3, and to their resolutions 256, 512, 1024 and 2048.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, TypeAlias, get_args

from streamvid.buckets.bucket import Bucket
from streamvid.buckets.classes import Keep, Sharing, SizeClass, by_area, size_class
from streamvid.buckets.geometry import ratio_fraction, resolution_name
from streamvid.buckets.ratios import Ratios, RatioTable
from streamvid.config import exact, require_integer
from streamvid.errors import ConfigError

Meaning: TypeAlias = Literal["opensora-v2", "opensora-v1.2"]
MEANINGS = get_args(Meaning)
_AREAS_OF_V1 = {"240p": 102240, "480p": 409920}
Form: TypeAlias = Mapping[str, Mapping[int, Sequence[Any]]]
"""Open-Sora format: resolution → frame count → [probability, batch size]."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Entry in `bucket_config` for one resolution and frame count."""

    keep: Keep
    batch_size: int | None


@dataclass(frozen=True)
class OpenSora:
    """Buckets parsed from a configuration in Open-Sora format.

    classes: size classes, sorted by area in descending order.
    buckets: all buckets that accept clips, each listed once per nominal ratio.
    batch_sizes: maps each bucket id to the number of samples per rank per step.
    """

    classes: tuple[SizeClass, ...]
    buckets: tuple[Bucket, ...]
    batch_sizes: Mapping[str, int]


@dataclass(frozen=True)
class OpenSoraConfig:
    """Buckets in Open-Sora format.

    bucket_config: nested mapping from resolution to frame count to [probability, batch size].
    probabilities: Open-Sora version that defines the meaning of probability pairs: "opensora-v2" or
        "opensora-v1.2".
    """

    bucket_config: Form
    probabilities: str | None = None

    def __post_init__(self) -> None:
        if self.probabilities is not None and self.probabilities not in MEANINGS:
            raise ConfigError(f"probabilities={self.probabilities!r}: must be one of {', '.join(MEANINGS)}")

    @property
    def is_v1(self) -> bool:
        """True if `probabilities` or a resolution name selects the rules of Open-Sora 1.1 to 1.3."""
        is_named = any(resolution_name(resolution) != resolution for resolution in map(_resolution, self.bucket_config))
        return self.probabilities == "opensora-v1.2" or (self.probabilities is None and is_named)

    def read(self, ratios: Ratios) -> OpenSora:
        """Build classes and buckets. Raises a ConfigError that names the invalid entry."""
        shared: Sharing = {}
        listed: dict[str, Bucket] = {}
        groups: list[SizeClass] = []
        sizes: dict[str, int] = {}
        meaning = "opensora-v1.2" if self.is_v1 else self.probabilities
        for name, by_frames in self.bucket_config.items():
            resolution, table = _sizes(name, ratios)
            entries = {frames: _entry(name, frames, value, meaning) for frames, value in by_frames.items()}
            if not entries:
                raise ConfigError(
                    f"bucket_config[{name!r}] has no frame counts; add frame counts, such as 33: [1.0, 12]"
                )
            buckets = [
                Bucket(frames, height, width, resolution, ratio)
                for ratio, (height, width) in table.items()
                for frames in entries
            ]
            keep = {frames: entry.keep for frames, entry in entries.items()}
            area = ratios.area(resolution)
            if self.is_v1 and "area" not in ratios.tables.get(resolution, {}):
                area = _AREAS_OF_V1.get(resolution, area)
            groups.append(size_class(buckets, shared, area, keep))
            for bucket in buckets:
                entry = entries[bucket.num_frames]
                if entry.keep.accept:
                    listed.setdefault(bucket.id, bucket)
                    _add_batch_size(sizes, shared[bucket.resolution, bucket.shape], entry.batch_size)
        if not listed:
            problem = "every probability is 0; raise at least one" if groups else "it is empty; add a resolution"
            raise ConfigError(f"bucket_config keeps no clips: {problem}")
        return OpenSora(by_area(groups), tuple(listed.values()), sizes)


def _resolution(name: str) -> str:
    return name.partition("_")[0]


def _sizes(name: str, ratios: Ratios) -> tuple[str, RatioTable]:
    """Return (resolution, ratio table). The table contains all ratios, or only the ratio that the name selects."""
    _, underscore, setting = name.partition("_")
    resolution = resolution_name(_resolution(name))
    table = ratios.of(resolution)
    if not underscore:
        return resolution, table
    if setting == "max":
        chosen = max(table, key=lambda ratio: table[ratio][0] * table[ratio][1])
    elif setting.startswith("ar"):
        chosen = setting[2:]
        ratio_fraction(chosen)
        if chosen not in table:
            raise ConfigError(
                f"bucket_config[{name!r}]: {resolution} has no ratio {chosen}; available: {', '.join(table)}"
            )
    else:
        raise ConfigError(
            f"bucket_config[{name!r}]: the suffix _{setting} is unknown; use {resolution}, {resolution}_max (the ratio "
            f"with the most pixels) or {resolution}_ar16:9 (one ratio)"
        )
    return resolution, {chosen: table[chosen]}


def _entry(name: str, frames: object, value: Any, meaning: str | None) -> Entry:
    where = f"bucket_config[{name!r}][{frames!r}]"
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise ConfigError(f"{where}={value!r}: must be [probability, batch size], such as [1.0, 12]")
    probability, batch_size = value
    keep = _keep(where, probability, meaning, is_image=frames == 1)
    if isinstance(batch_size, Sequence) and not isinstance(batch_size, str):
        raise ConfigError(
            f"{where}: the batch size {list(batch_size)!r} is a range for Open-Sora's search; use the number that "
            "the search found, or use null and set the loader's batch_size or max_tokens_per_batch"
        )
    if batch_size in (None, "None"):
        batch_size = None
    else:
        require_integer(f"{where}: batch size", batch_size, 1, 1 << 20)
    return Entry(keep, batch_size)


def _keep(where: str, probability: Any, meaning: str | None, is_image: bool) -> Keep:
    if not isinstance(probability, Sequence) or isinstance(probability, str):
        return Keep(_share(where, probability))
    if len(probability) != 2:
        raise ConfigError(f"{where}: probability {list(probability)!r} must be a number or a pair of numbers")
    if is_image:
        raise ConfigError(f"{where}: images need one probability, not the pair {list(probability)!r}")
    first, second = (_share(where, number) for number in probability)
    if meaning not in MEANINGS:
        raise ConfigError(
            f"{where}: the pair {list(probability)!r} is ambiguous with probabilities={meaning!r}; set probabilities "
            f"to opensora-v2 if {float(second):g} is the probability that a clip moves on to the next lower "
            "frame count, or to opensora-v1.2 if it is the probability that a clip stays at its frame count"
        )
    return Keep(first, second if meaning == "opensora-v2" else 1 - second)


def _share(where: str, value: object) -> Fraction:
    if value is None:
        raise ConfigError(f"{where}: probability=None is valid only for Open-Sora's evaluation; write 1.0 instead")
    share = exact(f"{where}: probability", value)
    if not 0 <= share <= 1:
        raise ConfigError(
            f"{where}: probability={value!r}: must be from 0 to 1; if this configuration is for Open-Sora's batch size "
            "search, write [1.0, N], where N is the batch size that the search found"
        )
    return share


def _add_batch_size(sizes: dict[str, int], bucket: Bucket, batch_size: int | None) -> None:
    if batch_size is None:
        return
    if sizes.setdefault(bucket.id, batch_size) != batch_size:
        raise ConfigError(
            f"bucket_config sets two batch sizes for bucket {bucket.id}, {sizes[bucket.id]} and {batch_size}, under "
            "names that overlap or share a size; keep only one of the batch sizes"
        )
