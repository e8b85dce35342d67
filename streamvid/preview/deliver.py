"""Frames of single samples, decoded by the loader's own pipeline.

In training, a plan decides which samples a pipeline delivers. Here, each request names one stored sample and one
visit. Frames, crop, caption and pixels are therefore the same as in a training run with the same seed
(SAMPLE-1).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from streamvid.buckets.bucket import Bucket
from streamvid.dataset.reader import Dataset
from streamvid.errors import ConfigError, SampleError
from streamvid.loader.delivery.delivery import Delivery
from streamvid.loader.delivery.pending import PendingBatch
from streamvid.loader.delivery.pipeline import Pipeline
from streamvid.loader.delivery.requests import BatchRequest
from streamvid.loader.mix import DataArguments, MixPart, SampleRequest
from streamvid.loader.options import OutputOptions
from streamvid.loader.setup import DeliveryArguments, PlanArguments, set_up
from streamvid.loader.view.text import TextOptions, text_rule
from streamvid.loader.view.view import ViewOptions
from streamvid.loader.world import default_num_workers
from streamvid.plan import World
from streamvid.preview.find import SamplePlace

Frames = npt.NDArray[np.uint8]
"""Pictures of shape (frames, height, width, 3), RGB, or (frames, height, width, 1) for a mask."""

MAX_SOURCE_BYTES = 96 * 2**20
"""Limit for the uncropped frames of one sample."""

_MAX_SOURCE_SIDE = 640
_KEPT_BYTES = 96 * 2**20


@dataclass(frozen=True)
class ViewSettings:
    """Loader settings that determine what is delivered for a sample."""

    seed: int = 0
    view: ViewOptions = field(default_factory=ViewOptions)
    text: TextOptions = field(default_factory=TextOptions)

    @property
    def key(self) -> str:
        """Key for caches. Equal settings have equal keys."""
        return repr(self)


@dataclass(frozen=True, eq=False)
class DeliveredSample:
    """One delivery of a sample.

    delivery: the frames, crop and caption that the loader chose.
    frames: the clip's pictures; None for a text sample.
    media: maps each conditioning input to its pictures, one array per item; None for an item that the sample lacks.
    """

    delivery: Delivery
    frames: Frames | None
    media: Mapping[str, tuple[Frames | None, ...]]

    @property
    def num_bytes(self) -> int:
        """Size of the pictures in bytes."""
        pictures = [self.frames, *(one for items in self.media.values() for one in items)]
        return sum(one.nbytes for one in pictures if one is not None)


class Deliverer:
    """Decoder for single samples. Thread-safe: only one sample is decoded at a time.

    It keeps one pipeline per split, and caches recent samples.

    Clips are decoded in a separate process where the platform allows it, so a clip that crashes a decoder cannot end
    this process.
    """

    def __init__(self, dataset: Dataset) -> None:
        # Requests name stored samples by their places in the whole dataset, which a filter would renumber.
        self._dataset = dataset.without_view()
        self._open: dict[str, _OpenPipeline] = {}
        self._recent: OrderedDict[tuple[object, ...], DeliveredSample] = OrderedDict()
        self._lock = threading.Lock()

    def deliver(self, place: SamplePlace, visit: int, settings: ViewSettings) -> DeliveredSample:
        """Return one delivery of a sample.

        Raises SampleError if the sample is bad, and ConfigError for an invalid view.
        """
        bucket = self._bucket(place)
        return self._kept(("model", place.row, place.index, visit, settings.key), place, settings, bucket, visit)

    def uncropped(self, place: SamplePlace, visit: int, settings: ViewSettings, width: int, height: int) -> Frames:
        """Return the frames that `deliver` selects, uncropped and scaled down to at most 640 pixels per side.

        width, height: display size of the clip.
        Raises the same errors as `deliver`.
        """
        bucket = self._bucket(place)
        side = min(1.0, _MAX_SOURCE_SIDE / max(width, height))
        side = min(side, (MAX_SOURCE_BYTES / (3 * bucket.num_frames * width * height)) ** 0.5)
        whole = Bucket(bucket.num_frames, max(2, round(height * side)), max(2, round(width * side)))
        view = replace(settings.view, spatial="resize_crop", spatial_scale=None)
        plain = replace(settings, view=view)
        found = self._kept(("source", place.row, place.index, visit, plain.key), place, plain, whole, visit).frames
        assert found is not None
        return found

    def poster(self, place: SamplePlace, settings: ViewSettings) -> Frames:
        """Return one frame from the middle of the clip, as the loader crops it, with shape (1, height, width, 3).

        The pipeline uses a single-frame bucket for this, to avoid decoding a whole window.
        """
        bucket = replace(self._bucket(place), num_frames=1)
        middle = replace(settings, view=ViewOptions("middle"))
        with self._lock:
            found = self._decode(place, middle, bucket, 0).frames
        assert found is not None
        return found

    def close(self) -> None:
        """Stop all processes and threads."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()

    def _bucket(self, place: SamplePlace) -> Bucket:
        return self._dataset.manifest.bucket(place.shard.bucket_id)

    def _kept(
        self, name: tuple[object, ...], place: SamplePlace, settings: ViewSettings, bucket: Bucket, visit: int
    ) -> DeliveredSample:
        with self._lock:
            found = self._recent.pop(name, None) or self._decode(place, settings, bucket, visit)
            self._recent[name] = found
            while len(self._recent) > 1 and sum(one.num_bytes for one in self._recent.values()) > _KEPT_BYTES:
                self._recent.popitem(last=False)
            return found

    def _decode(self, place: SamplePlace, settings: ViewSettings, bucket: Bucket, visit: int) -> DeliveredSample:
        split = place.shard.split
        pipeline = self._open.pop(split, None) or _OpenPipeline(self._dataset, split)
        try:
            found = pipeline.deliver(place, settings, bucket, visit)
        except ConfigError:
            self._open[split] = pipeline  # refused before anything began
            raise
        except BaseException:
            pipeline.close()  # after any other error, a pipeline accepts no further run
            raise
        self._open[split] = pipeline
        return found


