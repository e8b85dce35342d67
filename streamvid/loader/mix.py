"""The datasets of a loader as its plan counts them: each with its split, its filter and its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from streamvid.buckets.batch_size import tokens_of
from streamvid.buckets.bucket import Bucket
from streamvid.buckets.frames import FrameRate
from streamvid.buckets.model import ModelRule
from streamvid.dataset.draws import OF_BUCKET, OF_BUCKET_PREFIXES
from streamvid.dataset.features.sidecar import Sidecar
from streamvid.dataset.features.tables import SidecarShard
from streamvid.dataset.filter.filter import Filter, count_matches, parse_filter
from streamvid.dataset.manifest import ShardInfo
from streamvid.dataset.reader import Dataset, open_dataset
from streamvid.dataset.shard_table import ShardRows, largest_clip
from streamvid.errors import ConfigError, DatasetError
from streamvid.loader.model_rule import common_rule
from streamvid.loader.view.media import Medium
from streamvid.loader.view.text import CaptionChoice, TextOptions, TextRule, text_rule
from streamvid.loader.view.view import ViewOptions
from streamvid.plan import hash64, hash_text
from streamvid.plan.draws import DrawSet, draw_sets
from streamvid.plan.mix import MixBy, exact_fraction, repeats_of_weights

_DATASET = 6  # keeps a dataset's own seed apart from other uses of the loader's
_SEED_MASK = (1 << 63) - 1
_KEPT_SHARDS = 256


@dataclass(frozen=True, slots=True)
class DatasetConfig:
    """One of the datasets of a loader.

    num_repeats: how often an epoch takes each sample: 2, 0.5, "3/2". weight: instead, its share of all weights.
    where: a condition on its columns; samples that do not meet it are left out.
    caption_column: the column that `batch.text` comes from, or several with weights, {"short": 1, "long": 3}: one of
        those that a sample has is drawn for each delivery.   caption_choice: "draw" one of several captions of a sample
        by their weights, or take the "first".
    caption_template: a text over columns, "{text} {fps:.0f} FPS{?, {motion:.0f} motion score.}", {fps} being the rate
        of what is delivered; a part {? ...} vanishes where it names a missing value, and so does all of it; :d rounds
        down.   caption_part_dropout: the probability that a part is left out, each on its own.
    caption_prefix: put before it; caption_dropout: the probability, 0 to 1, that a delivery has an empty text.
    name: what its random choices hang on; None: its place in the list.

    Raises ConfigError for values that cannot be.
    """

    url: str | Path | Dataset
    num_repeats: float | str | Fraction = 1
    weight: float | str | Fraction | None = None
    where: str | None = None
    caption_column: str | Mapping[str, float] = "text"
    caption_prefix: str = ""
    caption_dropout: float = 0.0
    name: str | None = None
    caption_choice: CaptionChoice = "draw"
    caption_template: str | None = None
    caption_part_dropout: float = 0.0

    def __post_init__(self) -> None:
        exact_fraction("num_repeats", self.num_repeats)
        if self.weight is not None:
            exact_fraction("weight", self.weight)
            if self.num_repeats != 1:
                raise ConfigError(f"num_repeats={self.num_repeats!r} with weight={self.weight!r}: give one of them")
        _ = self.text_options

    @property
    def text_options(self) -> TextOptions:
        """Its fields about captions."""
        return TextOptions(
            self.caption_column, self.caption_choice, self.caption_template, self.caption_prefix, self.caption_dropout,
            self.caption_part_dropout,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class MixPart:
    """One dataset of a loader. Holds nothing of the loader, so that its threads keep no loader alive.

    seed: what SAMPLE-1 draws from: the loader's seed, or for one of several datasets a seed of its own.
    shards: bucket id → shards of the split that have samples which pass the filter, in plan order.
    counts: bucket id → how many samples of each of those shards pass.
    columns: the caller's name of a column → its name in this index.   media: what else is delivered of a sample.
    draws: bucket id → the draw sets that shards of it are part of.
    rate: at which its clips are read.   view: what a delivery shows of one.
    sidecar: what is delivered instead of clips.
    """

    number: int
    dataset: Dataset
    seed: int
    shards: Mapping[str, Sequence[ShardInfo]]
    counts: Mapping[str, npt.NDArray[np.int64]]
    filter: Filter | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    text: TextRule = field(default_factory=TextRule)
    name: str = "0"
    draws: Mapping[str, Sequence[DrawSet]] = field(default_factory=dict)
    rate: FrameRate = field(default_factory=FrameRate)
    view: ViewOptions = field(default_factory=ViewOptions)
    media: tuple[Medium, ...] = ()
    sidecar: Sidecar | None = None
    _recent: dict[tuple[str, int], ShardInfo] = field(default_factory=dict, repr=False)

    def shard_info(self, bucket_id: str, number: int) -> ShardInfo:
        """A shard of `shards`; the last ones asked for are kept, as making one out of the table takes a while."""
        name = (bucket_id, number)
        found = self._recent.get(name)
        if found is None:
            if len(self._recent) >= _KEPT_SHARDS:
                self._recent.clear()
            found = self._recent[name] = self.shards[bucket_id][number]
        return found

    @property
    def source(self) -> Dataset | Sidecar:
        """What clips are read from, or what is delivered instead."""
        return self.sidecar or self.dataset

    @property
    def is_remote(self) -> bool:
        """Whether its index or its clips are far."""
        return not (self.dataset.store.is_local and self.source.store.is_local)

    @property
    def num_samples(self) -> int:
        """Samples of a pass, on average: those of the split that pass the filter, and of drawn ones their share."""
        return round(sum(map(self.samples_a_pass, self.counts), Fraction(0)))

    def samples_a_pass(self, bucket_id: str) -> Fraction:
        """The same of one bucket."""
        counts, sets = self.counts[bucket_id], self.draws.get(bucket_id, ())
        drawn = [(int(counts[one.shards].sum()), one.probability) for one in sets]
        return int(counts.sum()) - sum((stored * (1 - share) for stored, share in drawn), Fraction(0))

    @property
    def max_clip_bytes(self) -> int:
        """The largest clip of the shards, or the largest of what is delivered instead."""
        if self.sidecar is not None:
            return self.sidecar.max_member_bytes
        return max((largest_clip(shards) for shards in self.shards.values()), default=0)


@dataclass(frozen=True)
class Mix:
    """All datasets of a loader. buckets: by id; see `_common_ids`."""

    parts: tuple[MixPart, ...]
    repeats: tuple[Fraction, ...]
    buckets: Mapping[str, Bucket]

    @property
    def max_clip_bytes(self) -> int:
        """The largest clip."""
        return max(part.max_clip_bytes for part in self.parts)

    def is_numeric(self, column: str) -> bool:
        """Whether a column, by the caller's name, holds numbers or truth values in all datasets."""
        return all(part.dataset.is_numeric(part.columns[column]) for part in self.parts)

    def identity(self) -> list[dict[str, Any]]:
        """What positions depend on, of each dataset, as plain JSON."""
        return [
            {
                "plan_fingerprint": part.dataset.manifest.fingerprints.plan,
                "where": part.filter.text if part.filter else None,
                "num_repeats": str(repeats),
            }
            | ({"name": part.name} if len(self.parts) > 1 else {})
            | _later_values(part)
            for part, repeats in zip(self.parts, self.repeats, strict=True)
        ]


