"""Datasets of a loader, each with its filter, its settings and the samples that the plan uses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from streamvid.buckets.batch_size import tokens_of
from streamvid.buckets.bucket import Bucket
from streamvid.buckets.frames import FrameRate
from streamvid.buckets.model import ModelRule
from streamvid.config import check_options, option, options_of
from streamvid.dataset.draws import OF_BUCKET, OF_BUCKET_PREFIXES
from streamvid.dataset.features.sidecar import Sidecar
from streamvid.dataset.features.tables import SidecarShard
from streamvid.dataset.filter.filter import Filter, both, count_matches, parse_filter
from streamvid.dataset.manifest import Manifest, ShardInfo
from streamvid.dataset.reader import Dataset
from streamvid.dataset.shard_table import ShardRows, largest_clip
from streamvid.dataset.versions.open import DatasetRef
from streamvid.errors import ConfigError, DatasetError
from streamvid.loader.stores import Stores
from streamvid.loader.view.audio import AudioPlan
from streamvid.loader.view.media import Medium, find_media
from streamvid.loader.view.model_rule import common_rule
from streamvid.loader.view.text import TextOptions, TextRule, text_rule
from streamvid.loader.view.view import ViewOptions
from streamvid.plan import hash64, hash_text
from streamvid.plan.draws import DrawSet, draw_sets
from streamvid.plan.mix import MixBy, exact_fraction, repeats_of_weights
from streamvid.storage import StorageOptions

_DATASET = 6  # keeps a dataset's own seed apart from other uses of the loader's seed
_SEED_MASK = (1 << 63) - 1
_KEPT_SHARDS = 256


@dataclass(frozen=True, slots=True)
class DatasetConfig:
    """Configuration of one dataset in a loader."""

    url: str | Path | Dataset = option(help="Local path, file:// or s3:// URL, or an open Dataset.")
    num_repeats: float | str | Fraction = option(1, help="Deliveries per sample per epoch, such as 2, 0.5 or '3/2'.")
    weight: float | str | Fraction | None = option(
        None, help="Weight of this dataset in the mix, as an alternative to num_repeats."
    )
    where: str | None = option(None, help="Condition on columns that selects samples from this dataset.")
    name: str | None = option(
        None,
        help="Name from which the seed for the dataset's random choices is derived.",
        shown_default="its position in the list",
    )
    captions: TextOptions = option(default_factory=TextOptions, help="Options for the samples' texts.")

    def __post_init__(self) -> None:
        check_options(self)
        exact_fraction("num_repeats", self.num_repeats)
        if self.weight is not None:
            exact_fraction("weight", self.weight)
            if self.num_repeats != 1:
                raise ConfigError(
                    f"num_repeats={self.num_repeats!r} cannot be combined with weight={self.weight!r}; omit one of them"
                )


Datasets: TypeAlias = str | Path | Dataset | DatasetConfig | Mapping[str, Any]
Features: TypeAlias = str | Path | Sidecar


@dataclass(frozen=True, slots=True)
class DataArguments:
    """VideoLoader's arguments for input data, with the same names.

    versions: version to open for each dataset. None selects the version that the dataset's URL names. An empty tuple is
        the same as None for every dataset.
    """

    dataset: Datasets | Sequence[Datasets]
    split: str = "train"
    where: str | None = None
    columns: Sequence[str] = ()
    media: Sequence[str] = ()
    features: Features | Sequence[Features | None] | None = None
    view: ViewOptions = field(default_factory=ViewOptions)
    storage: StorageOptions = field(default_factory=StorageOptions)
    versions: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class Subset:
    """Samples that a loader uses from one dataset: all samples in a split that pass a filter.

    shards: maps each bucket id to the shards that contain these samples, in plan order.
    counts: maps each bucket id to the number of these samples in each of its shards.
    draws: maps each bucket id to the draw sets that contain these shards.
    """

    shards: Mapping[str, Sequence[ShardInfo]]
    counts: Mapping[str, npt.NDArray[np.int64]]
    draws: Mapping[str, Sequence[DrawSet]] = field(default_factory=dict)
    filter: Filter | None = None
    _recent: dict[tuple[str, int], ShardInfo] = field(default_factory=dict, repr=False)

    def shard_info(self, bucket_id: str, number: int) -> ShardInfo:
        """Return the ShardInfo for shard `number` of a bucket. Recent results are cached."""
        name = (bucket_id, number)
        found = self._recent.get(name)
        if found is None:
            if len(self._recent) >= _KEPT_SHARDS:
                self._recent.clear()
            found = self._recent[name] = self.shards[bucket_id][number]
        return found

    @property
    def num_samples(self) -> int:
        """Mean number of samples per pass. A sample in a draw set contributes its probability of being drawn."""
        return round(sum(map(self.samples_per_pass, self.counts), Fraction(0)))

    def samples_per_pass(self, bucket_id: str) -> Fraction:
        """Return the mean number of samples per pass in one bucket."""
        counts, sets = self.counts[bucket_id], self.draws.get(bucket_id, ())
        drawn = [(int(counts[one.shards].sum()), one.probability) for one in sets]
        return int(counts.sum()) - sum((stored * (1 - share) for stored, share in drawn), Fraction(0))

    @property
    def max_clip_bytes(self) -> int:
        """Size in bytes of the largest clip."""
        return max((largest_clip(shards) for shards in self.shards.values()), default=0)


@dataclass(frozen=True, eq=False)
class MixPart:
    """One dataset in a loader. It does not reference the loader, so that threads do not keep the loader alive.

    number: number of the part, unique in the loader.
    seed: seed for the samples' random choices (SAMPLE-1). With several datasets, it is derived from the loader's
        seed; with one dataset, it is the loader's seed.
    columns: maps each column name used by the caller to the column name in this dataset's index.
    rate: rule for the frame rate at which clips are read.
    media: conditioning inputs to deliver.
    sidecar: precomputed features to deliver instead of clips.
    later: number of the part with a later version of the same dataset; None for the version that the loader uses.
    audio: audio to deliver; None if no audio is delivered.
    """

    number: int
    dataset: Dataset
    seed: int
    subset: Subset
    columns: Mapping[str, str] = field(default_factory=dict)
    text: TextRule = field(default_factory=TextRule)
    name: str = "0"
    rate: FrameRate = field(default_factory=FrameRate)
    view: ViewOptions = field(default_factory=ViewOptions)
    media: tuple[Medium, ...] = ()
    sidecar: Sidecar | None = None
    later: int | None = None
    audio: AudioPlan | None = None

    @property
    def source(self) -> Dataset | Sidecar:
        """Source of the clips, or of the features that replace the clips."""
        return self.sidecar or self.dataset

    @property
    def is_remote(self) -> bool:
        """True if the index, the clips or the features are in an object store."""
        return not (self.dataset.store.is_local and self.source.store.is_local)

    @property
    def max_clip_bytes(self) -> int:
        """Size in bytes of the largest clip, or of the largest features file that replaces a clip."""
        return self.subset.max_clip_bytes if self.sidecar is None else self.sidecar.max_member_bytes


@dataclass(frozen=True)
class Mix:
    """All datasets in a loader.

    repeats: deliveries per sample per epoch, for each dataset.
    buckets: maps the bucket ids of all datasets to buckets; see `_common_ids`.
    """

    parts: tuple[MixPart, ...]
    repeats: tuple[Fraction, ...]
    buckets: Mapping[str, Bucket]

    @property
    def max_clip_bytes(self) -> int:
        """Size in bytes of the largest clip, or of the largest features file that replaces a clip."""
        return max(part.max_clip_bytes for part in self.parts)

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions of the datasets."""
        return tuple(part.dataset.manifest.version for part in self.parts)

    @property
    def manifests(self) -> list[Manifest]:
        """Manifests of the datasets."""
        return [part.dataset.manifest for part in self.parts]

    @property
    def audio(self) -> AudioPlan | None:
        """Audio to deliver, or None if no audio is delivered. All datasets with pictures deliver the same audio."""
        return next((part.audio for part in self.parts if part.audio is not None), None)

    @property
    def sources(self) -> list[Dataset | Sidecar]:
        """All datasets and sidecars that are read."""
        return [one for part in self.parts for one in (part.dataset, part.sidecar) if one is not None]

    def is_numeric(self, column: str) -> bool:
        """Return whether a column requested by the caller contains numbers or booleans in all datasets."""
        return all(part.dataset.is_numeric(part.columns[column]) for part in self.parts)

    def identity(self) -> list[dict[str, str | None]]:
        """Return, for each dataset, the JSON-serializable values that determine which sample is at each position."""
        found = []
        for part, repeats in zip(self.parts, self.repeats, strict=True):
            chosen, fingerprint = part.subset.filter, part.dataset.manifest.fingerprints.samples
            where = chosen.text if chosen else None
            one = {"samples_fingerprint": fingerprint, "where": where, "num_repeats": str(repeats)}
            if len(self.parts) > 1:
                one["name"] = part.name
            # The samples that pass a filter depend on its columns, and `annotate` may have changed their values.
            digest = part.dataset.columns_digest(chosen.columns) if chosen else None
            if digest is not None:
                one["where_columns"] = digest
            found.append(one)
        return found


