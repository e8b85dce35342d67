"""VideoLoader: a sealed dataset as uniform batches for one rank, exactly and resumably."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from streamvid.buckets.batch_size import batch_sizes
from streamvid.dataset.reader import Dataset, open_dataset
from streamvid.errors import ConfigError, LoaderError
from streamvid.loader.arena import Arena
from streamvid.loader.batch import STANDARD_FIELDS, Batch
from streamvid.loader.mix import MixPart
from streamvid.loader.pipeline import PendingBatch, Pipeline
from streamvid.loader.requests import Selection, shards_by_bucket
from streamvid.loader.ring import make_batch, pin
from streamvid.loader.state import make_state, read_state
from streamvid.loader.world import default_num_workers, detect_world
from streamvid.plan.cursor import Cursor
from streamvid.plan.options import PlanOptions
from streamvid.plan.tail import BucketReport
from streamvid.plan.world import World

_log = logging.getLogger(__name__)

_MIN_BATCHES_IN_RING = 3  # one at the caller, one being decoded, and room for both to be of the largest bucket
_DEFAULT_PREFETCH_BYTES = 256 * 2**20


class VideoLoader:
    """Streams a dataset as `Batch`es; every rank gets the same number of steps, all of the same bucket at a step.

    dataset: a local path, a file:// URL or an open Dataset.
    batch_size: samples a rank and step, for all buckets or by bucket (id, WxH@F or glob); or
    max_tokens_per_batch: give each bucket as many samples as fit, a token being 4 x 16 x 16 (T, H, W) of a clip.
    world: data-parallel position; None asks torch.distributed, then launcher variables, else one rank.
    num_epochs: passes that one `for` loop runs over; None: endless.
    shuffle: "window" | "shards" | "none".   tail: "carry" | "drop" | "pad".   sync: "bucket".
    split: the samples' split, as sharded.   columns: columns of the index to hand over with each batch.
    num_workers: decode processes, 0 to decode in a thread of the caller; None: the cores of this rank, 8 at most.
    prefetch_bytes: how much decoded video may lie ready; at least three of the largest batches are given room.

    A loop that ends, or that took the epoch's last batch, moves the loader to the next epoch; `iter()` after an earlier
    `break` starts the epoch anew. Not a
    torch Dataset: do not wrap it in a DataLoader; `accelerator.prepare(loader)` leaves it as it is.

    Raises ConfigError, DatasetError, PlanError; while iterating SampleError, WorkerError, RingFullError.
    """

    def __init__(
        self,
        dataset: str | Path | Dataset,
        *,
        batch_size: int | Mapping[str, int] | None = None,
        max_tokens_per_batch: int | None = None,
        world: World | None = None,
        num_epochs: int | None = 1,
        shuffle: Literal["window", "shards", "none"] = "window",
        tail: Literal["carry", "drop", "pad"] = "carry",
        sync: Literal["bucket"] = "bucket",
        seed: int = 0,
        split: str = "train",
        columns: Sequence[str] = (),
        num_workers: int | None = None,
        prefetch_bytes: int = _DEFAULT_PREFETCH_BYTES,
    ) -> None:
        self.dataset = dataset if isinstance(dataset, Dataset) else open_dataset(dataset)
        self.world = detect_world() if world is None else world
        self.options = PlanOptions(seed=seed, shuffle=shuffle, tail=tail, sync=sync)
        self.split = split
        shards = shards_by_bucket(self.dataset, split)
        self.buckets = tuple(bucket for bucket in self.dataset.manifest.buckets if bucket.id in shards)
        self.batch_sizes = batch_sizes(self.buckets, batch_size, max_tokens_per_batch)
        by_id = {bucket.id: bucket for bucket in self.buckets}
        self._columns = {name: self.dataset.column(name) for name in _check_columns(columns)}
        counts = {bucket_id: np.array([s.num_samples for s in some], np.int64) for bucket_id, some in shards.items()}
        part = MixPart(
            0, self.dataset, seed, {k: tuple(some) for k, some in shards.items()}, counts, columns=self._columns
        )
        self._selection = Selection(part, by_id, self.batch_sizes, self.options, self.world)
        self._numeric = {name for name, column in self._columns.items() if self.dataset.is_numeric(column)}
        self._num_epochs = _at_least("num_epochs", num_epochs, 1)
        self._num_workers = _check_workers(num_workers)
        self._prefetch_bytes = _at_least("prefetch_bytes", prefetch_bytes, 0) or 0
        self._pipeline: Pipeline | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._pid = os.getpid()
        self._closed = False
        self._start, self._num_done = Cursor(), 0
        self._plan = self._selection.plan(self._start)
        self._plan.check(num_epochs)
        self._report()

    # What there is to come.

    def __len__(self) -> int:
        """Steps of the whole current epoch, the same on every rank."""
        return self._plan.num_steps

    @property
    def epoch(self) -> int:
        """The epoch of the batch handed out last, or of the one to come."""
        return self._plan.cursor.epoch

    @property
    def num_steps_left(self) -> int:
        """Steps of the current epoch that were not handed out yet."""
        return self._plan.num_steps_left - self._num_done

    def num_steps(self, num_epochs: int) -> int:
        """Steps of the first `num_epochs` epochs together: what a learning rate schedule wants to know."""
        return self._plan.num_steps_through(num_epochs)

    def plan_report(self) -> tuple[BucketReport, ...]:
        """For each bucket, what the rest of the epoch delivers, carries over, drops and repeats, over all ranks."""
        return self._plan.report()

    @property
    def shapes(self) -> list[tuple[str, tuple[int, int, int, int, int]]]:
        """(bucket id, (B, C, T, H, W)) of every batch there can be, largest first: for a warm-up."""
        shapes = [(b.id, (self.batch_sizes[b.id], 3, *b.shape)) for b in self.buckets]
        return sorted(shapes, key=lambda item: -_product(item[1]))

    @property
    def ring_bytes(self) -> int:
        """Shared memory that the loader takes once it iterates: the ring of decoded frames and the clips read ahead."""
        return self._frame_bytes + self._clip_bytes

    # Iterating.

    def __iter__(self) -> Iterator[Batch]:
        self._check_usable()
        pipeline = self._open_pipeline()
        pipeline.stop()
        # Who counts its batches takes the last and never asks for the end of the loop: that epoch is over all the same.
        is_over = self._num_done and not self.num_steps_left
        self._move_to(self._plan.next_epoch() if is_over else self._start)
        epoch, span = self._plan.cursor.epoch, self._num_epochs
        end_epoch = None if span is None else (epoch // span + 1) * span
        run = pipeline.start(self._selection.requests(self._plan, end_epoch))
        return self._iterate(pipeline, run, end_epoch)

    def _iterate(self, pipeline: Pipeline, run: int, end_epoch: int | None) -> Iterator[Batch]:
        try:
            while (pending := pipeline.next_batch(run)) is not None:
                yield self._hand_over(pending, pipeline.ring)
            self._move_to(self._plan.next_epoch())
            while end_epoch is not None and self.epoch < end_epoch:  # epochs at the end that had no step
                self._move_to(self._plan.next_epoch())
        finally:
            # Runs wherever an abandoned iterator is collected, so it must not wait.
            pipeline.cancel(run)

    def _hand_over(self, pending: PendingBatch, ring: Arena) -> Batch:
        batch = make_batch(pending, ring, tuple(self._columns), self._numeric)
        plan, num_done = pending.request.position
        if plan is not self._plan:
            self._plan, self._start = plan, plan.cursor
        self._num_done = num_done
        return batch

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, JSON-able, counting batches handed out; equal on all ranks after the same step."""
        return make_state(self._plan.cursor_after(self._num_done), self._belongs_to())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batch that `state` was taken at, at the next `iter()`; a loop that runs now is over.

        Raises StateError for a state of another dataset, split, seed, shuffle or tail, and changes nothing then.
        """
        self._check_usable()
        cursor = read_state(state, self._belongs_to())
        self._selection.check(cursor)
        self._jump_to(cursor)

    def set_epoch(self, epoch: int) -> None:
        """Start the given epoch at the next `iter()`; a loop that runs now is over.

        The current epoch stays where it stands, so that the usual `set_epoch` before each loop undoes no resume.
        """
        if epoch == self.epoch:
            return
        # The epoch after one that is over opens where that one ended, which is not its natural start after a resume
        # with other batch sizes.
        follows = epoch == self.epoch + 1 and not self.num_steps_left
        self._jump_to(self._plan.next_epoch() if follows else Cursor(epoch=epoch))

    def _belongs_to(self) -> dict[str, Any]:
        fingerprint = self.dataset.manifest.plan_fingerprint
        # With another tail, positions mean the same samples; but one that "carry" has carried is behind the start of
        # the epoch, where "drop" and "pad" do not look: it would be lost without a word.
        options = {**self.options.order_key(), "tail": self.options.tail}
        return {"plan_fingerprint": fingerprint, "split": self.split, **options}

    def _jump_to(self, cursor: Cursor) -> None:
        self._move_to(cursor)
        if self._pipeline is not None:
            self._pipeline.stop()

    def _move_to(self, cursor: Cursor) -> None:
        self._plan = self._selection.plan(cursor)
        self._start, self._num_done = cursor, 0

    # Resources.

    @property
    def _frame_bytes(self) -> int:
        largest = max(_product(shape) for _, shape in self.shapes)
        return max(self._prefetch_bytes, _MIN_BATCHES_IN_RING * (largest + 4096))

    @property
    def _clip_bytes(self) -> int:
        largest = max(shard.max_clip_bytes for shards in self._selection.part.shards.values() for shard in shards)
        return max(self._prefetch_bytes // 8, 2 * (largest + 4096))

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the decode workers; empty before the first `iter()`."""
        return self._pipeline.worker_pids if self._pipeline is not None else ()

    def _open_pipeline(self) -> Pipeline:
        if self._pipeline is None:
            if self.world.rank == 0:
                _log.info("ring: %d bytes of shared memory, %d workers", self.ring_bytes, self._num_workers)
            pipeline = Pipeline(
                (self._selection.part,),
                num_workers=self._num_workers,
                clip_bytes=self._clip_bytes,
                frame_bytes=self._frame_bytes,
            )
            # Runs when the loader is collected, in whichever thread that is, or the interpreter ends.
            self._finalizer = weakref.finalize(self, pipeline.close, wait=False)
            try:
                pipeline.open()
                pin(pipeline.ring)
            except BaseException:
                pipeline.close(wait=False)
                raise
            self._pipeline = pipeline
        return self._pipeline

    def close(self) -> None:
        """End workers and threads and let go of the memory; batches that are held stay valid. Idempotent."""
        self._closed = True
        if self._pipeline is not None:
            self._pipeline.close()
        if self._finalizer is not None:
            self._finalizer.detach()
        self._pipeline = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise LoaderError("this loader is closed; make a new one")
        if os.getpid() != self._pid:
            raise LoaderError("this loader was made before a fork; make it in the process that iterates it")

    def _report(self) -> None:
        if self.world.rank != 0:
            return
        for row in self._plan.report():
            _log.info(
                "bucket %s: %d samples, %d steps of %d; %d carried, %d dropped, %d repeated",
                row.bucket_id, row.num_samples, row.num_steps_left, row.global_batch,
                row.num_carried, row.num_dropped, row.num_repeated,
            )  # fmt: skip
        starved = [f"{row.bucket_id} ({row.num_samples} of {row.global_batch})" for row in self._plan.starved]
        if starved:
            _log.warning(
                "no step in this epoch for %d of %d buckets, which have fewer samples than a step takes: %s. "
                "Lower their batch_size, use fewer ranks or tail='pad'",
                len(starved), len(self.buckets), ", ".join(starved[:10]) + (", …" if len(starved) > 10 else ""),
            )  # fmt: skip

    # What it is not.

    def __getitem__(self, index: object) -> Any:
        raise TypeError(
            "VideoLoader hands out batches, not samples: iterate it directly. It is no Dataset: "
            "do not wrap it in a torch DataLoader, it has its own workers and batches"
        )

    def __reduce__(self) -> Any:
        raise TypeError("VideoLoader cannot be pickled; make it in the process that iterates it, and pass state_dict()")


def _check_columns(columns: Sequence[str]) -> Sequence[str]:
    if isinstance(columns, str):
        raise ConfigError(f"columns={columns!r} is a string; give a list of names: [{columns!r}]")
    for name in columns:
        if name in STANDARD_FIELDS:
            raise ConfigError(f"columns: {name!r} is a field of every batch already; leave it out or rename the column")
    return columns


def _at_least(name: str, value: int | None, least: int) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ConfigError(f"{name}={value!r}; a whole number of {least} or more is allowed")
    return value


def _check_workers(num_workers: int | None) -> int:
    if num_workers is None:
        return default_num_workers()
    _at_least("num_workers", num_workers, 0)
    if num_workers and sys.platform != "linux":
        raise ConfigError(
            f"num_workers={num_workers}: decode processes need Linux; use num_workers=0 on {sys.platform}"
        )
    return num_workers


def _product(shape: Sequence[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