def _later_values(part: MixPart) -> dict[str, str]:
    """Which samples pass a filter depends on its columns, and `annotate` may have given these other values."""
    digest = part.dataset.columns_digest(part.filter.columns) if part.filter else None
    return {} if digest is None else {"where_columns": digest}


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One slot of a batch: which stored sample, at which visit.

    shard: number of the shard in `part.shards[bucket_id]`. place: number of the sample among those of the shard that
    pass the part's filter.
    """

    part: MixPart
    bucket_id: str
    shard: int
    place: int
    visit: int
    is_repeat: bool

    @property
    def shard_info(self) -> ShardInfo:
        return self.part.shard_info(self.bucket_id, self.shard)

    @property
    def file(self) -> ShardInfo | SidecarShard:
        """The tar that its clip is in, or what is delivered instead; of `part.source`."""
        sidecar = self.part.sidecar
        return self.shard_info if sidecar is None else sidecar.shard(self.shard_info)

    @property
    def shown_visit(self) -> int:
        """The visit whose frames and caption are delivered: of a sidecar one of those that it has."""
        sidecar = self.part.sidecar
        return self.visit if sidecar is None else self.visit % sidecar.manifest.num_visits


def substitutes(sample: SampleRequest) -> Iterator[tuple[int, int]]:
    """(shard, place) of what may take a bad sample's place, in order (BAD-1): the rest of its shard in a circle,
    then the shards that follow in the bucket, in a circle; each other sample once."""
    counts = sample.part.counts[sample.bucket_id]
    for step in range(len(counts)):
        shard = (sample.shard + step) % len(counts)
        num_samples = int(counts[shard])
        first = sample.place + 1 if step == 0 else 0
        for place in range(num_samples - 1 if step == 0 else num_samples):
            yield shard, (first + place) % num_samples


def as_configs(datasets: object) -> list[DatasetConfig]:
    """What a caller may give as the datasets: one or several of URLs, open Datasets, DatasetConfigs."""
    several: Sequence[Any] = (
        datasets if isinstance(datasets, Sequence) and not isinstance(datasets, str) else [datasets]
    )
    if not several:
        raise ConfigError("dataset=[]: give at least one")
    for one in several:
        if not isinstance(one, str | Path | Dataset | DatasetConfig):
            raise ConfigError(
                f"dataset={one!r}: expected a path, a URL, an open Dataset or a DatasetConfig, or a list of them"
            )
    configs = [one if isinstance(one, DatasetConfig) else DatasetConfig(one) for one in several]
    names = [config.name or str(number) for number, config in enumerate(configs)]
    if len(set(names)) < len(names):
        raise ConfigError(f"dataset: names {names} are not all different; give each DatasetConfig a name of its own")
    weighted = sum(config.weight is not None for config in configs)
    if weighted not in (0, len(configs)):
        raise ConfigError(f"dataset: {weighted} of {len(configs)} have a weight; give all of them one, or none")
    return configs


def open_mix(
    configs: Sequence[DatasetConfig],
    *,
    split: str,
    where: str | None,
    columns: Sequence[str],
    seed: int,
    samples_per_epoch: int | None,
    by: MixBy,
    open_url: Callable[[str | Path], Dataset] = open_dataset,
    view: ViewOptions | None = None,
    model: ModelRule | None = None,
) -> Mix:
    """Open all datasets. `where` holds for each, besides its own condition. model: whose tokens weights count."""
    buckets: dict[str, Bucket] = {}
    parts = []
    for number, config in enumerate(configs):
        dataset = config.url if isinstance(config.url, Dataset) else open_url(config.url)
        name = config.name or str(number)
        own_seed = seed if len(configs) == 1 else hash64(seed, _DATASET, hash_text(name)) & _SEED_MASK
        shards, counts, chosen = _select(dataset, split, _both(where, config.where))
        drawn = _draws(dataset, shards, counts, chosen)
        own = [dataset.manifest.bucket(bucket_id) for bucket_id in shards]
        common = _common_ids(own, buckets, name)
        manifest, shown = dataset.manifest, view or ViewOptions()
        shown.check(manifest.clips, own, str(dataset.url))
        # Native clips were resampled when they were encoded.
        rate = FrameRate() if manifest.clips == "native" else manifest.frame_rate
        parts.append(
            MixPart(
                number, dataset, own_seed, {common[k]: v for k, v in shards.items()},
                {common[k]: v for k, v in counts.items()}, chosen, {name: dataset.column(name) for name in columns},
                text_rule(config.text_options, dataset), name, {common[k]: v for k, v in drawn.items()},
                rate, shown,
            )
        )  # fmt: skip
    repeats = _repeats(configs, parts, buckets, samples_per_epoch, by, model)
    return Mix(tuple(parts), tuple(repeats), dict(sorted(buckets.items())))


def _repeats(
    configs: Sequence[DatasetConfig],
    parts: Sequence[MixPart],
    buckets: Mapping[str, Bucket],
    samples_per_epoch: int | None,
    by: MixBy,
    model: ModelRule | None,
) -> list[Fraction]:
    """How often an epoch takes each dataset's samples."""
    if configs[0].weight is not None:
        weights = [exact_fraction("weight", config.weight) for config in configs]
        if by == "tokens":  # else datasets of different models may be mixed
            model = model or common_rule(part.dataset.manifest for part in parts)
        tokens = [_tokens(part, buckets, model) for part in parts]
        return repeats_of_weights(weights, [part.num_samples for part in parts], tokens, samples_per_epoch, by)
    if samples_per_epoch is not None:
        raise ConfigError(
            f"samples_per_epoch={samples_per_epoch!r} goes with weights: give each DatasetConfig one, or leave it out"
        )
    return [exact_fraction("num_repeats", config.num_repeats) for config in configs]