@dataclass(slots=True)
class SampleRequest:
    """One slot in a batch: a stored sample, and the number of its visit (see RandomChoices).

    shard: index of the shard in `part.subset.shards[bucket_id]`.
    place: index of the sample among the shard's samples that pass the part's filter.
    """

    part: MixPart
    bucket_id: str
    shard: int
    place: int
    visit: int
    is_repeat: bool

    @property
    def shard_info(self) -> ShardInfo:
        return self.part.subset.shard_info(self.bucket_id, self.shard)

    @property
    def file(self) -> ShardInfo | SidecarShard:
        """Tar in `part.source` that contains the clip or the features that replace the clip."""
        sidecar = self.part.sidecar
        return self.shard_info if sidecar is None else sidecar.shard(self.shard_info)

    @property
    def shown_visit(self) -> int:
        """Visit whose frames and caption are delivered. With precomputed features, this is one of the stored visits."""
        sidecar = self.part.sidecar
        return self.visit if sidecar is None else self.visit % sidecar.manifest.num_visits


def substitutes(sample: SampleRequest) -> Iterator[tuple[int, int]]:
    """Yield (shard, place) for each possible substitute for a bad sample, in the order in which they are tried (BAD-1).

    The other samples in the bad sample's shard come first, starting after the bad sample and wrapping around. The
    samples of the bucket's other shards follow, starting with the next shard and wrapping around.
    """
    counts = sample.part.subset.counts[sample.bucket_id]
    for step in range(len(counts)):
        shard = (sample.shard + step) % len(counts)
        num_samples = int(counts[shard])
        first = sample.place + 1 if step == 0 else 0
        for place in range(num_samples - 1 if step == 0 else num_samples):
            yield shard, (first + place) % num_samples


