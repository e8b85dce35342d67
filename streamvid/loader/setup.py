"""What a VideoLoader is made of, worked out of its arguments before its first loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamvid.buckets.batch_size import batch_sizes
from streamvid.buckets.bucket import Bucket
from streamvid.buckets.config import BucketConfig
from streamvid.buckets.model import ModelRule
from streamvid.dataset.reader import Dataset
from streamvid.loader import arguments
from streamvid.loader.batch.batch import Layout, check_layout
from streamvid.loader.batch.device import DeviceStage
from streamvid.loader.batch.features import Sidecars, view_facts, with_sidecars
from streamvid.loader.batch.tokens import Tokenizer, check_tokenizer
from streamvid.loader.delivery.requests import Selection
from streamvid.loader.exchange import SharedBatchCheck
from streamvid.loader.mix import DatasetConfig, Mix, as_configs, open_mix
from streamvid.loader.model_rule import check_datasets, check_view, rule_of, token_rule
from streamvid.loader.stores import Stores, sources_of
from streamvid.loader.view.media import with_media
from streamvid.loader.view.view import ViewOptions
from streamvid.loader.world import detect_world
from streamvid.plan import PlanOptions, World
from streamvid.plan.cost import CostTable, default_costs
from streamvid.plan.mix import MixBy
from streamvid.plan.options import Order, Shuffle, Sync, Tail
from streamvid.storage import StorageOptions
from streamvid.video.picture import Accuracy, Pixels

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """VideoLoader's arguments as the caller gave them, by their names there; not checked yet."""

    dataset: str | Path | Dataset | DatasetConfig | Sequence[str | Path | Dataset | DatasetConfig]
    batch_size: int | Mapping[str, int] | BucketConfig | None
    max_tokens_per_batch: int | None
    preset: str | Path | ModelRule | None
    world: World | None
    num_epochs: int | None
    accumulate: int
    shuffle: Shuffle
    window: int
    order: Order
    deal: int
    tail: Tail | None
    sync: Sync
    costs: CostTable | None
    seed: int
    split: str
    where: str | None
    samples_per_epoch: int | None
    mix_by: MixBy
    columns: Sequence[str]
    media: Sequence[str]
    view: ViewOptions
    tokenizer: Tokenizer | None
    device: torch.device | str | None
    layout: Layout
    pixels: Pixels | None
    accuracy: Accuracy | None
    decode: bool
    sidecars: Sidecars
    num_workers: int | None
    prefetch_bytes: int
    storage: StorageOptions | Mapping[str, Any] | None
    cache_dir: str | Path | None
    cache_bytes: int | None
    sample_timeout_seconds: float | None
    max_bad_fraction: float
    quarantine: str | Path | None
    process_group: ProcessGroup | None
    shared_group: ProcessGroup | None


