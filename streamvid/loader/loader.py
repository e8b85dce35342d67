"""VideoLoader: uniform batches of sealed datasets for one rank, with an exact and resumable position."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from streamvid.buckets.bucket import Bucket
from streamvid.buckets.config import BucketConfig
from streamvid.buckets.model import ModelRule
from streamvid.config import options_of, require_integer
from streamvid.dataset.reader import Dataset
from streamvid.loader.batch.batch import Batch
from streamvid.loader.batch.ring import make_batch, pin
from streamvid.loader.delivery.pending import PendingBatch
from streamvid.loader.delivery.pipeline import Pipeline
from streamvid.loader.delivery.quarantine import Quarantine, Substitution
from streamvid.loader.delivery.requests import Selection
from streamvid.loader.mix import DataArguments, Datasets, Features
from streamvid.loader.monitor.monitor import Monitor
from streamvid.loader.options import LimitOptions, OutputOptions, ProcessGroups, ScheduleOptions
from streamvid.loader.report import report_memory, report_plan
from streamvid.loader.setup import DeliveryArguments, PlanArguments, Setup
from streamvid.loader.state import make_state
from streamvid.loader.stats import LoaderStats, StatsMeter
from streamvid.loader.stores import store_stats
from streamvid.loader.unsupported import UnsupportedProtocols
from streamvid.loader.versions import LoaderArguments, agreed_versions, followed
from streamvid.loader.view.view import ViewOptions
from streamvid.plan import BucketReport, Cursor, PlanOptions, World
from streamvid.plan.options import Shuffle, Sync
from streamvid.plan.position import MAX_EPOCH
from streamvid.plan.tail import Tail
from streamvid.storage import StorageOptions

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


class VideoLoader(UnsupportedProtocols):
    """Stream of uniform batches from sealed datasets, for one rank of a training run.

    All ranks have the same number of steps and the same bucket at each step, unless `tail` or `sync` changes this.
    Related options form one object, which may also be given as a mapping: `view={"temporal": "head"}`.

    dataset: local path, file:// or s3:// URL, open Dataset, DatasetConfig (or a mapping of its fields), or a list of
        these, whose samples are mixed.
    batch_size: samples per rank per step: one number, a mapping from buckets (id, WxH@F, glob, or "*" for all others)
        to numbers, or a BucketConfig.
    max_tokens_per_batch: maximum number of tokens per batch, in place of batch_size. Tokens are counted for the
        model of `preset`, else for the model that the dataset was sealed for, else as one per 4 x 16 x 16 (T, H, W)
        block.
    preset: model to train: a preset name such as "wan2.1-480p", a bucket configuration file, or a ModelRule. Datasets
        that do not fit the model are rejected.
    world: data-parallel position of this process. None: taken from torch.distributed if it is initialized, else from
        launcher variables, else a single rank.
    num_epochs: number of epochs per `for` loop; None for an endless loop.
    seed: seed for all random choices.
    shuffle: "window" permutes shards, and samples within runs of `schedule.window` shards; "shards" permutes only
        shards; "none" permutes nothing.
    tail: policy for a bucket's last samples, which do not fill a global batch: "carry", "drop", "pad", "shrink" or
        "uneven"; see PlanOptions. None selects "carry" for split "train", else "uneven". "uneven" delivers each sample
        exactly once; the last batches may differ in size between ranks, or be missing on some ranks.
    sync: "bucket": all ranks have the same bucket at each step; "cost": their buckets have similar predicted costs.
    accumulate: number of gradient accumulation steps. The number of steps per epoch is a multiple of it.
    split: split of the dataset to deliver.
    where: condition on columns, such as "aesthetic > 5". Samples that do not meet it are omitted.
    columns: index columns that are delivered with each batch.
    media: names of conditioning inputs (control videos, reference images, masks, audio) to deliver in `batch.media`.
    features: precomputed features that `streamvid encode` created from the dataset, delivered instead of video: a path,
        a URL or an open Sidecar, or a list with one of these per dataset. Features that were created with another view
        or seed are rejected.
    view: frames and crop of each delivered clip; see ViewOptions.
    output: layout, pixel format and decoding of samples, the sample ledger, and metrics; see OutputOptions.
    schedule: order of samples, and their number per epoch; see ScheduleOptions.
    limits: limits on memory, time and bad samples; see LimitOptions.
    storage: access to object stores, and a local cache; see StorageOptions.
    groups: processes that compare their plans and batches; see ProcessGroups.
    device: device to which batches are copied, one batch ahead. None: batches stay in the ring (shared host memory),
        which is pinned if CUDA is available.
    num_workers: number of decode processes; 0 decodes in a thread of this process. None: this rank's share of the
        cores, at most 8.

    The loader is a plain iterable. Do not wrap it in a `DataLoader`: it has its own workers and batching.
    `accelerator.prepare` leaves it unchanged. When a loop ends, or has received the last batch of the epoch, the
    loader moves to the next epoch. Calling `iter()` after a `break` starts the epoch again, with a warning. If a
    caller stops after the number of batches that `len()` returned for an earlier epoch, its next loop delivers the
    remaining batches first.

    Raises ConfigError for invalid arguments, DatasetError for unreadable datasets, and PlanError if no batch can be
    delivered. Iteration raises LoaderError, in particular its subclasses SampleError, WorkerError and RingFullError;
    ConfigError if the plans of the ranks differ; and StorageError if a quarantine or ledger file cannot be written.
    """

    def __init__(
        self,
        dataset: Datasets | Sequence[Datasets],
        *,
        batch_size: int | Mapping[str, int] | BucketConfig | None = None,
        max_tokens_per_batch: int | None = None,
        preset: str | Path | ModelRule | None = None,
        world: World | None = None,
        num_epochs: int | None = 1,
        seed: int = 0,
        shuffle: Shuffle = "window",
        tail: Tail | None = None,
        sync: Sync = "bucket",
        accumulate: int = 1,
        split: str = "train",
        where: str | None = None,
        columns: Sequence[str] = (),
        media: Sequence[str] = (),
        features: Features | Sequence[Features | None] | None = None,
        view: ViewOptions | Mapping[str, Any] | None = None,
        output: OutputOptions | Mapping[str, Any] | None = None,
        schedule: ScheduleOptions | Mapping[str, Any] | None = None,
        limits: LimitOptions | Mapping[str, Any] | None = None,
        storage: StorageOptions | Mapping[str, Any] | None = None,
        groups: ProcessGroups | Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        num_workers: int | None = None,
    ) -> None:
        data = DataArguments(
            dataset,
            split,
            where,
            columns,
            media,
            features,
            options_of(ViewOptions, view, "view"),
            StorageOptions.of(storage),
        )
        plan = PlanArguments(
            batch_size,
            max_tokens_per_batch,
            preset,
            world,
            num_epochs,
            seed,
            shuffle,
            tail,
            sync,
            accumulate,
            options_of(ScheduleOptions, schedule, "schedule"),
        )
        made = options_of(OutputOptions, output, "output")
        limited = options_of(LimitOptions, limits, "limits")
        delivery = DeliveryArguments(made, limited, options_of(ProcessGroups, groups, "groups"), device, num_workers)
        self._arguments = LoaderArguments(data, plan, delivery)
        self._arguments.check_follow()
        self._setup, self.split = self._arguments.set_up(), split
        self._monitor = Monitor(self._setup, split)
        self._meter = StatsMeter(self._monitor.resources)
        weakref.finalize(self, self._monitor.close)
        self._pipeline = self._new_pipeline()
        self._is_due = True  # the next epoch begins in the newest version, if versions are followed
        self._start, self._num_done, self._num_in_loop = Cursor(), 0, 0
        self._lengths: set[int] = set()  # all results of len()
        self._plan = self._selection.plan(self._start)
        self._plan.check(num_epochs)
        if self.world.rank == 0:
            self._report()

    def _report(self) -> None:
        report_plan(self._plan, len(self.buckets))
        pixels = self._setup.pipeline.pixels if self._setup.pipeline.decode else None
        report_memory(self.buckets, self.batch_sizes, pixels, self.ring_bytes)

    def __repr__(self) -> str:
        urls, sizes = ", ".join(dataset.url for dataset in self.datasets), sorted(set(self.batch_sizes.values()))
        sized = f"buckets: {len(self.buckets)}, batch size: {'/'.join(map(str, sizes))}"
        rank = f"rank {self.world.rank} of {self.world.num_ranks}"
        return f"VideoLoader({urls}; {sized}, {rank}; epoch {self.epoch}, steps left: {self.num_steps_left})"

    @property
    def _selection(self) -> Selection:
        return self._setup.selection

    @property
    def world(self) -> World:
        """Data-parallel position of this process."""
        return self._selection.world

    @property
    def options(self) -> PlanOptions:
        """Plan options, such as the shuffle and the tail policy."""
        return self._selection.options

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets, sorted by id."""
        return self._setup.buckets

    @property
    def batch_sizes(self) -> Mapping[str, int]:
        """Mapping from bucket id to samples per rank per step."""
        return self._selection.batch_sizes

    @property
    def datasets(self) -> tuple[Dataset, ...]:
        """All datasets, in the order in which they were given."""
        return tuple(part.dataset for part in self._selection.mix.parts)

    @property
    def view_facts(self) -> tuple[Mapping[str, Any], ...]:
        """View settings of each dataset, as JSON. Features must have been created with the same settings."""
        return self._setup.view_facts

    @property
    def dataset(self) -> Dataset:
        """The loader's dataset, or its first dataset if it has several."""
        return self.datasets[0]

    # Remaining work.

    def __len__(self) -> int:
        """Return the number of batches in the whole current epoch.

        The number is the same on all ranks, except with tail="uneven".
        """
        if self.options.tail_rule.is_equal:
            length = self._plan.num_steps
        else:
            length = self._plan.at(Cursor(self.epoch)).num_batches_left(self.world.rank)
        self._lengths.add(length)
        return length

    @property
    def epoch(self) -> int:
        """Current epoch: the epoch of the last batch handed out, or the epoch that begins next."""
        return self._plan.cursor.epoch

    @property
    def num_steps_left(self) -> int:
        """Number of remaining batches in the current epoch."""
        return self._plan.num_batches_left(self.world.rank, self._num_done)

    def num_steps(self, num_epochs: int) -> int:
        """Return the total number of steps in the first `num_epochs` epochs, as needed by learning rate schedules."""
        return self._plan.num_steps_through(num_epochs)

    def plan_report(self) -> tuple[BucketReport, ...]:
        """Return counts per bucket for the remainder of the epoch: delivered, carried, dropped and repeated samples."""
        return self._plan.report()

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """List of (bucket id, shape of `batch.video` in a full batch) for a warm-up, largest shape first.

        With tail="shrink" or tail="uneven", the last batches can be smaller.
        """
        return self._setup.shapes

    @property
    def ring_bytes(self) -> int:
        """Size in bytes of the shared memory that a loop allocates for decoded frames and for clips read ahead."""
        options = self._setup.pipeline
        return options.frame_bytes + options.clip_bytes + self._selection.mix.max_clip_bytes

    def stats(self) -> LoaderStats:
        """Return statistics on the batches handed out so far: times, bytes, substitutions and requests."""
        store, cache = store_stats(self._selection.mix.sources)
        depth, in_ring = self._pipeline.queue_depth, self._pipeline.num_in_ring
        return replace(self._meter.stats(), store=store, cache=cache, queue_depth=depth, ring_batches=in_ring)

    @property
    def substituted(self) -> list[Substitution]:
        """Records of the last 10,000 bad samples on this rank, with their substitutes (BAD-1)."""
        return self._pipeline.substituted

    # Iteration.

    def __iter__(self) -> Iterator[Batch]:
        self._open_pipeline().stop()
        counts = {self._num_in_loop, self._plan.cursor.step + self._num_done}  # of this loop; of the epoch
        is_stopped_by_count = self._num_done > 0 and self.num_steps_left > 0 and not counts.isdisjoint(self._lengths)
        is_again = self._num_done > 0 and self.num_steps_left > 0 and not is_stopped_by_count
        self._move_to(self._next_start(is_stopped_by_count))
        self._follow()
        self._setup.compare(self._plan.cursor)
        epoch, span = self._plan.cursor.epoch, self._setup.num_epochs
        end_epoch = None if span is None else (epoch // span + 1 + is_stopped_by_count) * span
        return self._iterate(*self._start_run(end_epoch, is_again), end_epoch)

    def _start_run(self, end_epoch: int | None, is_again: bool = False) -> tuple[Pipeline, int]:
        """Start a run that ends before `end_epoch`, or after one epoch with `follow`. Return (pipeline, run number)."""
        self._monitor.begin(self._setup, self._plan.cursor, is_again, self.stats)
        pipeline = self._open_pipeline()
        run, last = pipeline.stop(), self._plan.cursor.epoch + 1 if self._follows else end_epoch
        pipeline.start(run, self._selection.requests(self._plan, last))
        return pipeline, run

    def _next_start(self, is_stopped_by_count: bool) -> Cursor:
        """Return the position at which a new loop begins."""
        if not self._num_done:
            return self._start
        # A caller that counts batches may take the last one and never ask for the end; the epoch is over nevertheless.
        if not self.num_steps_left:
            self._is_due = True
            return self._plan.next_epoch()
        # Lightning and others ask for the length once, and take this number of batches from every later epoch. If the
        # epoch began again, a longer one would never end.
        if is_stopped_by_count:
            return self._plan.cursor_after(self._num_done)
        if self.split == "train":
            _log.warning(
                "epoch %d begins again, although %d of its batches were not delivered; to continue the epoch "
                "instead, call loader.load_state_dict(loader.state_dict()) before the loop",
                self.epoch,
                self.num_steps_left,
            )
        return self._start

    def _iterate(self, pipeline: Pipeline, run: int, end_epoch: int | None) -> Iterator[Batch]:
        try:
            while True:
                yield from self._batches(pipeline, run)
                if self._setup.shared_check is not None:
                    self._setup.shared_check.end(self.epoch)
                num_in_loop = self._num_in_loop
                self._move_to(self._plan.next_epoch())
                self._is_due = True
                self._follow()
                if not self._follows or self.epoch == end_epoch:
                    break
                self._num_in_loop = num_in_loop
                pipeline, run = self._start_run(end_epoch)
            while end_epoch is not None and self.epoch < end_epoch:  # trailing epochs without a step
                self._move_to(self._plan.next_epoch())
        finally:
            # Runs in whichever thread garbage-collects an abandoned iterator, so it must not wait.
            pipeline.cancel(run)

    def _batches(self, pipeline: Pipeline, run: int) -> Iterator[Batch]:
        return self._setup.stage.batches(
            lambda: pipeline.next_batch(run),
            lambda: pipeline.has_batch(run),
            self._made,
            lambda pending, waited, making: self._hand_over(pipeline, pending, waited, making),
        )

    def _hand_over(self, pipeline: Pipeline, pending: PendingBatch, waited: float, making: float) -> None:
        planned_keys = {slot: record.key for slot, record in pending.substituted.items()}
        pipeline.count(pending)
        self._monitor.hand_over(pending, planned_keys)
        plan, num_done = pending.request.position
        if plan is not self._plan:
            self._plan, self._start = plan, plan.cursor
        self._num_done = num_done
        self._num_in_loop += 1
        depth = pipeline.queue_depth
        self._meter.add(
            pending.stats, len(pending.deliveries), wait_seconds=waited, batch_seconds=making, queue_depth=depth
        )
        self._monitor.watch(self._meter, self.stats)
        if self._setup.shared_check is not None:
            keys = [one.key for one in pending.deliveries]
            self._setup.shared_check.batch(self.epoch, num_done - 1, pending.digest, keys)

    def _made(self, pending: PendingBatch) -> Batch:
        setup, output = self._setup, self._setup.output
        batch = make_batch(pending, setup.columns, setup.numeric, output.layout, output.tokenizer)
        if setup.shared_check is not None:  # while the batch is on the host; reading it back from a device would wait
            pending.digest = batch.digest()
        return batch

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch handed out, as JSON. It is the same on all ranks at each step."""
        return make_state(self._plan, self._num_done, self._setup.belongs_to, self._setup.versions)

    def load_state_dict(self, state: Mapping[str, Any], *, force: bool = False) -> None:
        """Resume at the next `iter()`, after the batch at which `state` was saved. A loop in progress ends.

        If the samples of a dataset have changed since then, the version recorded in the state is opened, unless the
        dataset was passed as an open Dataset or with another version.

        Raises StateError, and changes nothing, for a state from another dataset, split, filter, seed, shuffle or tail,
        or from a version that was deleted.
        With `force`, such a state is used as an approximate position: the same epoch, after about the same share of its
        steps, in the versions that are open. Some samples of that epoch may then be repeated or missing. From the next
        epoch on, each sample is delivered exactly once.

        After a resume within an accumulation group, loss weights count only the remaining batches of that group.
        """
        self._pipeline.check_usable()
        setup, cursor = self._arguments.resumed(self._setup, state, force)
        self._pipeline.stop()
        self._use(setup)
        self._is_due = False
        self._move_to(cursor)

    def set_epoch(self, epoch: int, step: int | None = None) -> None:
        """Start the given epoch at the next `iter()`, at step `step` if given. A loop in progress ends.

        Without `step`, the current epoch keeps its position, so that the usual `set_epoch` before each loop does not
        undo a resume. Raises ConfigError for an invalid epoch, or for a step that the epoch does not contain.
        """
        require_integer("epoch", epoch, 0, MAX_EPOCH - 1)
        if step is not None:
            start = self._selection.plan(Cursor(epoch))
            self._jump_to(start.cursor_after(require_integer("step", step, 0, start.num_steps_left)))
            self._is_due = False
        elif epoch == self.epoch and self._num_done and not self.num_steps_left:
            # The caller requests this epoch again after its last batch; iter() alone would begin the next one.
            self._jump_to(self._start)
        elif epoch != self.epoch:
            # The epoch after a finished one starts where the finished one ended. After a resume with other batch sizes,
            # this differs from its default start.
            follows = epoch == self.epoch + 1 and not self.num_steps_left
            self._jump_to(self._plan.next_epoch() if follows else Cursor(epoch=epoch))
            self._is_due = True

    # Versions.

    @property
    def _follows(self) -> bool:
        return self._arguments.plan.schedule.follow

    def _follow(self) -> None:
        """If `schedule.follow` is set and an epoch is about to begin, switch to the newest versions of the datasets."""
        if not self._follows:
            return
        mix, is_due, self._is_due = self._selection.mix, self._is_due, False
        versions = agreed_versions(mix, is_due, self.world, self._setup.compared_groups)
        if versions is not None and versions != mix.versions:
            setup, start = followed(self._arguments, self._setup, self._plan, versions)
            setup.selection.plan(start).check(self._setup.num_epochs)
            self._use(setup)
            self._move_to(start)
            if self.world.rank == 0:
                self._report()

    def _use(self, setup: Setup) -> None:
        """Continue with another setup: create its pipeline, and close the pipeline of the current setup."""
        if setup is self._setup:
            return
        old, self._setup = self._pipeline, setup
        self._finalizer.detach()
        self._pipeline = self._new_pipeline(old.quarantine)
        old.close()

    def _jump_to(self, cursor: Cursor) -> None:
        self._move_to(cursor)
        self._pipeline.stop()

    def _move_to(self, cursor: Cursor) -> None:
        self._plan = self._selection.plan(cursor)
        self._start, self._num_done, self._num_in_loop = cursor, 0, 0

    # Resources.

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process IDs of the decode workers. Empty before the first `iter()`."""
        return self._pipeline.worker_pids

    def _new_pipeline(self, quarantine: Quarantine | None = None) -> Pipeline:
        pipeline = Pipeline(self._selection.parts, self._setup.pipeline, quarantine)
        # Runs when the loader is garbage-collected, in any thread, or when the interpreter exits.
        self._finalizer = weakref.finalize(self, pipeline.close, wait=False)
        return pipeline

    def _open_pipeline(self) -> Pipeline:
        pipeline = self._pipeline
        pipeline.check_usable()
        if not pipeline.is_open:
            try:
                pipeline.open()
                pin(pipeline.ring, self._setup.stage.device)
            except BaseException:
                self._pipeline = self._new_pipeline(pipeline.quarantine)  # the next loop may succeed
                pipeline.close(wait=False)
                raise
        return pipeline

    def close(self) -> None:
        """Stop workers and threads and release memory. Batches that the caller holds stay valid. Idempotent."""
        self._monitor.finish(self.stats)
        self._pipeline.close()
        self._finalizer.detach()
        self._monitor.close()
        for source in self._selection.mix.sources:
            source.store.disconnect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
