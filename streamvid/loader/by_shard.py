"""Delivery of a dataset shard by shard: all samples in stored order, as a loader delivers them at each visit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from streamvid.buckets.batch_size import batch_sizes
from streamvid.config import options_of
from streamvid.dataset.manifest import ShardInfo
from streamvid.dataset.reader import Dataset
from streamvid.errors import ConfigError, SampleError
from streamvid.loader.batch.batch import Batch
from streamvid.loader.delivery.audio import with_audio_plan
from streamvid.loader.loader import VideoLoader
from streamvid.loader.mix import DataArguments, DatasetConfig, open_mix
from streamvid.loader.options import LimitOptions, OutputOptions
from streamvid.loader.stores import Stores
from streamvid.loader.view.model_rule import common_rule, rule_of
from streamvid.loader.view.view import ViewOptions
from streamvid.loader.world import default_num_workers
from streamvid.plan import World

_OF_PLANS = {"accumulate", "groups", "num_epochs", "schedule", "shuffle", "split", "sync", "tail", "where", "world"}


@dataclass(frozen=True)
class ByShard:
    """Shard-by-shard delivery of a dataset. Samples from all splits are delivered, without caption dropout.

    source: config of the dataset, with an open Dataset as its URL.
    options: VideoLoader's arguments, except for batch sizes and for arguments that only select, order or distribute
        samples, such as `where`.
    batch_sizes: maps bucket ids to fixed batch sizes, so that every reader gets the same batches from a shard.
    audio_fps: maps (split, bucket id) to the frame rate that determines the number of audio samples, so that this
        number is the same in a shard as in the whole split; empty without audio.
    """

    source: DatasetConfig
    options: Mapping[str, Any]
    batch_sizes: Mapping[str, int]
    audio_fps: Mapping[tuple[str, str], Fraction]

    @staticmethod
    def of(sources: Sequence[DatasetConfig], options: Mapping[str, Any]) -> ByShard:
        """Create the delivery from VideoLoader's arguments.

        Arguments that only select, order or distribute samples are ignored, and so are the dataset's view and filter.
        Raises ConfigError for more than one dataset, a dataset that contains only text, or invalid batch sizes.
        """
        source, kept = sources[0], {name: value for name, value in options.items() if name not in _OF_PLANS}
        assert isinstance(source.url, Dataset)
        dataset = source.url.without_view()
        if len(sources) > 1:
            raise ConfigError(
                f"dataset lists {len(sources)} datasets, but only one dataset can be encoded at a time; encode each "
                "dataset separately"
            )
        if dataset.manifest.clips == "text":
            raise ConfigError(
                f"dataset {dataset.url} contains only texts, which cannot be encoded; use a dataset of videos or images"
            )
        tokens = kept.pop("max_tokens_per_batch", None)
        rule = rule_of(kept.get("preset")) or (None if tokens is None else common_rule([dataset.manifest]))
        sizes = batch_sizes(dataset.manifest.buckets, kept.pop("batch_size", None), tokens, rule)
        workers = kept.get("num_workers")
        kept["num_workers"] = default_num_workers() if workers is None else workers
        source = replace(source, url=dataset, where=None, captions=replace(source.captions, dropout=0.0))
        return ByShard(source, kept, sizes, _audio_fps(source, dataset, kept))

    @property
    def dataset(self) -> Dataset:
        """Dataset to deliver."""
        assert isinstance(self.source.url, Dataset)
        return self.source.url

    def view_facts(self) -> Mapping[str, Any]:
        """Return, as JSON, all values that determine a sample's tensors; see `batch.features.view_facts`."""
        with self._loader(self.dataset.shards[0], 0, 1) as loader:
            return loader.view_facts[0]

    def batches(self, shard: ShardInfo, num_visits: int) -> Iterator[tuple[list[str], list[Batch | None]]]:
        """Yield (keys, batches): the keys of consecutive samples, and one batch of these samples per visit.

        Samples with `is_repeat` replace bad samples (BAD-1). A batch is None if its samples and all later samples in
        the shard are bad. Raises SampleError if a shard has more bad samples than max_bad_fraction allows.
        """
        keys, first = self.dataset.samples(shard, ["key"]).column("key").to_pylist(), 0
        limits = options_of(LimitOptions, self.options.get("limits"), "limits")
        allowed = limits.max_bad_fraction * max(1000, len(keys))
        with ExitStack() as stack:
            loaders = [stack.enter_context(self._loader(shard, visit, num_visits)) for visit in range(num_visits)]
            for batches in itertools.zip_longest(*map(_until_all_are_bad, loaders)):
                last = first + next(len(batch.sample_keys) for batch in batches if batch is not None)
                yield keys[first:last], list(batches)
                first = last
        if len(keys) - first > allowed:
            raise SampleError(
                f"{self.dataset.url}: all {len(keys) - first} samples in {shard.path} from {keys[first]} onward are "
                f"bad, which is more than limits.max_bad_fraction={limits.max_bad_fraction} allows; copy the dataset "
                "again, or raise limits.max_bad_fraction"
            )
        if first < len(keys):
            yield keys[first:], [None] * num_visits

    def _loader(self, shard: ShardInfo, visit: int, num_visits: int) -> VideoLoader:
        output = options_of(OutputOptions, self.options.get("output"), "output")
        if output.audio is not None:
            fps = self.audio_fps[shard.split, shard.bucket_id]
            output = replace(output, audio=replace(output.audio, fps=fps))
        workers = self.options["num_workers"] // num_visits
        loader = VideoLoader(
            replace(self.source, url=self.dataset.only(shard)),
            **{**self.options, "num_workers": workers, "output": output},
            batch_size=self.batch_sizes[shard.bucket_id],
            split=shard.split,
            shuffle="none",
            tail="uneven",
            world=World(),
        )
        loader.set_epoch(visit)
        return loader


def _audio_fps(source: DatasetConfig, dataset: Dataset, options: Mapping[str, Any]) -> dict[tuple[str, str], Fraction]:
    output = options_of(OutputOptions, options.get("output"), "output")
    view = options_of(ViewOptions, options.get("view"), "view")
    found: dict[tuple[str, str], Fraction] = {}
    for split in dataset.shards.splits if output.audio is not None else ():
        mix = open_mix(DataArguments(source, split, view=view), Stores.of(options.get("storage")))
        plan = with_audio_plan(mix, output.audio, view, is_decoded=output.decode).audio
        assert plan is not None
        found |= {(split, bucket_id): shape.fps for bucket_id, shape in plan.shapes.items()}
    return found


def _until_all_are_bad(loader: VideoLoader) -> Iterator[Batch]:
    try:
        yield from loader
    except SampleError:
        # Raised for a sample that no other sample of its shard can replace; errors with other causes are passed on.
        if not loader.substituted or loader.substituted[-1].substitute_key is not None:
            raise
