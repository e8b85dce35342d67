"""VideoLoader: sealed datasets as uniform batches for one rank, exactly and resumably."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from streamvid.buckets.config import BucketConfig
from streamvid.buckets.model import ModelRule
from streamvid.dataset.reader import Dataset
from streamvid.errors import LoaderError
from streamvid.loader import arguments
from streamvid.loader.batch.batch import Batch, Layout
from streamvid.loader.batch.features import Sidecars
from streamvid.loader.batch.ring import make_batch, pin
from streamvid.loader.batch.tokens import Tokenizer
from streamvid.loader.delivery.pipeline import PendingBatch, Pipeline
from streamvid.loader.delivery.quarantine import Substitution
from streamvid.loader.exchange import compare_plans
from streamvid.loader.mix import DatasetConfig
from streamvid.loader.report import report_memory, report_plan
from streamvid.loader.setup import Given, ring_bytes, set_up
from streamvid.loader.state import belongs, make_state, plan_identity, read_state
from streamvid.loader.stats import LoaderStats, StatsMeter
from streamvid.loader.stores import sources_of, store_stats
from streamvid.loader.view.view import Spatial, Temporal, ViewOptions
from streamvid.plan import BucketReport, Cursor, World
from streamvid.plan.cost import CostTable
from streamvid.plan.mix import MixBy
from streamvid.plan.options import Order, Shuffle, Sync, Tail
from streamvid.storage import StorageOptions
from streamvid.video.picture import Accuracy, Pixels

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_DEFAULT_PREFETCH_BYTES = 256 * 2**20


class VideoLoader:
    """Streams datasets as `Batch`es; every rank gets the same number of steps, all of the same bucket at a step.

    dataset: a local path, a file:// or s3:// URL, an open Dataset, a DatasetConfig; or a list of them, which are mixed.
    storage: StorageOptions, or a mapping of their fields: how object stores are reached.   cache_dir, cache_bytes: a
        local folder for what is read from them, and its limit; shared by all ranks and jobs of a machine.
    batch_size: samples a rank and step, for all or by bucket (id, WxH@F, glob, "*" for the rest), or a BucketConfig; or
    max_tokens_per_batch: give each bucket as many samples as fit: tokens of `preset`'s model, else of the one that the
        dataset was sealed for, else of 4 x 16 x 16 (T, H, W) of a clip.
    preset: the model to train, "wan2.1-480p", a file or a ModelRule: a dataset that it does not take is refused.
    world: data-parallel position; None asks torch.distributed, then launcher variables, else one rank.
    num_epochs: passes that one `for` loop runs over; None: endless.
    accumulate: batches between two steps of the optimizer; the number of steps of an epoch is a multiple of it.

    shuffle: "window", over runs of `window` shards | "shards" | "none".   order: "mixed" | "largest-first".
    deal: so many samples of a step are sorted by shard before the ranks take theirs: more mean fewer requests.
    tail: what becomes of samples that fill no step: "carry" | "drop" | "pad" | "shrink" | "uneven", see PlanOptions.
        None: "carry" for split "train"; "uneven" for others, where each sample comes exactly once and ranks may have
        unequal last batches, or none.
    sync: "bucket" | "cost": buckets whose predicted cost is about the same may share a step.
    costs: what `fit_costs` made of measured steps; None: predicted from tokens alone.
    split: the samples' split, as sharded.   where: a condition on columns; samples that do not meet it are left out.
    samples_per_epoch, mix_by: with weights of datasets: how many samples an epoch has (None: as many as there are), and
        whether weights are shares of "samples" or "tokens".
    columns: columns of the index to hand over with each batch.   media: further media of the samples, by name, as
        `batch.media`: control videos, reference images, masks.
    temporal: which frames: a "random" window | "head" | "middle" | "uniform", spread over the clip | "chunk", windows
        side by side, one a visit | "full" | "opensora".   max_interval: frames lie up to so many apart, drawn.
    spatial: which part of pictures, all scaled to cover the bucket: the middle ("resize_crop", of squares "center") | a
        place drawn ("random_crop") | and a size, between spatial_scale of its largest sides ("rand_size_crop").
    tokenizer: called once a batch with its texts, a list of str, in the caller's thread, while workers decode; its
        result is `batch.text_tokens`, int64 (B, L), and `batch.text_mask`, bool (B, L), see `Batch`.

    device: where batches go, one ahead; None: they stay in the (pinned) ring.   layout: of `batch.video`, which is RGB.
    pixels: of the ring: "rgb24", or "yuv420p", half the bytes and less work, of which the device makes RGB exactly.
        None: "yuv420p" with a CUDA device, else "rgb24".
    accuracy: of RGB that decoders make: "exact", or "fast", swscale's default, 1 to 3 levels too dark. None: "exact"
        for clips that are scaled anyway, "fast" for others, where exact would double the time.
    decode: False: `batch.clips` instead of `batch.video`, the stored bytes that the frames need, for your own decoder.
    num_workers: decode processes, 0 to decode in a thread of the caller; None: the cores of this rank, 8 at most.
    prefetch_bytes: how much decoded video may lie ready; at least three of the largest batches are given room.
    sample_timeout_seconds: of one read and of one decode; None: no limit.
    max_bad_fraction: the share of bad samples, which others of their bucket replace, past which the run fails: of those
        delivered to this rank or of 1000, whichever is more, so 0.01 always allows ten. A bucket without a good sample
        and a missing shard file are errors in any case.   quarantine: a local folder for this rank's file of bad ones.
    process_group: processes whose plans are compared when a loop begins; None: all of torch.distributed, if `world` is
        None too.   shared_group: the processes that share this rank's batches, which are compared at every step.
    sidecars: what `streamvid encode` made of the dataset, delivered instead of its video: a path, a URL or an open
        Sidecar, or a list, one a dataset. One that was made with other views or another seed is refused.

    A loop that ends, or that took the epoch's last batch, moves the loader to the next epoch; `iter()` after an earlier
    `break` starts the epoch anew. Not a torch Dataset: do not wrap it in a DataLoader; `accelerator.prepare(loader)`
    leaves it as it is.

    Raises ConfigError, DatasetError, PlanError; while iterating SampleError, WorkerError, RingFullError.
    """

    def __init__(
        self,
        dataset: str | Path | Dataset | DatasetConfig | Sequence[str | Path | Dataset | DatasetConfig],
        *,
        batch_size: int | Mapping[str, int] | BucketConfig | None = None,
        max_tokens_per_batch: int | None = None,
        preset: str | Path | ModelRule | None = None,
        world: World | None = None,
        num_epochs: int | None = 1,
        accumulate: int = 1,
        shuffle: Shuffle = "window",
        window: int = 16,
        order: Order = "mixed",
        deal: int = 64,
        tail: Tail | None = None,
        sync: Sync = "bucket",
        costs: CostTable | None = None,
        seed: int = 0,
        split: str = "train",
        where: str | None = None,
        samples_per_epoch: int | None = None,
        mix_by: MixBy = "samples",
        columns: Sequence[str] = (),
        media: Sequence[str] = (),
        temporal: Temporal = "random",
        max_interval: int = 1,
        spatial: Spatial = "resize_crop",
        spatial_scale: tuple[float, float] | None = None,
        tokenizer: Tokenizer | None = None,
        device: torch.device | str | None = None,
        layout: Layout = "BCTHW",
        pixels: Pixels | None = None,
        accuracy: Accuracy | None = None,
        decode: bool = True,
        num_workers: int | None = None,
        prefetch_bytes: int = _DEFAULT_PREFETCH_BYTES,
        storage: StorageOptions | Mapping[str, Any] | None = None,
        cache_dir: str | Path | None = None,
        cache_bytes: int | None = None,
        sample_timeout_seconds: float | None = 60.0,
        max_bad_fraction: float = 0.01,
        quarantine: str | Path | None = None,
        process_group: ProcessGroup | None = None,
        shared_group: ProcessGroup | None = None,
        sidecars: Sidecars = None,
    ) -> None:
        made = set_up(Given(
            dataset=dataset, batch_size=batch_size, max_tokens_per_batch=max_tokens_per_batch, preset=preset,
            world=world, num_epochs=num_epochs, accumulate=accumulate, shuffle=shuffle, window=window,
            order=order, deal=deal, tail=tail, sync=sync, costs=costs, seed=seed, split=split, where=where,
            samples_per_epoch=samples_per_epoch, mix_by=mix_by, columns=columns, media=media,
            view=ViewOptions(temporal, max_interval, spatial, spatial_scale), tokenizer=tokenizer,
            device=device, layout=layout, pixels=pixels, accuracy=accuracy, decode=decode,
            num_workers=num_workers, prefetch_bytes=prefetch_bytes, storage=storage, cache_dir=cache_dir,
            cache_bytes=cache_bytes, sample_timeout_seconds=sample_timeout_seconds,
            max_bad_fraction=max_bad_fraction, quarantine=quarantine,
            process_group=process_group, shared_group=shared_group, sidecars=sidecars,
        ))  # fmt: skip
        self.world, self.options, self.split = made.world, made.options, split
        self.datasets = tuple(part.dataset for part in made.mix.parts)
        self.buckets, self.batch_sizes = made.buckets, made.selection.batch_sizes
        self._mix, self._selection, self._columns, self._numeric = made.mix, made.selection, made.columns, made.numeric
        self._tokenizer, self.view_facts = tokenizer, made.view_facts
        self._layout, self._num_epochs, self._pipeline_options = made.layout, made.num_epochs, made.pipeline_options
        self._stage, self._meter, self._groups, self._shared = made.stage, StatsMeter(), made.groups, made.shared
        self._pipeline: Pipeline | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._pid, self._closed = os.getpid(), False
        self._start, self._num_done = Cursor(), 0
        self._plan = self._selection.plan(self._start)
        self._plan.check(num_epochs)
        if self.world.rank == 0:
            report_plan(self._plan, len(self.buckets))
            report_memory(self.buckets, self.batch_sizes, self._pipeline_options, self.ring_bytes)

    @property
    def dataset(self) -> Dataset:
        """The dataset; of several the first."""
        return self.datasets[0]

    # What there is to come.

    def __len__(self) -> int:
        """Batches of the whole current epoch: the same on every rank, but for tail="uneven"."""
        if self.options.tail != "uneven":
            return self._plan.num_steps
        return self._plan.at(Cursor(self.epoch)).num_batches_left(self.world.rank)

    @property
    def epoch(self) -> int:
        """The epoch of the batch handed out last, or of the one to come."""
        return self._plan.cursor.epoch

    @property
    def num_steps_left(self) -> int:
        """Batches of the current epoch that were not handed out yet."""
        return self._plan.num_batches_left(self.world.rank, self._num_done)

    def num_steps(self, num_epochs: int) -> int:
        """Steps of the first `num_epochs` epochs together: what a learning rate schedule wants to know."""
        return self._plan.num_steps_through(num_epochs)

    def plan_report(self) -> tuple[BucketReport, ...]:
        """For each bucket, what the rest of the epoch delivers, carries over, drops and repeats, over all ranks."""
        return self._plan.report()

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """(bucket id, shape of `batch.video`) of every whole batch, largest first: for a warm-up.

        Last batches of tail="shrink" and "uneven" are smaller.
        """
        return arguments.shapes_of(self.buckets, self.batch_sizes, self._layout)

    @property
    def ring_bytes(self) -> int:
        """Shared memory that the loader takes once it iterates: the ring of decoded frames and the clips read ahead."""
        return ring_bytes(self._pipeline_options, self._mix.max_clip_bytes)

    def stats(self) -> LoaderStats:
        """What the batches handed over so far cost: waiting, reading, decoding, bytes, substitutions, requests."""
        store, cache = store_stats(sources_of(self._mix.parts))
        return replace(self._meter.stats(), store=store, cache=cache)

    @property
    def substituted(self) -> list[Substitution]:
        """The bad samples that others took the place of, the last 10000 of this rank (BAD-1)."""
        return self._pipeline.substituted if self._pipeline is not None else []

    # Iterating.

    def __iter__(self) -> Iterator[Batch]:
        self._check_usable()
        pipeline = self._open_pipeline()
        pipeline.stop()
        # Who counts its batches takes the last and never asks for the end of the loop: that epoch is over all the same.
        is_over = self._num_done and not self.num_steps_left
        self._move_to(self._plan.next_epoch() if is_over else self._start)
        self._compare()
        epoch, span = self._plan.cursor.epoch, self._num_epochs
        end_epoch = None if span is None else (epoch // span + 1) * span
        run = pipeline.start(self._selection.requests(self._plan, end_epoch))
        return self._iterate(pipeline, run, end_epoch)

    def _iterate(self, pipeline: Pipeline, run: int, end_epoch: int | None) -> Iterator[Batch]:
        try:
            yield from self._stage.batches(
                lambda: pipeline.next_batch(run),
                lambda: pipeline.has_batch(run),
                self._made,
                lambda pending, waited, making: self._hand_over(pipeline, pending, waited, making),
            )
            if self._shared is not None:
                self._shared.end(self.epoch)
            self._move_to(self._plan.next_epoch())
            while end_epoch is not None and self.epoch < end_epoch:  # epochs at the end that had no step
                self._move_to(self._plan.next_epoch())
        finally:
            # Runs wherever an abandoned iterator is collected, so it must not wait.
            pipeline.cancel(run)

    def _hand_over(self, pipeline: Pipeline, pending: PendingBatch, waited: float, making: float) -> None:
        pipeline.count(pending)
        plan, num_done = pending.request.position
        if plan is not self._plan:
            self._plan, self._start = plan, plan.cursor
        self._num_done = num_done
        depth = pipeline.queue_depth
        self._meter.add(pending.stats, len(pending.rows), wait_seconds=waited, batch_seconds=making, queue_depth=depth)
        if self._shared is not None:
            keys = [row["key"] for row in pending.rows]
            self._shared.batch(self.epoch, num_done - 1, pending.digest, keys)

    def _made(self, pending: PendingBatch) -> Batch:
        batch = make_batch(pending, self._columns, self._numeric, self._layout, self._tokenizer)
        if self._shared is not None:  # while it is on the host: reading it back from a device would wait for that
            pending.digest = batch.digest()
        return batch

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, JSON-able, counting batches handed out; equal on all ranks after the same step."""
        return make_state(self._plan, self._num_done, self._belongs_to())

    def load_state_dict(self, state: Mapping[str, Any], *, force: bool = False) -> None:
        """Go on after the batch that `state` was taken at, at the next `iter()`; a loop that runs now is over.

        Raises StateError for a state of another dataset, split, filter, seed, shuffle or tail, and changes nothing
        then. `force` takes it all the same, as near as can be: the same epoch, and about the same share of its steps
        (none of them, if the state does not say). Which samples of that epoch came before is not known: some come
        again and some do not come, and that each comes once holds from the next epoch on.
        Within a group of `accumulate`, the loss weights of the rest of that group are of that rest alone.
        """
        self._check_usable()
        cursor, progress, belongs_to = read_state(state)
        if not belongs(belongs_to, self._belongs_to(), force):
            cursor = self._selection.at_share(cursor.epoch, progress)
        self._selection.check(cursor)
        self._jump_to(cursor)

    def set_epoch(self, epoch: int, step: int | None = None) -> None:
        """Start the given epoch at the next `iter()`, from its step `step` if that is given; a loop that runs is over.

        Without `step` the current epoch stays where it stands, so that the usual `set_epoch` before each loop undoes no
        resume. Raises ConfigError for an epoch that cannot be, and a step that the epoch does not have.
        """
        arguments.epoch_of(epoch)
        if step is not None:
            start = self._selection.plan(Cursor(epoch))
            self._jump_to(start.cursor_after(arguments.step_of(step, start.num_steps_left)))
        elif epoch == self.epoch and self._num_done and not self.num_steps_left:
            # Asked for again after its last batch, which iter() alone would take for its end.
            self._jump_to(self._start)
        elif epoch != self.epoch:
            # The epoch after one that is over opens where that one ended, which is not its natural start after a resume
            # with other batch sizes.
            follows = epoch == self.epoch + 1 and not self.num_steps_left
            self._jump_to(self._plan.next_epoch() if follows else Cursor(epoch=epoch))

    def _belongs_to(self) -> dict[str, Any]:
        # With another tail, positions mean the same samples; but one that "carry" has carried is behind the start of
        # the epoch, where the others do not look: it would be lost without a word.
        options = {**self.options.order_key(), "tail": self.options.tail}
        return {"datasets": self._mix.identity(), "split": self.split, **options}

    def _compare(self) -> None:
        """The plan's hash, compared with that of the other processes before the first step of a loop."""
        if self._groups[0]:
            costs = self._selection.costs if arguments.uses_costs(self.options) else {}
            parts = {"num_epochs": self._num_epochs, "costs": costs, "batch_sizes": self.batch_sizes}
            identity = plan_identity(self._belongs_to(), self._plan.cursor, self.options, parts)
            compare_plans(identity, self.world, *self._groups[1:])

    def _jump_to(self, cursor: Cursor) -> None:
        self._move_to(cursor)
        if self._pipeline is not None:
            self._pipeline.stop()

    def _move_to(self, cursor: Cursor) -> None:
        self._plan = self._selection.plan(cursor)
        self._start, self._num_done = cursor, 0

    # Resources.

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the decode workers; empty before the first `iter()`."""
        return self._pipeline.worker_pids if self._pipeline is not None else ()

    def _open_pipeline(self) -> Pipeline:
        if self._pipeline is None:
            pipeline = Pipeline(self._mix.parts, **self._pipeline_options)
            # Runs when the loader is collected, in whichever thread that is, or the interpreter ends.
            self._finalizer = weakref.finalize(self, pipeline.close, wait=False)
            try:
                pipeline.open()
                pin(pipeline.ring, self._stage.device)
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

    # What it is not.

    def __getitem__(self, index: object) -> Any:
        raise TypeError(
            "VideoLoader hands out batches, not samples: iterate it directly. It is no Dataset: "
            "do not wrap it in a torch DataLoader, it has its own workers and batches"
        )

    def __reduce__(self) -> Any:
        raise TypeError("VideoLoader cannot be pickled; make it in the process that iterates it, and pass state_dict()")