def configs_of(datasets: object) -> list[DatasetConfig]:
    """Return a config for each given dataset. Raises ConfigError for invalid values.

    datasets: a path, a URL, an open Dataset, a DatasetConfig or a mapping of its fields, or a list of these.
    """
    several: Sequence[Any] = datasets if isinstance(datasets, list | tuple) else [datasets]
    if not several:
        raise ConfigError("dataset=[]: must contain at least one dataset")
    configs = [_config(one, "dataset" if several is not datasets else f"dataset[{n}]") for n, one in enumerate(several)]
    names = [config.name or str(number) for number, config in enumerate(configs)]
    if len(set(names)) < len(names):
        raise ConfigError(f"dataset: the names {names} are not unique; give each DatasetConfig a unique name")
    weighted = sum(config.weight is not None for config in configs)
    if weighted not in (0, len(configs)):
        raise ConfigError(
            f"dataset: weight is set for {weighted} of {len(configs)} datasets; set it for all datasets or for none"
        )
    return configs


def open_configs(datasets: object, stores: Stores, versions: Sequence[int | None] = ()) -> list[DatasetConfig]:
    """Return the same configs as `configs_of`, with each URL replaced by an open dataset.

    versions: see DataArguments.
    Raises ConfigError for invalid values, and the same errors as `open_dataset`.
    """
    configs = configs_of(datasets)
    return [
        config if isinstance(config.url, Dataset) else replace(config, url=stores.open(config.url, version))
        for config, version in zip(configs, versions or [None] * len(configs), strict=True)
    ]


