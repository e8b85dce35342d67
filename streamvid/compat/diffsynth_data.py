"""What --dataset_base_path is, and what of a TrainConfig follows: a dataset, one to be sharded, or a sidecar.

with --dataset_metadata_path   media and their metadata: sharded into the cache (train_cache), then streamed
a manifest of a dataset        streamed as it is
a manifest of a sidecar        what sft:data_process wrote; its train.json says which dataset it was made of
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamvid.errors import ConfigError

if TYPE_CHECKING:
    from streamvid.sharder.options import ShardOptions
    from streamvid.storage import StorageOptions
    from streamvid.trainer.config import TrainConfig

_log = logging.getLogger(__name__)

NOTE = "train.json"
"""Beside a sidecar: where the dataset lies that it was made of. No part of the sidecar itself, which has no paths."""

DEFAULT_FILE_KEYS = "image,video"
DEFAULT_MAX_PIXELS = 1024 * 1024
DEFAULT_NUM_FRAMES = 81
FRAME_RULE = "4k+1"
_MAX_NOTE_BYTES = 2**20
_SIZES = {"height": "height", "width": "width", "max_pixels": "max_pixels", "num_frames": "max_frames"}


@dataclass(frozen=True)
class DataFlags:
    """The flags about the data, None where one was not given.

    named: fields of TrainConfig that the file or --set names; in_sets: those of --set, which goes before flags.
    """

    base_path: str
    metadata_path: str | None = None
    repeat: int | None = None
    file_keys: str | None = None
    height: int | None = None
    width: int | None = None
    max_pixels: int | None = None
    num_frames: int | None = None
    named: frozenset[str] = frozenset()
    in_sets: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.repeat is not None and self.repeat < 1:
            raise ConfigError(f"dataset_repeat is {self.repeat}; allowed: 1 and up")
        if (self.height is None) != (self.width is None):
            alone, missing = ("height", "width") if self.width is None else ("width", "height")
            raise ConfigError(
                f"{alone} is {getattr(self, alone)}, and {missing} not given; allowed: both, for one size, "
                "or neither, for sizes that follow each clip"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Those about sizes that were given, by ShardOptions' names."""
        given = {field: getattr(self, name) for name, field in _SIZES.items()}
        if self.height is not None:
            del given["max_pixels"]  # it is for sizes that follow the clips; their scripts give it all the same
        return {name: value for name, value in given.items() if value is not None}

    def media(self, columns: Sequence[str] | None) -> tuple[str, tuple[str, ...]]:
        """(the clip's column, further files'), of those that there are; columns None: nobody knows.

        Which of the keys is the clip they do not say: that is `video`, or else `image`, or else the first.
        """
        asked = [word.strip() for word in (self.file_keys or DEFAULT_FILE_KEYS).split(",") if word.strip()]
        there = [name for name in dict.fromkeys(asked) if columns is None or name in columns]
        if not there:
            raise ConfigError(
                f"data_file_keys is {','.join(asked)!r}, of which the metadata has no column; it has "
                f"{', '.join(columns or ()) or 'none'}: name those that hold files, as --data_file_keys path"
            )
        clip = next((name for name in ("video", "image") if name in there), there[0])
        return clip, tuple(name for name in there if name != clip)


def shard_options(flags: DataFlags, columns: Sequence[str], storage: StorageOptions) -> ShardOptions:
    """How their flags shard: files as they are, sizes and frame counts as DiffSynth-Studio chooses them."""
    from streamvid.buckets.config import BucketConfig, SizeRule
    from streamvid.buckets.frames import FrameRule
    from streamvid.sharder.media_columns import file_keys
    from streamvid.sharder.options import CaptionOptions, ShardOptions, SourceOptions

    clip, others = flags.media(columns)
    video_column, media = file_keys(",".join((clip, *others)))
    sizes: dict[str, Any] = flags.sizes
    if not {"height", "width"} & sizes.keys():
        sizes.setdefault("max_pixels", DEFAULT_MAX_PIXELS)
    sizes.setdefault("max_frames", DEFAULT_NUM_FRAMES)
    try:
        source = SourceOptions(
            metadata=flags.metadata_path,
            video_column=video_column,
            media=media,
            captions=CaptionOptions("prompt" if "prompt" in columns else None),
        )
        buckets = BucketConfig(size=SizeRule(**sizes), frame_rule=FrameRule.parse(FRAME_RULE))
        return ShardOptions(source=source, buckets=buckets, storage=storage)
    except ConfigError as error:
        raise ConfigError(str(error).replace("max_frames", "num_frames")) from error


def data_fields(flags: DataFlags, config: TrainConfig, shard: Callable[[str, ShardOptions], str]) -> dict[str, Any]:
    """Fields of TrainConfig, dotted, that say which data there are. Shards where that is asked for.

    config: the run without them.   shard: (source, options) → path of the dataset.
    Raises ConfigError for a folder that is none of the three, and what sharding raises.
    """
    from streamvid.sharder.source.metadata import read_metadata

    base, storage = flags.base_path, config.storage
    kind = _kind(base, storage)
    if "dataset" in flags.in_sets and (kind != "sidecar" or flags.metadata_path is not None):
        raise ConfigError(f"dataset stands beside dataset_base_path={base!r}, which says the same; leave one out")
    if flags.metadata_path is not None:
        if kind is not None:
            raise ConfigError(f"dataset_metadata_path stands beside {base}, which is a {kind} already; leave it out")
        columns = read_metadata(flags.metadata_path, storage).names
        dataset: Any = shard(base, shard_options(flags, columns, storage))
        found = _extra_fields(flags, config, columns)
    elif kind == "sidecar":
        dataset = _dataset_of_sidecar(flags, config)
        found = {**({} if "sidecar" in flags.in_sets else {"sidecar": base}), **_extra_fields(flags, config, None)}
    elif kind == "dataset":
        _check_sizes(flags, base, storage)
        dataset, found = base, _extra_fields(flags, config, None)
    else:
        raise ConfigError(
            f"dataset_base_path is {base!r}, where there is neither a sealed dataset nor what sft:data_process writes; "
            "name its metadata with dataset_metadata_path, and it is sharded. (A folder of .pth files is DiffSynth's "
            "own: run the first stage again.)"
        )
    # Of a clip its first frames, as theirs.
    head = {} if "loader.temporal" in flags.named else {"loader.temporal": "head"}
    return {"dataset": _repeated(dataset, flags, config), **head, **found}


