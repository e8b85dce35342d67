"""Setup of a VideoLoader: arguments are checked and datasets are opened, but nothing is started yet."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamvid.buckets.batch_size import batch_sizes
from streamvid.buckets.bucket import Bucket
from streamvid.buckets.config import BucketConfig
from streamvid.buckets.model import ModelRule
from streamvid.config import require_integer
from streamvid.errors import ConfigError
from streamvid.loader.batch.batch import STANDARD_FIELDS
from streamvid.loader.batch.contents import RING_LAYOUT
from streamvid.loader.batch.device import DeviceStage
from streamvid.loader.batch.features import view_facts, with_features
from streamvid.loader.batch.tokens import check_token_fields
from streamvid.loader.delivery.audio import with_audio_plan
from streamvid.loader.delivery.pending import TEXT_ROW_BYTES
from streamvid.loader.delivery.pipeline import PipelineOptions
from streamvid.loader.delivery.requests import Selection
from streamvid.loader.exchange import SharedBatchCheck, compare_plans
from streamvid.loader.mix import DataArguments, Mix, open_mix
from streamvid.loader.options import LimitOptions, OutputOptions, ProcessGroups, ScheduleOptions
from streamvid.loader.state import StateVersions, plan_identity
from streamvid.loader.stores import Stores
from streamvid.loader.view.audio import AudioPlan
from streamvid.loader.view.clip_part import TABLE_BYTES
from streamvid.loader.view.media import Medium, PictureRoom
from streamvid.loader.view.model_rule import check_dataset, check_view, common_rule, rule_of
from streamvid.loader.workers.arena import ALIGN_BYTES
from streamvid.loader.world import default_num_workers, detect_world, is_initialised
from streamvid.plan import Cursor, PlanOptions, World
from streamvid.plan.cost import default_costs
from streamvid.plan.options import Shuffle, Sync
from streamvid.plan.tail import Tail
from streamvid.video.picture import PictureFormat, Pixels

if TYPE_CHECKING:
    import torch

_TEXT_BATCHES = 32  # number of batches of texts that are ready ahead of the caller
_MIN_BATCHES_IN_RING = 3  # one held by the caller, one being decoded, and space to place both if they are the largest


@dataclass(frozen=True, slots=True)
class PlanArguments:
    """VideoLoader's arguments for the plan, with the same names."""

    batch_size: int | Mapping[str, int] | BucketConfig | None = None
    max_tokens_per_batch: int | None = None
    preset: str | Path | ModelRule | None = None
    world: World | None = None
    num_epochs: int | None = 1
    seed: int = 0
    shuffle: Shuffle = "window"
    tail: Tail | None = None
    sync: Sync = "bucket"
    accumulate: int = 1
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)

    def options(self, split: str) -> PlanOptions:
        """Return the plan options for a split. Raises ConfigError for invalid values."""
        return PlanOptions(
            seed=self.seed,
            shuffle=self.shuffle,
            window=self.schedule.window,
            tail=self.tail or ("carry" if split == "train" else "uneven"),
            sync=self.sync,
            order=self.schedule.order,
            accumulate=self.accumulate,
            shard_locality=self.schedule.shard_locality,
        )


@dataclass(frozen=True, slots=True)
class DeliveryArguments:
    """VideoLoader's arguments for creating and delivering batches, with the same names."""

    output: OutputOptions = field(default_factory=OutputOptions)
    limits: LimitOptions = field(default_factory=LimitOptions)
    groups: ProcessGroups = field(default_factory=ProcessGroups)
    device: torch.device | str | None = None
    num_workers: int | None = None


_COMPARED = frozenset({"temporal", "max_interval", "spatial", "spatial_scale", "pixels", "accuracy"})


