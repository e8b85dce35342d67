"""What a caller of VideoLoader may say, argument by argument: each is returned as it is, or refused with its remedy."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamvid.buckets.bucket import Bucket
from streamvid.dataset.reader import Dataset
from streamvid.errors import ConfigError
from streamvid.loader.batch.batch import RING_LAYOUT, STANDARD_FIELDS
from streamvid.loader.delivery.clip_part import TABLE_BYTES
from streamvid.loader.delivery.clock import Clock
from streamvid.loader.delivery.pending import TEXT_ROW_BYTES
from streamvid.loader.delivery.quarantine import Quarantine
from streamvid.loader.view.media import Medium, media_bytes
from streamvid.loader.workers.arena import ALIGN_BYTES
from streamvid.loader.world import default_num_workers
from streamvid.plan import PlanOptions, World
from streamvid.plan.cost import CostTable
from streamvid.plan.position import MAX_EPOCH
from streamvid.video.picture import Accuracy, PictureFormat, Pixels

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_TEXT_BATCHES = 32  # that lie ready
_MIN_BATCHES_IN_RING = 3  # one at the caller, one being decoded, and room for both to be of the largest bucket


def check_world(world: object) -> World:
    """The rank that the caller gave."""
    if not isinstance(world, World):
        raise ConfigError(f"world={world!r}: expected a streamvid.World(rank, num_ranks), or None to detect it")
    return world


def check_groups(
    world: World | None, process_group: ProcessGroup | None, shared_group: ProcessGroup | None
) -> tuple[bool, ProcessGroup | None, ProcessGroup | None]:
    """(whether plans are compared, over which processes, who shares this rank's batches)."""
    if shared_group is not None and world is None:
        raise ConfigError("shared_group without world: give the rank that its processes share; see world_from_mesh")
    return world is None or process_group is not None, process_group, shared_group


def check_columns(columns: Sequence[str]) -> Sequence[str]:
    """Names of columns that no field of every batch has."""
    if isinstance(columns, str):
        raise ConfigError(f"columns={columns!r} is a string; give a list of names: [{columns!r}]")
    for name in columns:
        if name in STANDARD_FIELDS:
            raise ConfigError(f"columns: {name!r} is a field of every batch already; leave it out or rename the column")
    return columns


def at_least(name: str, value: int | None, least: int) -> int | None:
    """None, or a whole number that is large enough."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ConfigError(f"{name}={value!r}; a whole number of {least} or more is allowed")
    return value


def epoch_of(epoch: int) -> int:
    """An epoch that a run can be in."""
    if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch < MAX_EPOCH:
        raise ConfigError(f"epoch={epoch!r}; a whole number from 0 to {MAX_EPOCH - 1} is allowed")
    return epoch


def step_of(step: int, num_steps: int) -> int:
    """A step of an epoch, its end among them."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= num_steps:
        raise ConfigError(f"step={step!r}: the epoch has {num_steps} steps; allowed are the integers 0 to {num_steps}")
    return step


def uses_costs(options: PlanOptions) -> bool:
    """Whether the plan depends on the costs of steps."""
    return options.sync == "cost" or options.order == "largest-first"


def check_costs(costs: CostTable | None, options: PlanOptions) -> CostTable | None:
    """Costs that the plan makes use of; or None."""
    if costs is None:
        return None
    if not isinstance(costs, CostTable):
        raise ConfigError(f"costs={costs!r}: expected what streamvid.fit_costs gave, or CostTable.from_json of it")
    if not uses_costs(options):
        raise ConfigError(
            f"costs would do nothing with sync={options.sync!r} and order={options.order!r}: ask for sync='cost' or "
            "order='largest-first', or leave costs out"
        )
    return costs


def check_workers(num_workers: int | None) -> int:
    """How many decode processes; None: this rank's share of the cores."""
    if num_workers is None:
        return default_num_workers()
    at_least("num_workers", num_workers, 0)
    if num_workers and sys.platform != "linux":
        raise ConfigError(
            f"num_workers={num_workers}: decode processes need Linux; use num_workers=0 on {sys.platform}"
        )
    return num_workers


def picture_options(
    decode: bool,
    pixels: Pixels | None,
    accuracy: Accuracy | None,
    device: torch.device | None,
    buckets: Sequence[Bucket],
) -> dict[str, Any]:
    """The Pipeline's options of these names. ConfigError for what is unknown, or not possible for a bucket."""
    if pixels == "yuv420p" and accuracy is not None:
        raise ConfigError(
            f"accuracy={accuracy!r} stands beside pixels='yuv420p', of which RGB is always made exactly; leave one out"
        )
    on_cuda = device is not None and device.type == "cuda"
    buckets = [bucket for bucket in buckets if not bucket.is_text]
    odd = any(bucket.height % 2 or bucket.width % 2 for bucket in buckets)
    chosen: Pixels = pixels or ("yuv420p" if on_cuda and not odd else "rgb24")
    for bucket in buckets:
        PictureFormat(bucket.height, bucket.width, chosen, accuracy or "exact")
    return {"decode": decode, "pixels": chosen, "accuracy": accuracy}


def check_decode(decode: object, **others: object) -> None:
    """decode=False leaves no pictures that the other arguments could be about."""
    if not isinstance(decode, bool):
        raise ConfigError(f"decode={decode!r}; allowed are True and False")
    given = [name for name, value in others.items() if value not in (None, "BCTHW")]
    if not decode and given:
        raise ConfigError(f"decode=False leaves nothing for {', '.join(given)}: leave it out, or decode")


def check_with_sidecars(decode: object, **others: object) -> None:
    """With sidecars there is nothing to decode, and nothing that other arguments could be about."""
    if decode is not True:
        raise ConfigError(f"decode={decode!r} with sidecars, which hold no clips; leave it out")
    if given := [name for name, value in others.items() if value is not None]:
        raise ConfigError(
            f"sidecars leave nothing for {', '.join(given)}: leave it out; what it shows is encoded already"
        )


def memory_options(
    prefetch_bytes: int,
    max_clip_bytes: int,
    batch_sizes: Mapping[str, int],
    buckets: Sequence[Bucket],
    pixels: Pixels | None,
    media: Sequence[Medium] = (),
) -> dict[str, int]:
    """Bytes for batches, and for clips read ahead. pixels: None: a batch holds clips as they are stored. media: what a
    batch holds besides."""
    at_least("prefetch_bytes", prefetch_bytes, 0)

    def sample_bytes(bucket: Bucket) -> int:
        if bucket.is_text:
            return TEXT_ROW_BYTES
        if pixels is None:
            return max_clip_bytes + TABLE_BYTES
        picture_bytes = PictureFormat(bucket.height, bucket.width, pixels).num_bytes
        return bucket.num_frames * picture_bytes + media_bytes(media, bucket, picture_bytes)

    largest = max(batch_sizes[bucket.id] * sample_bytes(bucket) for bucket in buckets)
    if all(bucket.is_text for bucket in buckets):  # cheap to have, and without a clip to read
        prefetch_bytes = min(prefetch_bytes, _TEXT_BATCHES * largest)
    return {
        "frame_bytes": max(prefetch_bytes, _MIN_BATCHES_IN_RING * (largest + ALIGN_BYTES)),
        "clip_bytes": max(prefetch_bytes // 8, 2 * (max_clip_bytes + ALIGN_BYTES)),
    }


def pipeline_options(
    num_workers: int,
    world: World,
    datasets: Sequence[Dataset],
    sample_timeout_seconds: float | None,
    max_bad_fraction: float,
    quarantine: str | Path | None,
    num_fetch_threads: int,
) -> dict[str, Any]:
    """What a Pipeline is made with, refused now and not at the first loop."""
    folder = None if quarantine is None else Path(quarantine)
    Clock(sample_timeout_seconds)
    Quarantine(folder, world.rank, max_bad_fraction, datasets)
    return {
        "num_workers": num_workers,
        "rank": world.rank,
        "sample_timeout_seconds": sample_timeout_seconds,
        "max_bad_fraction": max_bad_fraction,
        "quarantine": folder,
        "num_fetch_threads": num_fetch_threads,
    }


def shapes_of(
    buckets: Sequence[Bucket], batch_sizes: Mapping[str, int], layout: str
) -> list[tuple[str, tuple[int, ...]]]:
    """(bucket id, shape of a whole batch's video), largest first."""
    order = [RING_LAYOUT.index(name) for name in layout]
    pictured = [bucket for bucket in buckets if not bucket.is_text]
    sizes = [(bucket.id, (batch_sizes[bucket.id], *bucket.shape, 3)) for bucket in pictured]
    shapes = [(name, tuple(size[axis] for axis in order)) for name, size in sizes]
    return sorted(shapes, key=lambda named: -math.prod(named[1]))