def _repeated(dataset: Any, flags: DataFlags, config: TrainConfig) -> Any:
    if flags.repeat in (None, 1):
        return dataset
    if config.task == "sft:data_process":
        _log.warning(
            "dataset_repeat=%d is for what trains: each clip is encoded once (num_visits=N for several crops)",
            flags.repeat,
        )
        return dataset
    if not isinstance(dataset, str | dict):
        raise ConfigError(f"dataset_repeat={flags.repeat} beside several datasets; give each its num_repeats")
    return {**(dataset if isinstance(dataset, dict) else {"url": dataset}), "num_repeats": flags.repeat}


def _extra_fields(flags: DataFlags, config: TrainConfig, columns: Sequence[str] | None) -> dict[str, Any]:
    """Media that batches are to have besides. columns: of the metadata, where they are known."""
    from streamvid.sharder.media_columns import file_keys

    media: dict[str, str] = {}
    if columns is not None or flags.file_keys is not None:
        clip, others = flags.media(columns)
        media = {column: name.removesuffix("?") for name, column in file_keys(",".join((clip, *others)))[1].items()}
    asked = [media.get(name, name) for name in config.model.extra_inputs]
    if config.task == "sft:train":  # what was made of the media is there in their place
        return {"model.extra_inputs": [name for name in asked if name not in media.values()]}
    found: dict[str, Any] = {"model.extra_inputs": asked}
    if media and "loader.media" not in (flags.named if flags.file_keys is None else flags.in_sets):
        found["loader.media"] = list(media.values())
    return found


def _kind(url: str, storage: StorageOptions) -> str | None:
    """What its manifest.json says it is: "dataset", "sidecar", or None."""
    from streamvid.dataset import manifest
    from streamvid.dataset.features import sidecar
    from streamvid.storage import open_store

    store = open_store(url, storage)
    num_bytes = store.size(manifest.MANIFEST)
    if num_bytes is None or num_bytes > manifest.MAX_MANIFEST_BYTES:
        return None
    try:
        value = json.loads(store.read(manifest.MANIFEST))
    except (ValueError, RecursionError):
        return None
    kinds = {manifest.FORMAT: "dataset", sidecar.FORMAT: "sidecar"}
    return kinds.get(str(value.get("format"))) if isinstance(value, dict) else None


def _check_sizes(flags: DataFlags, url: str, storage: StorageOptions) -> None:
    """ConfigError where flags ask for other sizes than those that a dataset was made with."""
    from streamvid.dataset.reader import open_dataset

    sizes = flags.sizes
    if not sizes:
        return
    made = open_dataset(url, storage=storage).manifest.build.get("options", {}).get("bucket_config", {})
    for name, value in sizes.items():
        if made.get(name) != value:
            flag = "num_frames" if name == "max_frames" else name
            there = f"{flag}={made[name]}" if name in made else "other buckets; streamvid stats shows them"
            raise ConfigError(f"{flag} is {value}, and the dataset {url} was made with {there}; leave the flag out")


def _dataset_of_sidecar(flags: DataFlags, config: TrainConfig) -> Any:
    from streamvid.storage import open_store

    url = flags.base_path
    if config.task in ("sft", "sft:data_process"):
        raise ConfigError(f"dataset_base_path is {url!r}, which sft:data_process wrote; task sft:train reads such")
    store = open_store(url, config.storage)
    if "dataset" in flags.in_sets or ("dataset" in flags.named and store.size(NOTE) is None):
        return json.loads(json.dumps(config.dataset))
    remedy = "say where that is, as --set dataset=URL"
    try:
        if not 0 < (store.size(NOTE) or 0) <= _MAX_NOTE_BYTES:
            raise ConfigError(f"{url} has no {NOTE} that says which dataset it was made of; {remedy}")
        dataset = json.loads(store.read(NOTE))["dataset"]
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{url}/{NOTE} says not which dataset it was made of ({error}); {remedy}") from error
    where = dataset.get("url") if isinstance(dataset, dict) else dataset
    if isinstance(where, str):
        if _kind(where, config.storage) != "dataset":
            raise ConfigError(
                f"{url} was made of the dataset {where}, which is no more there; run the first stage's command again, "
                f"which finds what is done, or {remedy}"
            )
        _check_sizes(flags, where, config.storage)
    return dataset


def note_dataset(config: TrainConfig) -> None:
    """Say beside a sidecar that was just written which dataset it was made of, for `dataset_base_path`."""
    from streamvid.storage import open_store

    if config.sidecar is not None:
        data = json.dumps({"dataset": _absolute(config.dataset)}, indent=1).encode() + b"\n"
        open_store(config.sidecar, config.storage).put(NOTE, data)


def _absolute(dataset: Any) -> Any:
    if isinstance(dataset, Mapping):
        return {**dataset, "url": _absolute(dataset.get("url"))}
    if isinstance(dataset, str):
        return dataset if "://" in dataset else os.path.abspath(dataset)  # noqa: PTH100 — links stay as they were given
    return [_absolute(one) for one in dataset]