@dataclass(frozen=True, slots=True)
class Setup:
    """Validated arguments of a loader, and the objects built from them.

    numeric: columns that contain numbers in all datasets.
    compared_groups: groups of processes whose plans are compared; None for no comparison.
    view_facts: view and caption settings of each dataset, as JSON values; see batch/features.py.
    """

    selection: Selection
    columns: tuple[str, ...]
    numeric: frozenset[str]
    output: OutputOptions
    num_epochs: int | None
    stage: DeviceStage
    pipeline: PipelineOptions
    compared_groups: ProcessGroups | None
    shared_check: SharedBatchCheck | None
    view_facts: tuple[Mapping[str, Any], ...]
    stores: Stores
    split: str

    @property
    def mix(self) -> Mix:
        """Datasets of the loader."""
        return self.selection.mix

    @property
    def form(self) -> Mapping[str, Any]:
        """Options that determine a delivery: JSON values by option name. All ranks must have the same values."""
        captions = [part.text.options for part in self.mix.parts]
        names = ("choice", "template", "prefix", "dropout", "part_dropout")
        return {
            **{name: value for name, value in self.view_facts[0].items() if name in _COMPARED},
            "layout": self.output.layout,
            "decode": self.output.decode,
            "columns": list(self.columns),
            **_audio_form(self.mix),
            **{
                f"captions of dataset {number}": [
                    {name: float(weight) for name, weight in one.weights.items()},
                    *(getattr(one, name) for name in names),
                ]
                for number, one in enumerate(captions)
            },
        }

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets, sorted by id."""
        return tuple(self.mix.buckets.values())

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """List of (bucket id, shape of `batch.video` in a full batch), largest shape first."""
        axes = [RING_LAYOUT.index(name) for name in self.output.layout]
        found = []
        for bucket in self.buckets:
            if bucket.has_pictures:
                size = (self.selection.batch_sizes[bucket.id], *bucket.shape, 3)
                found.append((bucket.id, tuple(size[axis] for axis in axes)))
        return sorted(found, key=lambda named: -math.prod(named[1]))

    @property
    def versions(self) -> StateVersions:
        """Current versions of the datasets, and the versions from which samples are still carried over."""
        earlier = self.selection.earlier
        return StateVersions(self.mix.versions, () if earlier is None else earlier.selection.mix.versions)

    @property
    def belongs_to(self) -> Mapping[str, Any]:
        """Values that must be equal in the loader that saves a state and in the loader that loads the state."""
        # With another tail, positions refer to the same samples, but samples that "carry" has carried precede the start
        # of the epoch, and other tails would silently lose them.
        options = self.selection.options
        return {
            "datasets": self.mix.identity(),
            "split": self.split,
            **options.order_key(),
            "tail": options.tail,
        }

    def compare(self, cursor: Cursor) -> None:
        """Compare the plans of all processes. If any plans differ, all processes raise ConfigError."""
        if self.compared_groups is None:
            return
        selection = self.selection
        costs = selection.costs if uses_costs(selection.options) else {}
        parts = {
            "num_epochs": self.num_epochs,
            "costs": costs,
            "batch_sizes": selection.batch_sizes,
            **self.form,
            "carried_versions": list(self.versions.carried),
        }
        of_versions = zip(self.mix.versions, self.mix.identity(), strict=True)
        datasets = [{"version": version, **one} for version, one in of_versions]  # other samples follow from it
        belongs_to = {**self.belongs_to, "datasets": datasets}
        identity = plan_identity(belongs_to, cursor, selection.options, parts)
        compare_plans(identity, selection.world, self.compared_groups)


def set_up(
    data: DataArguments, plan: PlanArguments, delivery: DeliveryArguments, stores: Stores | None = None
) -> Setup:
    """Check the arguments and open the datasets.

    Raises ConfigError for invalid arguments, and DatasetError for unusable datasets.

    stores: open stores from an earlier setup with the same arguments, to be reused.
    """
    world, options = _world(plan.world), plan.options(data.split)
    if plan.num_epochs is not None:
        require_integer("num_epochs", plan.num_epochs, 1)
    num_workers = _num_workers(delivery.num_workers)
    columns = _columns(data.columns, delivery.output)
    stores, rule = stores or Stores.of(data.storage), rule_of(plan.preset)
    mix = open_mix(
        data,
        stores,
        seed=plan.seed,
        samples_per_epoch=plan.schedule.samples_per_epoch,
        mix_by=plan.schedule.mix_by,
        model=rule,
    )
    facts = tuple(view_facts(part, delivery.output) for part in mix.parts)
    mix = with_features(mix, data.features, stores, facts, columns)
    mix = with_audio_plan(mix, delivery.output.audio, data.view, is_decoded=delivery.output.decode)
    selection = _select(mix, plan, options, world, rule)
    if rule is not None:
        check_view(rule, data.view)
    stage = DeviceStage(delivery.device)
    _check_output(data, delivery)
    if all(part.dataset.manifest.clips == "audio" for part in mix.parts):
        _check_heard(delivery.output)
    return Setup(
        selection,
        columns,
        frozenset(name for name in columns if mix.is_numeric(name)),
        delivery.output,
        plan.num_epochs,
        stage,
        _pipeline(selection, delivery, stage, num_workers, stores.num_fetch_threads(mix.sources)),
        _compared_groups(plan.world, delivery.groups),
        None if delivery.groups.shared_group is None else SharedBatchCheck(world, delivery.groups.shared_group),
        facts,
        stores,
        data.split,
    )


def _audio_form(mix: Mix) -> Mapping[str, Any]:
    """Return the sample rate, channels and length of each bucket's audio, as JSON; {} if no audio is delivered."""
    plan = mix.audio
    if plan is None:
        return {}
    shapes = {name: [one.sample_rate, one.num_channels, one.num_samples] for name, one in plan.shapes.items()}
    return {"audio": shapes}


