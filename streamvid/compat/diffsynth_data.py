"""DiffSynth-Studio's --dataset_base_path, and the options of TrainConfig that follow from it.

with --dataset_metadata_path   media and their metadata: sharded into the cache (dataset_cache), then streamed
manifest of a dataset          streamed unchanged
manifest of features           output of sft:data_process; its train.json names the encoded dataset
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeAlias

from streamvid.config import require_integer
from streamvid.errors import ConfigError
from streamvid.storage import StorageOptions, Store, open_store
from streamvid.trainer.config import DatasetValue, TrainConfig

if TYPE_CHECKING:
    from streamvid.sharder.options import ShardOptions

_log = logging.getLogger(__name__)

Shard: TypeAlias = "Callable[[str, ShardOptions], str]"
"""(source, options) → path of the dataset."""

NOTE = "train.json"
"""File, stored next to features, that names their dataset. The features themselves contain no paths."""

DEFAULT_FILE_KEYS = "image,video"
DEFAULT_MAX_PIXELS = 1024 * 1024
DEFAULT_NUM_FRAMES = 81
FRAME_RULE = "4k+1"
_MAX_NOTE_BYTES = 2**20
_SIZES = {"height": "height", "width": "width", "max_pixels": "max_pixels", "num_frames": "max_frames"}
"""Flag → field of SizeRule."""


@dataclass(frozen=True)
class DataFlags:
    """Flags that describe the data, under their original names. A flag that is not given is None.

    named: options of TrainConfig that are in the file or in --set.
    in_sets: options of TrainConfig that are in --set, which overrides flags.
    """

    dataset_base_path: str
    dataset_metadata_path: str | None = None
    dataset_repeat: int | None = None
    data_file_keys: str | None = None
    height: int | None = None
    width: int | None = None
    max_pixels: int | None = None
    num_frames: int | None = None
    named: frozenset[str] = frozenset()
    in_sets: frozenset[str] = frozenset()

    @staticmethod
    def of(given: Mapping[str, object], *, named: frozenset[str], in_sets: frozenset[str]) -> DataFlags:
        """Select the data flags from all flags. Raises ConfigError for invalid values."""
        values = {field.name: given[field.name] for field in fields(DataFlags) if given.get(field.name) is not None}
        return DataFlags(**values, named=named, in_sets=in_sets)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        if self.dataset_repeat is not None:
            require_integer("--dataset_repeat", self.dataset_repeat, 1)
        if (self.height is None) != (self.width is None):
            alone, missing = ("height", "width") if self.width is None else ("width", "height")
            raise ConfigError(
                f"--{alone} is {getattr(self, alone)}, but --{missing} is not given; give both for a fixed size, "
                "or neither to derive the size from each clip"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes set by the flags, keyed by the names of SizeRule fields."""
        given = {field: getattr(self, name) for name, field in _SIZES.items()}
        if self.height is not None:
            del given["max_pixels"]  # it limits only derived sizes, but DiffSynth-Studio's scripts always set it
        return {name: value for name, value in given.items() if value is not None}

    def media(self, columns: Sequence[str] | None) -> list[str]:
        """Return the clip column, followed by the columns of conditioning inputs.

        The flags do not identify the clip column. It is `video` if there is such a column, otherwise `image`, otherwise
        the first column.

        columns: metadata columns, or None if unknown.
        """
        asked = [word.strip() for word in (self.data_file_keys or DEFAULT_FILE_KEYS).split(",") if word.strip()]
        present = [name for name in dict.fromkeys(asked) if columns is None or name in columns]
        if not asked:
            raise ConfigError("--data_file_keys contains no column name; pass a list such as image,video")
        if not present:
            raise ConfigError(
                f"--data_file_keys is {','.join(asked)!r}, but the metadata has none of these columns; available: "
                f"{', '.join(columns or ()) or 'none'}. Set --data_file_keys to columns that contain file paths"
            )
        clip = next((name for name in ("video", "image") if name in present), present[0])
        return [clip, *(name for name in present if name != clip)]