def can_change_version(config: DatasetConfig) -> bool:
    """Return True if the dataset was given as a URL without a version, so that other versions can be opened."""
    return not isinstance(config.url, Dataset) and DatasetRef.parse(config.url).is_newest


def _config(given: object, name: str) -> DatasetConfig:
    if isinstance(given, str | Path | Dataset):
        return DatasetConfig(given)
    if isinstance(given, Mapping) and "url" not in given:
        raise ConfigError(f"{name}={given!r} has no url; set url to the path or URL of a dataset")
    if given is None or not isinstance(given, Mapping | DatasetConfig):
        kinds = "a path, a URL, an open Dataset or a DatasetConfig (or a mapping of its fields)"
        several = ", or a list of these" if name == "dataset" else ""
        raise ConfigError(f"{name}={given!r}: must be {kinds}{several}")
    return options_of(DatasetConfig, given, name)


def open_mix(
    data: DataArguments,
    stores: Stores,
    *,
    seed: int = 0,
    samples_per_epoch: int | None = None,
    mix_by: MixBy = "samples",
    model: ModelRule | None = None,
) -> Mix:
    """Open all datasets, but not their features.

    model: rule for counting the tokens in weighted datasets.
    """
    configs = open_configs(data.dataset, stores, data.versions)
    buckets: dict[str, Bucket] = {}
    parts = [_open_part(number, config, data, len(configs) > 1, seed, buckets) for number, config in enumerate(configs)]
    media = find_media(data.media, [part.dataset for part in parts])
    parts = [replace(part, media=media) for part in parts]
    repeats = _repeats(configs, parts, buckets, samples_per_epoch, mix_by, model)
    return Mix(tuple(parts), tuple(repeats), dict(sorted(buckets.items())))


def _open_part(
    number: int, config: DatasetConfig, data: DataArguments, is_mixed: bool, seed: int, buckets: dict[str, Bucket]
) -> MixPart:
    dataset = config.url
    assert isinstance(dataset, Dataset)
    name, manifest = config.name or str(number), dataset.manifest
    shards, counts, chosen = _select(dataset, data.split, both(dataset.where, both(data.where, config.where)))
    drawn = _draws(dataset, shards, counts, chosen)
    own = [manifest.bucket(bucket_id) for bucket_id in shards]
    common = _common_ids(own, buckets, name)
    data.view.check(manifest.clips, own, str(dataset.url))
    return MixPart(
        number,
        dataset,
        seed=hash64(seed, _DATASET, hash_text(name)) & _SEED_MASK if is_mixed else seed,
        subset=Subset(
            {common[bucket_id]: rows for bucket_id, rows in shards.items()},
            {common[bucket_id]: numbers for bucket_id, numbers in counts.items()},
            {common[bucket_id]: sets for bucket_id, sets in drawn.items()},
            chosen,
        ),
        columns={column: dataset.column(column) for column in data.columns},
        text=text_rule(config.captions, dataset),
        name=name,
        # Native clips were resampled when they were encoded.
        rate=FrameRate() if manifest.clips == "native" else manifest.frame_rate,
        view=data.view,
    )


def _repeats(
    configs: Sequence[DatasetConfig],
    parts: Sequence[MixPart],
    buckets: Mapping[str, Bucket],
    samples_per_epoch: int | None,
    by: MixBy,
    model: ModelRule | None,
) -> list[Fraction]:
    """Return each dataset's number of deliveries per sample per epoch."""
    if configs[0].weight is not None:
        weights = [exact_fraction("weight", config.weight) for config in configs]
        if by == "tokens":  # else datasets of different models may be mixed
            model = model or common_rule(part.dataset.manifest for part in parts)
        each = [{name: part.subset.samples_per_pass(name) for name in part.subset.counts} for part in parts]
        tokens = [round(sum(n * tokens_of(buckets[name], model) for name, n in one.items())) for one in each]
        return repeats_of_weights(weights, [part.subset.num_samples for part in parts], tokens, samples_per_epoch, by)
    if samples_per_epoch is not None:
        raise ConfigError(
            f"schedule.samples_per_epoch={samples_per_epoch} requires weights; give each DatasetConfig a weight, or "
            "leave schedule.samples_per_epoch out"
        )
    return [exact_fraction("num_repeats", config.num_repeats) for config in configs]