def _world(world: object) -> World:
    if world is None:
        return detect_world()
    if not isinstance(world, World):
        raise ConfigError(f"world={world!r}: must be a streamvid.World(rank, num_ranks), or None to detect it")
    return world


def _num_workers(num_workers: int | None) -> int:
    if num_workers is None:
        return default_num_workers()
    if require_integer("num_workers", num_workers, 0) and sys.platform != "linux":
        raise ConfigError(
            f"num_workers={num_workers}: decode processes require Linux; use num_workers=0 on {sys.platform}"
        )
    return num_workers


def _columns(columns: object, output: OutputOptions) -> tuple[str, ...]:
    if isinstance(columns, str) or not isinstance(columns, Collection):
        shown = columns if isinstance(columns, str) else "aesthetic"
        raise ConfigError(f"columns={columns!r}: must be a list of names, such as [{shown!r}]")
    for name in columns:
        if name in STANDARD_FIELDS:
            raise ConfigError(f"columns: {name!r} is the name of a standard batch field; rename the column")
    if output.tokenizer is not None:
        check_token_fields(tuple(columns))
    return tuple(columns)


def _compared_groups(given: World | None, groups: ProcessGroups) -> ProcessGroups | None:
    if groups.shared_group is not None and given is None:
        raise ConfigError(
            "groups.shared_group requires world; set world to the rank that the processes share (see world_from_mesh)"
        )
    is_of_this_run = given is None or (is_initialised() and given == detect_world())
    return groups if is_of_this_run or groups.process_group is not None else None


def uses_costs(options: PlanOptions) -> bool:
    """Return whether the plan depends on step costs."""
    return options.sync == "cost" or options.order == "largest-first"


def _select(mix: Mix, plan: PlanArguments, options: PlanOptions, world: World, rule: ModelRule | None) -> Selection:
    buckets, costs = tuple(mix.buckets.values()), plan.schedule.costs
    if costs is not None and not uses_costs(options):
        raise ConfigError(
            f"schedule.costs has no effect with sync={options.sync!r} and schedule.order={options.order!r}; use "
            "sync='cost' or schedule.order='largest-first', or leave schedule.costs out"
        )
    if rule is not None:
        for part in mix.parts:
            check_dataset(rule, part.dataset, [mix.buckets[bucket_id] for bucket_id in part.subset.shards])
    # Datasets for different models can be mixed as long as their tokens need not be counted.
    counts_tokens = plan.max_tokens_per_batch is not None or uses_costs(options)
    model = rule or (common_rule(mix.manifests) if counts_tokens else None)
    # A mapping that covers the dataset also fits its splits and filters, which may lack some of its buckets.
    others = [bucket for manifest in mix.manifests for bucket in manifest.buckets]
    sizes = batch_sizes(buckets, plan.batch_size, plan.max_tokens_per_batch, model, others)
    return Selection(mix, sizes, options, world, (costs or default_costs(buckets, model)).costs(sizes))


def _check_output(data: DataArguments, delivery: DeliveryArguments) -> None:
    """Raise ConfigError if an argument that concerns decoded frames is set, but no decoded frames are delivered."""
    output, media = delivery.output, list(data.media)
    if data.features is not None:
        if not output.decode:
            raise ConfigError(
                "output.decode=False cannot be combined with features, which contain no clips; leave output.decode out"
            )
        if media:
            raise ConfigError(
                f"media={media!r} cannot be combined with features, which replace all video; omit one of them"
            )
        return
    if output.decode:
        return
    given = {
        "device": delivery.device is not None,
        "output.layout": output.layout != "BCTHW",
        "output.pixels": output.pixels is not None,
        "output.accuracy": output.accuracy is not None,
        "media": bool(media),
        "view.spatial": data.view.spatial != "resize_crop",
        "groups.shared_group": delivery.groups.shared_group is not None,
    }
    if names := [name for name, is_given in given.items() if is_given]:
        raise ConfigError(
            f"output.decode=False cannot be combined with {', '.join(names)}, because nothing is decoded; leave out "
            "output.decode or these options"
        )


