"""Data of a run: the training loader, an evaluation loader, and the time spent waiting for batches."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import nn

from streamvid.config import options_of
from streamvid.dataset.features.sidecar import REMEDY, Sidecar, differences
from streamvid.dataset.reader import Dataset
from streamvid.errors import ConfigError
from streamvid.forecast.costs import read_costs
from streamvid.loader.loader import VideoLoader
from streamvid.loader.mix import DatasetConfig, open_configs
from streamvid.loader.options import LimitOptions, OutputOptions, ScheduleOptions
from streamvid.loader.stores import Stores
from streamvid.modules.build import ENCODE_ONLY, build_module
from streamvid.modules.encoding import check_fresh
from streamvid.storage import open_store
from streamvid.trainer.config import TrainConfig

if TYPE_CHECKING:
    from streamvid.loader.batch.batch import Batch
    from streamvid.loader.stats import LoaderStats

_log = logging.getLogger(__name__)

_SET_ELSEWHERE = {
    *("dataset", "world", "num_epochs", "accumulate", "split", "seed", "batch_size", "max_tokens_per_batch", "storage"),
    *("num_workers", "device", "groups", "features"),
}
"""Arguments of VideoLoader that `data.loader` cannot set, because other fields or the trainer set them."""


class Batches(Protocol):
    """Interface of a training loader, such as `streamvid.VideoLoader`. All ranks have the same number of steps."""

    @property
    def epoch(self) -> int: ...
    @property
    def num_steps_left(self) -> int: ...
    def __iter__(self) -> Iterator[Batch]: ...
    def num_steps(self, num_epochs: int) -> int: ...
    def state_dict(self) -> Mapping[str, object]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class BatchClock:
    """Endless source of a loader's batches, one epoch after another. It measures the time spent waiting for data.

    It also collects the loader's statistics, if the loader has a `stats` method.
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
        """Return the seconds since the last call, the seconds spent waiting for data, and the loader's statistics."""
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


def loader_options(config: TrainConfig, sources: Sequence[DatasetConfig]) -> dict[str, Any]:
    """Return the arguments of VideoLoader that training, evaluation and encoding share.

    sources: open datasets.
    Raises ConfigError for arguments in `data.loader` that cannot be set there, and for names in `data.extra_inputs`
    that are neither a column nor a conditioning input of every dataset.
    """
    data = config.data
    known = sorted(set(inspect.signature(VideoLoader).parameters) - _SET_ELSEWHERE)
    for name in data.loader:
        if name not in known:
            raise ConfigError(f"data.loader contains {name!r}; allowed: {', '.join(known)}")
    options: dict[str, Any] = {
        "batch_size": data.batch_size,
        "max_tokens_per_batch": data.max_tokens_per_batch,
        "storage": data.storage,
        "seed": config.seed,
        "num_workers": data.num_workers,
        **data.loader,
        **({"schedule": schedule_of(config)} if "schedule" in data.loader else {}),
        "output": _output_of(config),
    }
    for name in data.extra_inputs:
        kind = _kind_of_input(name.removesuffix("?"), sources, is_optional=name.endswith("?"))
        if kind is not None:
            options[kind] = list(dict.fromkeys([*options.get(kind, ()), name.removesuffix("?")]))
    return options


def _kind_of_input(
    name: str, sources: Sequence[DatasetConfig], is_optional: bool
) -> Literal["media", "columns"] | None:
    """Return "media" if a name in `data.extra_inputs` is a conditioning input, or "columns" if it is a column.

    Return None for an optional name that a dataset lacks. Raises ConfigError for a required name that a dataset lacks.
    """
    kind: Literal["media", "columns"] | None = None
    for dataset in map(_opened, sources):
        media = dataset.manifest.media
        if name not in media and name not in dataset.user_columns:
            if is_optional:
                return None
            raise ConfigError(
                f"data.extra_inputs contains {name!r}, which is neither a column nor a conditioning input of "
                f"{dataset.url}; columns: {', '.join(dataset.user_columns) or 'none'}; conditioning inputs: "
                f"{', '.join(media) or 'none'}"
            )
        kind = "media" if name in media else "columns"
    return kind


def schedule_of(config: TrainConfig) -> ScheduleOptions:
    """Return `data.loader.schedule`. If `costs` is a path, read the cost table from that file."""
    given = config.data.loader.get("schedule")
    if isinstance(given, Mapping) and isinstance(given.get("costs"), str | Path):
        given = {**given, "costs": read_costs(given["costs"], "data.loader.schedule.costs")}
    return options_of(ScheduleOptions, given, "data.loader.schedule")