def _common_ids(own: Sequence[Bucket], buckets: dict[str, Bucket], dataset: str) -> dict[str, str]:
    """Return a mapping from a dataset's bucket ids to the loader's bucket ids, and add new buckets to `buckets`.

    Buckets with the same shape in different datasets share an id, so that their samples mix within a batch. Buckets
    within one dataset stay separate. An id that another shape already uses is replaced by an explicit id that names the
    size.
    """
    common = {
        bucket.id: bucket.id for bucket in own if bucket.id in buckets and buckets[bucket.id].shape == bucket.shape
    }
    taken, names = set(common.values()), defaultdict[tuple[int, int, int], list[str]](list)
    for name, bucket in buckets.items():
        names[bucket.shape].append(name)
    for bucket in own:
        if bucket.id in common:
            continue
        known = [name for name in names[bucket.shape] if name not in taken]
        mine = bucket if bucket.id not in buckets else replace(bucket, resolution=None, aspect_ratio=None)
        if not known and mine.id in buckets:
            raise ConfigError(
                f"dataset {dataset}: bucket {bucket.id} differs in shape from the bucket with this id in a dataset "
                f"that is listed earlier, and the alternative id {mine.id} is also taken; list this dataset first"
            )
        common[bucket.id] = known[0] if known else mine.id
        buckets.setdefault(common[bucket.id], mine)
        taken.add(common[bucket.id])
    return common


def _draws(
    dataset: Dataset,
    shards: Mapping[str, ShardRows],
    counts: Mapping[str, npt.NDArray[np.int64]],
    chosen: Filter | None,
) -> dict[str, list[DrawSet]]:
    """Return the draw sets in each bucket. Only the selected shards are considered."""
    if not dataset.manifest.draws:
        return {}
    names = chosen.columns if chosen else ()
    own = [name for name in names if name in OF_BUCKET or name.startswith(OF_BUCKET_PREFIXES)]
    if chosen is not None and own:
        raise ConfigError(
            f"where={chosen.text!r}: {own[0]} differs between the buckets that store a clip in {dataset.url}, so it "
            "cannot select clips; use a property of the clip itself, such as source_width"
        )
    numbers = {name: rows.table.number[rows.rows] for name, rows in shards.items()}
    return draw_sets(dataset.manifest.draws, numbers, counts)


def _select(
    dataset: Dataset, split: str, where: str | None
) -> tuple[dict[str, ShardRows], dict[str, npt.NDArray[np.int64]], Filter | None]:
    """Return (shards, numbers of matching samples, filter) for a split.

    Both mappings have bucket ids as keys. Shards are in plan order, and each shard has one number of matching samples.
    """
    table = dataset.shards
    mine = table.select(split)
    if not mine:
        there = ", ".join(map(repr, sorted(table.splits)))
        raise DatasetError(f"split={split!r} has no samples in {dataset.url}; available splits: {there or 'none'}")
    for bucket_id in mine:
        dataset.manifest.bucket(bucket_id)
    chosen = None if where is None else parse_filter(where, dataset)
    passing = table.num_samples if chosen is None else count_matches(dataset, table, chosen)
    kept = {bucket_id: rows[passing[rows] > 0] for bucket_id, rows in mine.items()}
    # Buckets of the same shape are matched between datasets in the order of their first samples.
    kept = dict(sorted(((name, rows) for name, rows in kept.items() if len(rows)), key=lambda item: int(item[1][0])))
    if not kept:
        everything = sum(int(table.num_samples[rows].sum()) for rows in mine.values())
        raise ConfigError(
            f"where={where!r} matches none of the {everything} samples in split {split!r} of {dataset.url}; relax the "
            "condition"
        )
    return (
        {bucket_id: ShardRows(table, rows) for bucket_id, rows in kept.items()},
        {bucket_id: passing[rows] for bucket_id, rows in kept.items()},
        chosen,
    )