def _check_heard(output: OutputOptions) -> None:
    """Raise ConfigError if options for pictures are set, but the datasets contain no pictures."""
    plain = OutputOptions()
    for name in ("layout", "pixels", "accuracy"):
        value = getattr(output, name)
        if value != getattr(plain, name):
            raise ConfigError(
                f"output.{name}={value!r} cannot be combined with audio datasets, which have no pictures; omit "
                f"output.{name}"
            )


def _pipeline(
    selection: Selection, delivery: DeliveryArguments, stage: DeviceStage, num_workers: int, num_fetch_threads: int
) -> PipelineOptions:
    mix, output, limits = selection.mix, delivery.output, delivery.limits
    buckets = tuple(mix.buckets.values())
    decode = output.decode and all(part.sidecar is None for part in mix.parts)
    pixels = _pixels(output, stage, buckets)
    memory = loader_memory(
        limits.prefetch_bytes,
        mix.max_clip_bytes,
        selection.batch_sizes,
        buckets,
        pixels if decode else None,
        mix.parts[0].media if decode else (),
        mix.audio,
    )
    return PipelineOptions(
        num_workers=0 if all(bucket.is_text for bucket in buckets) else num_workers,  # text needs no decoder
        clip_bytes=memory.clip_bytes,
        frame_bytes=memory.frame_bytes,
        num_fetch_threads=num_fetch_threads,
        rank=selection.world.rank,
        limits=limits,
        pixels=pixels,
        accuracy=output.accuracy,
        decode=decode,
    )


def _pixels(output: OutputOptions, stage: DeviceStage, buckets: Sequence[Bucket]) -> Pixels:
    """Return the pixel format of the ring. Raises ConfigError if the size of a bucket does not allow this format."""
    pictured = [bucket for bucket in buckets if bucket.has_pictures]
    is_odd = any(bucket.height % 2 or bucket.width % 2 for bucket in pictured)
    on_cuda = stage.device is not None and stage.device.type == "cuda"
    pixels: Pixels = output.pixels or ("yuv420p" if on_cuda and not is_odd else "rgb24")
    for bucket in pictured:
        PictureFormat(bucket.height, bucket.width, pixels, output.accuracy or "exact")
    return pixels


@dataclass(frozen=True, slots=True)
class LoaderMemory:
    """Sizes in bytes of a loader's shared memory: the ring, the clips read ahead, and the block for substitutes."""

    frame_bytes: int
    clip_bytes: int
    repair_bytes: int

    @property
    def num_bytes(self) -> int:
        """Total size in bytes."""
        return self.frame_bytes + self.clip_bytes + self.repair_bytes


def loader_memory(
    prefetch_bytes: int,
    max_clip_bytes: int,
    batch_sizes: Mapping[str, int],
    buckets: Sequence[Bucket],
    pixels: Pixels | None,
    media: Sequence[Medium] = (),
    audio: AudioPlan | None = None,
) -> LoaderMemory:
    """Return the sizes of a loader's shared memory areas.

    pixels: format in the ring; None if the ring contains stored clips.
    """
    largest = max(
        batch_sizes[bucket.id] * _sample_bytes(bucket, max_clip_bytes, pixels, media, audio) for bucket in buckets
    )
    if all(bucket.is_text for bucket in buckets):  # texts are cheap, and have no clips to read
        prefetch_bytes = min(prefetch_bytes, _TEXT_BATCHES * largest)
    return LoaderMemory(
        frame_bytes=max(prefetch_bytes, _MIN_BATCHES_IN_RING * (largest + ALIGN_BYTES)),
        clip_bytes=max(prefetch_bytes // 8, 2 * (max_clip_bytes + ALIGN_BYTES)),
        repair_bytes=max_clip_bytes,
    )


def _sample_bytes(
    bucket: Bucket, max_clip_bytes: int, pixels: Pixels | None, media: Sequence[Medium], audio: AudioPlan | None
) -> int:
    if bucket.is_text:
        return TEXT_ROW_BYTES
    if pixels is None:
        return max_clip_bytes + TABLE_BYTES
    shape = None if audio is None else audio.of(bucket.id)
    picture = PictureFormat(bucket.height, bucket.width, pixels) if bucket.has_pictures else None
    return PictureRoom(picture, bucket, 1, tuple(media), shape).num_bytes