def shard_options(flags: DataFlags, columns: Sequence[str], storage: StorageOptions) -> ShardOptions:
    """Return options for sharding whole files, with the sizes and frame counts that DiffSynth-Studio would choose."""
    from streamvid.buckets.config import BucketConfig, SizeRule
    from streamvid.buckets.frames import FrameRule
    from streamvid.sharder.media_columns import file_keys
    from streamvid.sharder.options import ShardOptions
    from streamvid.sharder.source_options import CaptionOptions, SourceOptions

    video_column, media = file_keys(",".join(flags.media(columns)))
    sizes = flags.sizes
    if not {"height", "width"} & sizes.keys():
        sizes.setdefault("max_pixels", DEFAULT_MAX_PIXELS)
    sizes.setdefault("max_frames", DEFAULT_NUM_FRAMES)
    try:
        source = SourceOptions(
            metadata=flags.dataset_metadata_path,
            video_column=video_column,
            media=media,
            captions=CaptionOptions("prompt" if "prompt" in columns else None),
            whole_files=True,  # DiffSynth-Studio ignores other columns
        )
        buckets = BucketConfig(size=SizeRule(**sizes), frame_rule=FrameRule.of(FRAME_RULE))
        return ShardOptions(source=source, buckets=buckets, storage=storage)
    except ConfigError as error:
        raise ConfigError(str(error).replace("max_frames", "num_frames")) from error


def data_options(flags: DataFlags, config: TrainConfig, shard: Shard) -> dict[str, object]:
    """Return the TrainConfig options that select the data, as a mapping from dotted names to values.

    Data that is not sharded yet is sharded first.

    config: configuration of the run without these options.

    Raises ConfigError if the folder is of an unsupported kind, and the same errors as `shard`.
    """
    from streamvid.dataset.tabular.table import read_table
    from streamvid.modules.factory import import_object
    from streamvid.modules.weight_files import resolve

    base = flags.dataset_base_path
    kind = kind_of(base, config.data.storage)
    if "data.dataset" in flags.in_sets and (kind != "features" or flags.dataset_metadata_path is not None):
        raise ConfigError(f"data.dataset cannot be combined with --dataset_base_path {base!r}; omit one of them")
    dataset: DatasetValue
    columns = None
    if flags.dataset_metadata_path is not None:
        if kind is not None:
            made = "a sealed dataset" if kind == "dataset" else "the output of sft:data_process"
            raise ConfigError(
                f"--dataset_metadata_path cannot be combined with --dataset_base_path {base!r}, which is {made}; "
                "omit --dataset_metadata_path"
            )
        columns = read_table(flags.dataset_metadata_path, config.data.storage).names
        # Sharding may take hours, so missing weight files and factories are reported before it.
        resolve(config.model.weights)
        import_object(config.model.factory)
        dataset = shard(base, shard_options(flags, columns, config.data.storage))
    elif kind == "features":
        dataset = _dataset_of_features(flags, config)
    elif kind == "dataset":
        _check_sizes(flags, base, config.data.storage)
        dataset = base
    else:
        raise ConfigError(
            f"--dataset_base_path {base!r} contains neither a sealed dataset nor output of sft:data_process; to shard "
            "the media in this folder, set --dataset_metadata_path to the metadata file. (Features that "
            "DiffSynth-Studio wrote as .pth files cannot be read; run the first stage again with streamvid.)"
        )
    found = {"data.dataset": _repeated(dataset, flags, config), **_input_options(flags, config, columns)}
    if kind == "features" and "data.features.url" not in flags.in_sets:
        found["data.features.url"] = base
    if "data.loader.view.temporal" not in flags.named:
        found["data.loader.view.temporal"] = "head"  # the first frames of a clip, as in DiffSynth-Studio
    return found


def _repeated(dataset: DatasetValue, flags: DataFlags, config: TrainConfig) -> DatasetValue:
    if flags.dataset_repeat in (None, 1):
        return dataset
    if config.task == "sft:data_process":
        _log.warning(
            "--dataset_repeat %d has no effect on sft:data_process; to encode several crops of each clip, set "
            "data.features.num_visits",
            flags.dataset_repeat,
        )
        return dataset
    if not isinstance(dataset, str | dict):
        raise ConfigError(
            f"--dataset_repeat {flags.dataset_repeat} cannot be combined with several datasets; set num_repeats for "
            "each dataset in data.dataset instead"
        )
    return {**(dataset if isinstance(dataset, dict) else {"url": dataset}), "num_repeats": flags.dataset_repeat}


