"""The batches of a run: the training loader, a few held-out batches to judge the model by, and how long both took."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from streamvid.dataset.features.sidecar import Sidecar
from streamvid.loader.loader import VideoLoader
from streamvid.loader.plain import check_arguments, open_datasets, with_inputs
from streamvid.loader.stores import Stores
from streamvid.modules.encoding import check_fresh
from streamvid.storage import open_store
from streamvid.trainer.config import TrainConfig

if TYPE_CHECKING:
    from streamvid.dataset.reader import Dataset
    from streamvid.loader.batch.batch import Batch
    from streamvid.loader.stats import LoaderStats

_log = logging.getLogger(__name__)
_OWN = (
    *("dataset", "world", "num_epochs", "accumulate", "split", "seed", "batch_size", "max_tokens_per_batch", "storage"),
    *("cache_dir", "cache_bytes", "num_workers", "device", "process_group", "shared_group", "sidecars"),
)


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
        seconds, waited = now - self._since, self._wait_seconds
        spent = {"seconds": round(seconds, 4), "data_wait_seconds": round(waited, 4)}
        spent["data_wait_share"] = round(waited / seconds, 5) if seconds > 0 else 0.0
        self._since, self._wait_seconds = now, 0.0
        if self._stats and self._before:
            stats = self._stats()
            spent |= stats.since(self._before).figures()
            self._before = stats
        return spent


def loader_options(config: TrainConfig, datasets: Sequence[Dataset]) -> dict[str, Any]:
    """What training, evaluation and encoding ask of their loaders alike."""
    check_arguments(config.loader, _OWN, "loader")
    options: dict[str, Any] = {"batch_size": config.batch_size, "max_tokens_per_batch": config.max_tokens_per_batch}
    options |= {"storage": config.storage, "seed": config.seed, "num_workers": config.num_workers, **config.loader}
    return with_inputs(options, config.model.extra_inputs, datasets)


@contextmanager
def open_loaders(config: TrainConfig, module: Any = None) -> Iterator[tuple[Batches, Iterable[Batch]]]:
    """The training loader and the one for evaluation: of split "val" where a dataset has it, else "train"."""
    stores = Stores.of(config.storage, config.cache_dir, config.cache_bytes)
    configs, datasets = open_datasets(config.dataset, stores)
    options = loader_options(config, datasets)
    if config.task == "sft:train":
        sidecar = Sidecar(open_store(str(config.sidecar), stores.options), stores.cache)
        check_fresh(sidecar, config.model, module)
        options.pop("media", None)  # `encode` had them, and what it made of them is there
        options |= {"sidecars": sidecar}
    with_val = [one for one, dataset in zip(configs, datasets, strict=True) if "val" in dataset.shards.splits]
    held_out = options | {"split": "val" if with_val else "train", "num_workers": 0, "prefetch_bytes": 0}
    with ExitStack() as stack:
        loader = VideoLoader(configs, **options, num_epochs=None, accumulate=config.accumulate)
        stack.enter_context(loader)
        # Padded, so that a held-out split of a few samples still fills a step on every rank; read once, so no prefetch.
        evaluation = stack.enter_context(VideoLoader(with_val or configs, **held_out | {"tail": "pad"}))
        _log.info("evaluation: the first %d batches a rank of split %r", config.eval.num_batches, held_out["split"])
        yield loader, evaluation
