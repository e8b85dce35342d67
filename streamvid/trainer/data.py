"""The batches of a run: the training loader, and a small fixed set to judge the model by."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor

from streamvid.trainer.config import TrainConfig
from streamvid.trainer.flow import Velocity, draw_noise_and_times, rectified_flow_loss, seeded_generator
from streamvid.trainer.metrics import data_fields

if TYPE_CHECKING:
    from streamvid.loader.batch import Batch
    from streamvid.loader.stats import LoaderStats

_log = logging.getLogger(__name__)


class Batches(Protocol):
    """What training asks of a loader; `streamvid.VideoLoader` is one. Steps are equal in number on all ranks."""

    @property
    def epoch(self) -> int: ...
    @property
    def num_steps_left(self) -> int: ...
    def __iter__(self) -> Iterator[Batch]: ...
    def num_steps(self, num_epochs: int) -> int: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class BatchClock:
    """Batches without end, epoch after epoch, the time that passes while they come, and what the loader says of it.

    A loader without `stats()` is no less a loader: then there is the time alone.
    """

    def __init__(self, loader: Iterable[Batch]) -> None:
        self._batches = itertools.chain.from_iterable(itertools.repeat(loader))
        self._stats: Callable[[], LoaderStats] | None = getattr(loader, "stats", None)
        self._before = self._stats() if self._stats else None
        self._since = time.perf_counter()
        self._wait_seconds = 0.0

    def next_batch(self) -> Batch:
        before = time.perf_counter()
        batch = next(self._batches)
        self._wait_seconds += time.perf_counter() - before
        return batch

    def take_fields(self) -> dict[str, float]:
        """Seconds since the last call, those of them that went into waiting for data, and the loader's own figures."""
        now = time.perf_counter()
        spent = {"seconds": round(now - self._since, 4), "data_wait_seconds": round(self._wait_seconds, 4)}
        self._since, self._wait_seconds = now, 0.0
        if self._stats and self._before:
            stats = self._stats()
            spent |= data_fields(stats.since(self._before))
            self._before = stats
        return spent


@contextmanager
def open_loaders(config: TrainConfig) -> Iterator[tuple[Batches, Iterable[Batch]]]:
    """The training loader and the one for evaluation: split "val" where the dataset has it, else "train"."""
    from streamvid.loader.loader import VideoLoader
    from streamvid.loader.stores import Stores

    dataset = Stores.of(config.storage, config.cache_dir, config.cache_bytes).open(config.dataset)
    split = "val" if "val" in dataset.shards.splits else "train"
    sizes: dict[str, Any] = {"batch_size": config.batch_size, "max_tokens_per_batch": config.max_tokens_per_batch}
    sizes["storage"] = config.storage
    with ExitStack() as stack:
        loader = stack.enter_context(
            VideoLoader(dataset, **sizes, num_epochs=None, seed=config.seed, num_workers=config.num_workers)
        )
        # Padded, so that a held-out split of a few samples still fills a step on every rank; read once, so no prefetch.
        held_out = stack.enter_context(
            VideoLoader(dataset, **sizes, split=split, tail="pad", seed=config.seed, num_workers=0, prefetch_bytes=0)
        )
        _log.info("evaluation: the first %d batches a rank of split %r", config.eval.num_batches, split)
        yield loader, held_out


@dataclass(frozen=True)
class FixedBatch:
    """One held-out batch with the noise and times it is always judged with; all on the CPU."""

    batch: Batch
    noise: Tensor
    times: Tensor


def collect_fixed_batches(batches: Iterable[Batch], num_batches: int, seed: int, rank: int) -> list[FixedBatch]:
    """The first `num_batches`, kept, each with noise and times drawn once from (seed, rank, its number)."""
    fixed: list[FixedBatch] = []
    if num_batches == 0:
        return fixed
    for number, batch in enumerate(itertools.islice(batches, num_batches)):
        # Training draws from steps 1 and up, so step 0 is evaluation's own.
        generator = seeded_generator(torch.device("cpu"), seed, 0, rank, number)
        fixed.append(FixedBatch(batch.clone(), *draw_noise_and_times(batch.video, generator)))
    return fixed


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: Velocity, fixed: Sequence[FixedBatch]) -> float:
    """The mean loss a sample over all ranks' fixed batches, repeats left out."""
    total = torch.zeros(2, device=accelerator.device)
    for item in fixed:
        batch = item.batch.to(accelerator.device)
        noise, times = item.noise.to(accelerator.device), item.times.to(accelerator.device)
        losses = rectified_flow_loss(model, batch.normalized(torch.float32), batch.text, noise, times)
        counts = (~batch.is_repeat).float()
        total += torch.stack([(losses * counts).sum(), counts.sum()])
    loss_sum, count = accelerator.reduce(total, reduction="sum").tolist()
    return float(loss_sum / count) if count else float("nan")