class _OpenPipeline:
    """Pipeline for the samples in one split. Each delivery can use different settings."""

    def __init__(self, dataset: Dataset, split: str) -> None:
        pictured = tuple(name for name, info in dataset.manifest.media.items() if not info.is_audio)
        data = DataArguments(dataset, split=split, media=pictured)
        plan = PlanArguments(batch_size=1, world=World(), shuffle="none", tail="uneven")
        output = OutputOptions(pixels=None if dataset.manifest.clips == "audio" else "rgb24")
        delivery = DeliveryArguments(output, num_workers=min(1, default_num_workers()))
        setup = set_up(data, plan, delivery)
        (self._part,) = setup.mix.parts
        self._numbers: dict[str, int] = {}
        self._pipeline = Pipeline(setup.mix.parts, setup.pipeline)
        self._pipeline.open()

    def deliver(self, place: SamplePlace, settings: ViewSettings, bucket: Bucket, visit: int) -> DeliveredSample:
        sample = _request(self._with(settings), place, visit)
        run = self._pipeline.stop()
        self._pipeline.start(run, iter([BatchRequest(bucket, (sample,), None)]))
        pending = self._pipeline.next_batch(run)
        assert pending is not None
        try:
            substituted = pending.substituted.get(0)
            if substituted is not None:
                raise SampleError(
                    f"sample {substituted.key} in {substituted.shard} is bad: {substituted.reason}. The loader "
                    f"delivers {substituted.substitute_key} in its place"
                )
            return _delivered(pending)
        finally:
            pending.block.release()

    def _with(self, settings: ViewSettings) -> MixPart:
        """Return a copy of the split's part with these settings.

        The pipeline caches columns by part number, so parts that need different columns have different numbers.
        """
        dataset = self._part.dataset
        settings.view.check(dataset.manifest.clips, list(dataset.manifest.buckets), dataset.url)
        rule = text_rule(settings.text, dataset)
        number = self._numbers.setdefault(repr(rule.needed), len(self._numbers))
        return replace(self._part, number=number, seed=settings.seed, view=settings.view, text=rule)

    def close(self) -> None:
        self._pipeline.close()


def _request(part: MixPart, place: SamplePlace, visit: int) -> SampleRequest:
    """Return the request for one visit to a sample.

    part: unfiltered part, which therefore contains all shards of its split, in the order of the shard table.
    """
    shards = part.subset.shards[place.shard.bucket_id]
    rows = getattr(shards, "rows", None)
    number = int(np.searchsorted(rows, place.row)) if rows is not None else list(shards).index(place.shard)
    return SampleRequest(part, place.shard.bucket_id, number, place.index, visit, is_repeat=visit < 0)


def _delivered(pending: PendingBatch) -> DeliveredSample:
    (delivery,), room = pending.deliveries, pending.room
    if room is None:
        return DeliveredSample(delivery, None, {})
    picture, first = room.picture, pending.block.offset
    if picture is None:
        return DeliveredSample(delivery, None, {})

    def copied(offset: int, num_pictures: int, channels: int) -> Frames:
        shape = (num_pictures, picture.height, picture.width, channels)
        return np.ndarray(shape, np.uint8, pending.memory, first + offset).copy()

    media = {
        medium.name: tuple(
            copied(room.place(medium, 0, item), medium.num_pictures(room.bucket), 1 if medium.is_mask else 3)
            if (0, medium.name, item) in pending.colors
            else None
            for item in range(medium.num_items)
        )
        for medium in room.media
    }
    return DeliveredSample(delivery, copied(room.video_place(0), room.bucket.num_frames, 3), media)