def _common_ids(own: Sequence[Bucket], buckets: dict[str, Bucket], dataset: str) -> dict[str, str]:
    """A dataset's bucket id → the loader's; `buckets`, the loader's so far, takes in those that are new.

    Buckets of one shape share an id, so that they mix within a batch; those of one dataset stay apart, as they are in
    its manifest. An id that stands for another shape already gives way to the explicit one of the size.
    """
    common = {
        bucket.id: bucket.id for bucket in own if bucket.id in buckets and buckets[bucket.id].shape == bucket.shape
    }
    for bucket in own:
        if bucket.id in common:
            continue
        taken = set(common.values())
        known = [name for name, other in buckets.items() if other.shape == bucket.shape and name not in taken]
        mine = bucket if bucket.id not in buckets else replace(bucket, resolution=None, aspect_ratio=None)
        if not known and mine.id in buckets:
            raise ConfigError(
                f"dataset {dataset}: bucket {bucket.id} has another shape than the one of that name in a dataset "
                f"before it, and its explicit name {mine.id} is taken; put this dataset first"
            )
        common[bucket.id] = known[0] if known else mine.id
        buckets.setdefault(common[bucket.id], mine)
    return common


def _both(general: str | None, own: str | None) -> str | None:
    return f"({general}) and ({own})" if general is not None and own is not None else general or own