def _output_of(config: TrainConfig) -> OutputOptions:
    output = options_of(OutputOptions, config.data.loader.get("output"), "data.loader.output")
    if output.audio is not None:
        raise ConfigError("data.loader.output.audio cannot be set; set data.audio to the same options instead")
    return replace(output, audio=config.data.audio)


def audio_facts(config: TrainConfig) -> Mapping[str, Any] | None:
    """Return, as JSON values, the options that determine which audio `encode` receives, or None if it gets no audio."""
    audio = config.data.audio
    if audio is None:
        return None
    form, fps = audio.form, audio.fps
    return {
        "sample_rate": form.sample_rate,
        "num_channels": form.num_channels,
        "rule": str(form.rule),
        "fps": None if fps is None else str(fps),
    }


def without_ledger(options: Mapping[str, Any]) -> OutputOptions:
    """Return the output options without a ledger, for loaders whose batches do not train the model.

    options: arguments of VideoLoader.
    """
    return replace(options_of(OutputOptions, options.get("output"), "data.loader.output"), ledger=None)


def _opened(source: DatasetConfig) -> Dataset:
    assert isinstance(source.url, Dataset)
    return source.url


def check_features(config: TrainConfig, module: nn.Module, is_main: bool = True) -> None:
    """Raise ConfigError if the run trains on features that were not made with the run's own encoders.

    is_main: True for the rank that builds the encoders if their weights must be compared.
    """
    if config.task != "sft:train":
        return
    build = functools.partial(build_module, config.model, task=ENCODE_ONLY, seed=config.seed)
    features = _features(config, Stores.of(config.data.storage))
    check_fresh(features, config.model, module, build if is_main else None)


def _features(config: TrainConfig, stores: Stores) -> Sidecar:
    return Sidecar(open_store(str(config.data.features.url), stores.options), stores.cache)


@contextmanager
def open_loaders(config: TrainConfig) -> Iterator[tuple[Batches, Iterable[Batch]]]:
    """Open the training loader and the evaluation loader, which is empty if the run does not evaluate.

    The model is not needed, so errors in the data are reported before the model is built, which can take minutes.
    """
    stores = Stores.of(config.data.storage)
    sources = open_configs(config.data.dataset, stores)
    options = loader_options(config, sources)
    if config.task == "sft:train":
        # The features contain what `encode` computed from conditioning inputs and audio.
        options.pop("media", None)
        features = _features(config, stores)
        _check_audio(features, config)
        options |= {"features": features, "output": replace(options["output"], audio=None)}
    # By their URLs, so that a run can resume in the version of its state, or follow newer ones.
    datasets = config.data.dataset if "features" not in options else sources
    # Shrunk, so that even a held-out split of a few samples has a step on every rank, with at most one repeat per
    # rank. Batches are read once, so there is no prefetch.
    held_out = options | {
        "split": config.eval.split,
        "num_workers": 0,
        "output": without_ledger(options),
        "limits": replace(options_of(LimitOptions, options.get("limits"), "data.loader.limits"), prefetch_bytes=0),
        "tail": "shrink",
        "schedule": replace(options_of(ScheduleOptions, options.get("schedule"), "data.loader.schedule"), follow=False),
    }
    with_split = _with_split(config, sources)
    with VideoLoader(datasets, **options, num_epochs=None, accumulate=config.data.accumulate) as loader:
        if not with_split:
            yield loader, ()
            return
        with VideoLoader(with_split, **held_out) as evaluation:
            yield loader, evaluation


def _check_audio(features: Sidecar, config: TrainConfig) -> None:
    """Raise ConfigError if the features were made with audio options that differ from the run's options."""
    if problems := differences(features.manifest.made_with.get("audio"), audio_facts(config), "data.audio"):
        raise ConfigError(f"features {features.url} are stale: {'; '.join(problems)}; {REMEDY}")


def _with_split(config: TrainConfig, sources: Sequence[DatasetConfig]) -> list[DatasetConfig]:
    """Return the datasets that have held-out clips, or an empty list if the run does not evaluate."""
    settings = config.eval
    if not settings.num_batches or not (settings.steps or settings.sample_steps):
        return []
    found = [source for source in sources if settings.split in _opened(source).shards.splits]
    if found:
        _log.info(
            "evaluation uses the first %d batches per rank from the %r split", settings.num_batches, settings.split
        )
        return found
    remedy = "shard with --val-fraction, or set eval.split=train to evaluate on clips that are also used for training"
    if settings.sample_steps or settings.split != "val":
        raise ConfigError(
            f"eval.split is {settings.split!r}, which no dataset has; {remedy}, or disable evaluation and samples "
            "with --set eval.steps=null --set eval.sample_steps=null"
        )
    _log.warning("evaluation is disabled, because no dataset has a %r split; %s", settings.split, remedy)
    return []