def _input_options(flags: DataFlags, config: TrainConfig, columns: Sequence[str] | None) -> dict[str, object]:
    """Return the options for conditioning inputs. columns: metadata columns, if known."""
    from streamvid.sharder.media_columns import file_keys

    media: dict[str, str] = {}
    if columns is not None or flags.data_file_keys is not None:
        _, inputs = file_keys(",".join(flags.media(columns)))
        media = {column: name.removesuffix("?") for name, column in inputs.items()}
    asked = [media.get(name, name) for name in config.data.extra_inputs]
    if config.task == "sft:train":  # features replace the conditioning inputs that they were computed from
        return {"data.extra_inputs": [name for name in asked if name not in media.values()]}
    found: dict[str, object] = {"data.extra_inputs": asked}
    if media and "data.loader.media" not in (flags.named if flags.data_file_keys is None else flags.in_sets):
        found["data.loader.media"] = list(media.values())
    return found


def kind_of(url: str, storage: StorageOptions) -> str | None:
    """Return "dataset" or "features", depending on the manifest at a URL, or None if there is no such manifest."""
    from streamvid.dataset import manifest, sealed_json
    from streamvid.dataset.features import sidecar

    store = open_store(url, storage)
    num_bytes = store.size(sealed_json.MANIFEST)
    if num_bytes is None or num_bytes > sealed_json.MAX_MANIFEST_BYTES:
        return None
    try:
        value = json.loads(store.read(sealed_json.MANIFEST))
    except (ValueError, RecursionError):
        return None
    kinds = {manifest.FORMAT: "dataset", sidecar.FORMAT: "features"}
    return kinds.get(str(value.get("format"))) if isinstance(value, dict) else None


def _check_sizes(flags: DataFlags, url: str, storage: StorageOptions) -> None:
    """Raise ConfigError if the flags request sizes that differ from those of an existing dataset."""
    from streamvid.dataset.versions.open import open_dataset

    sizes = flags.sizes
    if not sizes:
        return
    made = open_dataset(url, storage=storage).manifest.build.get("options", {}).get("bucket_config", {})
    for name, value in sizes.items():
        if made.get(name) != value:
            flag = "num_frames" if name == "max_frames" else name
            made_with = f"{flag}={made[name]}" if name in made else "other buckets (see streamvid stats)"
            raise ConfigError(
                f"--{flag} is {value}, but the dataset {url} was sharded with {made_with}; omit the flag, or shard the "
                "media again"
            )


def _dataset_of_features(flags: DataFlags, config: TrainConfig) -> DatasetValue:
    url, storage = flags.dataset_base_path, config.data.storage
    if config.task in ("sft", "sft:data_process"):
        raise ConfigError(
            f"--dataset_base_path {url!r} is the output of sft:data_process, but task is {config.task!r}; set task to "
            "sft:train"
        )
    store = open_store(url, storage)
    if "data.dataset" in flags.in_sets or ("data.dataset" in flags.named and store.size(NOTE) is None):
        return config.data.dataset
    dataset = _noted_dataset(store, url)
    where = dataset.get("url") if isinstance(dataset, dict) else dataset
    if isinstance(where, str):
        if kind_of(where, storage) != "dataset":
            raise ConfigError(
                f"the features in {url} were computed from {where}, which is not (or is no longer) a sealed dataset; "
                "pass the new location of the dataset with --set data.dataset=URL, or run the first stage again "
                "(finished work is kept)"
            )
        _check_sizes(flags, where, storage)
    return dataset


def _noted_dataset(store: Store, url: str) -> DatasetValue:
    remedy = "specify the dataset with --set data.dataset=URL"
    if not 0 < (store.size(NOTE) or 0) <= _MAX_NOTE_BYTES:
        raise ConfigError(
            f"{url}/{NOTE}, which names the dataset that the features were computed from, is missing, empty or too "
            f"large; {remedy}"
        )
    try:
        dataset: DatasetValue = json.loads(store.read(NOTE))["dataset"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{url}/{NOTE} does not name the dataset that the features were computed from ({error}); {remedy}"
        ) from error
    return dataset


def note_dataset(config: TrainConfig) -> None:
    """Record the dataset's location next to new features, so that --dataset_base_path can find the dataset."""
    if config.data.features.url is not None:
        data = json.dumps({"dataset": _absolute(config.data.dataset)}, indent=1).encode() + b"\n"
        open_store(config.data.features.url, config.data.storage).put(NOTE, data)


def _absolute(dataset: object) -> object:
    if isinstance(dataset, Mapping):
        return {**dataset, "url": _absolute(dataset.get("url"))}
    if isinstance(dataset, str):
        return dataset if "://" in dataset else os.path.abspath(dataset)  # noqa: PTH100 — links stay as they were given
    return [_absolute(one) for one in dataset] if isinstance(dataset, list | tuple) else dataset