def _tokens(part: MixPart, buckets: Mapping[str, Bucket], model: ModelRule | None) -> int:
    """Of a pass."""
    counts = (part.samples_a_pass(name) * tokens_of(buckets[name], model) for name in part.counts)
    return round(sum(counts, Fraction(0)))


def _draws(
    dataset: Dataset,
    shards: Mapping[str, ShardRows],
    counts: Mapping[str, npt.NDArray[np.int64]],
    chosen: Filter | None,
) -> dict[str, list[DrawSet]]:
    """The draw sets of each bucket, over those shards alone."""
    if not dataset.manifest.draws:
        return {}
    names = chosen.columns if chosen else ()
    own = [name for name in names if name in OF_BUCKET or name.startswith(OF_BUCKET_PREFIXES)]
    if chosen is not None and own:
        raise ConfigError(
            f"where={chosen.text!r}: column {own[0]} differs between the buckets that store a clip of {dataset.url}, "
            "which draws one of them in each epoch; ask for what is the clip's own, as source_width"
        )
    numbers = {name: rows.table.number[rows.rows] for name, rows in shards.items()}
    return draw_sets(dataset.manifest.draws, numbers, counts)


def _select(
    dataset: Dataset, split: str, where: str | None
) -> tuple[dict[str, ShardRows], dict[str, npt.NDArray[np.int64]], Filter | None]:
    """Shards of a split by bucket, in the order that plans count them, and how many of their samples pass."""
    table = dataset.shards
    mine = table.select(split)
    if not mine:
        there = ", ".join(map(repr, sorted(table.splits)))
        raise DatasetError(f"split={split!r} has no samples in {dataset.url}; it has {there or 'no samples at all'}")
    for bucket_id in mine:
        dataset.manifest.bucket(bucket_id)
    chosen = None if where is None else parse_filter(where, dataset)
    passing = table.num_samples if chosen is None else count_matches(dataset, table, chosen)
    kept = {bucket_id: rows[passing[rows] > 0] for bucket_id, rows in mine.items()}
    # Of new buckets of one shape in several datasets, the one whose samples come first gives its id.
    kept = dict(sorted(((name, rows) for name, rows in kept.items() if len(rows)), key=lambda item: int(item[1][0])))
    if not kept:
        everything = sum(int(table.num_samples[rows].sum()) for rows in mine.values())
        raise ConfigError(
            f"where={where!r} admits none of the {everything} samples of split {split!r} in {dataset.url}; loosen it"
        )
    return (
        {bucket_id: ShardRows(table, rows) for bucket_id, rows in kept.items()},
        {bucket_id: passing[rows] for bucket_id, rows in kept.items()},
        chosen,
    )