@dataclass(frozen=True, slots=True)
class Setup:
    """A loader's parts, none of which runs yet.

    numeric: the columns that hold numbers in all datasets.   pipeline_options: what a Pipeline takes by these names.
    groups: whether plans are compared, over which processes, and who shares this rank's batches.
    view_facts: of each dataset, see sidecar.py.
    """

    world: World
    options: PlanOptions
    mix: Mix
    selection: Selection
    columns: tuple[str, ...]
    numeric: frozenset[str]
    layout: Layout
    num_epochs: int | None
    stage: DeviceStage
    pipeline_options: Mapping[str, Any]
    groups: tuple[bool, ProcessGroup | None, ProcessGroup | None]
    shared: SharedBatchCheck | None
    view_facts: tuple[dict[str, Any], ...]

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, in the order of their ids."""
        return tuple(self.mix.buckets.values())

    @property
    def ring_bytes(self) -> int:
        """Shared memory of a loader that iterates: the ring of decoded frames and the clips read ahead."""
        return ring_bytes(self.pipeline_options, self.mix.max_clip_bytes)


def ring_bytes(memory_options: Mapping[str, Any], max_clip_bytes: int) -> int:
    """Shared memory that a Pipeline of these options takes."""
    own = sum(memory_options[name] for name in ("frame_bytes", "clip_bytes"))
    return int(own) + max_clip_bytes  # the last for what replaces a bad sample


def set_up(given: Given) -> Setup:
    """Check what was given and open the datasets. Raises ConfigError, DatasetError, PlanError."""
    world = detect_world() if given.world is None else arguments.check_world(given.world)
    tail = given.tail or ("carry" if given.split == "train" else "uneven")
    options = PlanOptions(
        given.seed, given.shuffle, given.window, tail, given.sync, given.order, given.accumulate, given.deal
    )
    layout, num_epochs = check_layout(given.layout), arguments.at_least("num_epochs", given.num_epochs, 1)
    num_workers, columns = arguments.check_workers(given.num_workers), tuple(arguments.check_columns(given.columns))
    check_tokenizer(given.tokenizer, columns)
    stores = Stores.of(given.storage, given.cache_dir, given.cache_bytes)
    rule = rule_of(given.preset)
    mix = with_media(_open(given, columns, stores, rule), given.media)
    facts = tuple(view_facts(part, given.pixels, given.accuracy) for part in mix.parts)
    mix = with_sidecars(mix, given.sidecars, stores, facts, columns)
    selection = _select(given, mix, options, world, rule)
    if all(bucket.is_text for bucket in mix.buckets.values()):
        num_workers = 0  # nothing is decoded
    stage = DeviceStage(given.device)
    pipeline_options = _pictures(given, selection, stage) | arguments.pipeline_options(
        num_workers, world, [part.dataset for part in mix.parts], given.sample_timeout_seconds,
        given.max_bad_fraction, given.quarantine, stores.num_fetch_threads(sources_of(mix.parts)),
    )  # fmt: skip
    shared = given.shared_group
    return Setup(
        world, options, mix, selection, columns, frozenset(name for name in columns if mix.is_numeric(name)),
        layout, num_epochs, stage, pipeline_options,
        arguments.check_groups(given.world, given.process_group, shared),
        None if shared is None else SharedBatchCheck(world, shared), facts,
    )  # fmt: skip


def _open(given: Given, columns: Sequence[str], stores: Stores, rule: ModelRule | None) -> Mix:
    return open_mix(
        as_configs(given.dataset), split=given.split, where=given.where, columns=columns, seed=given.seed,
        samples_per_epoch=given.samples_per_epoch, by=given.mix_by, open_url=stores.open, view=given.view,
        model=rule,
    )  # fmt: skip


def _select(given: Given, mix: Mix, options: PlanOptions, world: World, rule: ModelRule | None) -> Selection:
    buckets = tuple(mix.buckets.values())
    if rule is not None:
        check_datasets(rule, mix)
        check_view(rule, given.view)
    # Datasets of different models may be mixed as long as nobody asks how many tokens they are.
    counts_tokens = given.max_tokens_per_batch is not None or arguments.uses_costs(options)
    model = token_rule(rule, mix) if counts_tokens else rule
    sizes = batch_sizes(buckets, given.batch_size, given.max_tokens_per_batch, model)
    costs = arguments.check_costs(given.costs, options) or default_costs(buckets, model)
    return Selection(mix, sizes, options, world, costs.costs(sizes))


def _pictures(given: Given, selection: Selection, stage: DeviceStage) -> dict[str, Any]:
    """The Pipeline's options that say what is delivered and how much memory it takes."""
    mix, decode = selection.mix, given.decode
    buckets = tuple(mix.buckets.values())
    memory = (given.prefetch_bytes, mix.max_clip_bytes, selection.batch_sizes, buckets)
    if given.sidecars is not None:
        arguments.check_with_sidecars(decode, media=given.media or None)
        return {"decode": False, **arguments.memory_options(*memory, None)}
    of_pictures: dict[str, Any] = {"layout": given.layout, "pixels": given.pixels, "accuracy": given.accuracy}
    of_pictures["media"] = given.media or None
    of_pictures["spatial"] = None if given.view.spatial == "resize_crop" else given.view.spatial
    arguments.check_decode(decode, device=given.device, **of_pictures, shared_group=given.shared_group)
    pictures = arguments.picture_options(decode, given.pixels, given.accuracy, stage.device, buckets)
    return pictures | arguments.memory_options(*memory, pictures["pixels"] if decode else None, mix.parts[0].media)
