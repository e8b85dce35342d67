"""A loader's datasets and arguments out of plain values, as a YAML file has them."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from streamvid.dataset.reader import Dataset
from streamvid.errors import ConfigError
from streamvid.loader.loader import VideoLoader
from streamvid.loader.mix import DatasetConfig, as_configs
from streamvid.loader.stores import Stores


def open_datasets(given: Any, stores: Stores) -> tuple[list[DatasetConfig], list[Dataset]]:
    """A URL, a mapping of DatasetConfig's fields, or several of either, opened. Raises ConfigError, DatasetError."""
    configs = []
    for number, one in enumerate(given if isinstance(given, list | tuple) else [given]):
        try:
            config = DatasetConfig(**one) if isinstance(one, Mapping) else as_configs(one)[0]
        except TypeError as error:
            names = ", ".join(inspect.signature(DatasetConfig).parameters)
            raise ConfigError(f"dataset: number {number} is {one}: {error}; allowed are {names}") from None
        configs.append(config)
    datasets = [stores.open(str(config.url)) for config in configs]
    return [replace(config, url=dataset) for config, dataset in zip(configs, datasets, strict=True)], datasets


def check_arguments(given: Mapping[str, Any], own: Collection[str], where: str) -> None:
    """ConfigError for names that VideoLoader has not, and for those that `own` says are given elsewhere."""
    known = set(inspect.signature(VideoLoader).parameters) - set(own)
    for name in given:
        if name not in known:
            raise ConfigError(f"{where}.{name} is no field; allowed: {', '.join(sorted(known))}")


def with_inputs(options: Mapping[str, Any], names: Sequence[str], datasets: Sequence[Dataset]) -> dict[str, Any]:
    """Arguments of VideoLoader with these columns and media asked for too; ConfigError for what a dataset has not."""
    asked = dict(options)
    for name in names:
        for dataset in datasets:
            media = dataset.manifest.media
            if name not in media and name not in dataset.user_columns:
                raise ConfigError(
                    f"extra_inputs names {name!r}, which {dataset.url} has not; its columns: "
                    f"{', '.join(dataset.user_columns) or 'none'}; its media: {', '.join(media) or 'none'}"
                )
            kind = "media" if name in media else "columns"
        asked[kind] = list(dict.fromkeys([*asked.get(kind, ()), name]))
    return asked
