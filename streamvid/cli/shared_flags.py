"""Flags for object stores and for buckets, which several verbs share.

There are no flags for object store credentials, because a process list would show the credentials.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import click

from streamvid.buckets.config import BucketConfig
from streamvid.buckets.document import DEFAULT_BUCKETS, load_bucket_config
from streamvid.cli.flags import LOCATION, Flag, Values, add_flags, build, flags_of, option_flags, take
from streamvid.errors import ConfigError
from streamvid.storage import StorageOptions

storage_flags = option_flags(StorageOptions, "storage", group="Storage")
"""Decorator that passes StorageOptions to the command as `storage`."""

_GROUP = "Buckets"
_SIZES = flags_of(BucketConfig, group=_GROUP)
_BASE = [
    Flag(["--preset"], metavar="NAME", help="Bucket preset for a model; `streamvid presets` lists all presets."),
    Flag(
        ["--bucket-config"],
        group=_GROUP,
        type=LOCATION,
        metavar="FILE",
        help="YAML file with buckets, or an Open-Sora config with a bucket_config.",
    ),
]
BUCKET_FLAGS = (*_BASE, *_SIZES)
"""Flags --preset and --bucket-config, and one flag for each option of BucketConfig; `take_buckets` reads their
values."""


def take_buckets(given: Values) -> BucketConfig | None:
    """Remove the bucket flags from `given`. Return the configuration that they define, or None if no flag was given."""
    preset, file = given.pop("preset"), given.pop("bucket_config")
    if preset is not None and file is not None:
        raise click.UsageError(f"--preset {preset} cannot be combined with --bucket-config {file}; omit one of them")
    tree = take(_SIZES, given)
    if preset is not None or file is not None:
        return _changed(load_bucket_config(file if preset is None else preset), tree)
    if not tree:
        return None
    is_sized = "buckets" in tree or tree.get("size", {}).keys() & {"max_pixels", "height", "width"}
    return build(BucketConfig, _SIZES, tree if is_sized else {**DEFAULT_BUCKETS, **tree})


def _changed(config: BucketConfig, tree: Values) -> BucketConfig:
    """Return the configuration from a preset or a file, with its rules overridden by the rules in `tree`."""
    if tree.get("ratios") == {"multiple": config.multiple}:
        del tree["ratios"]
    if "policy" in tree:
        tree["policy"] = replace(config.policy, **tree["policy"])
    for flag in _SIZES:
        if flag.path[0] in tree and flag.path[0] not in ("assign", "frame_rule", "policy"):
            raise ConfigError(
                f"{flag.opts[0]} cannot be combined with --preset or --bucket-config, which set the buckets; omit "
                f"{flag.opts[0]}, or edit a copy of a preset: run `streamvid presets show NAME --yaml > my.yaml`, then "
                "pass --bucket-config my.yaml"
            )
    return replace(config, **tree)


def storage_pair_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add storage flags to a command that copies from one store to another.

    Unprefixed flags apply to both stores. Flags that begin with --source- or --dest- apply to one store.

    The command receives StorageOptions as `source_storage` and `dest_storage`. A profile cannot be combined with
    anonymous access. A prefixed --profile or --anon flag therefore overrides both unprefixed flags for its store.
    """
    both = flags_of(StorageOptions, group="Storage")
    source = flags_of(StorageOptions, group="Storage of SOURCE only", prefix="source-")
    of_reading = ("anon", "requester_pays")
    dest = flags_of(StorageOptions, group="Storage of DEST only", prefix="dest-", exclude=of_reading)

    @wraps(command)
    def wrapped(*args: Any, **given: Any) -> Any:
        common = take(both, given)
        options: dict[str, StorageOptions] = {}
        for name, flags in (("source_storage", source), ("dest_storage", dest)):
            own = take(flags, given)
            used = [flag for flag in flags if flag.path[-1] in own] + both
            options[name] = build(StorageOptions, used, _joined(common, own))
        return command(*args, **options, **given)

    return add_flags([*both, *source, *dest])(wrapped)


def _joined(both: Values, own: Values) -> Values:
    keys = {"anon", "profile"}
    common = {name: value for name, value in both.items() if name not in keys or not keys & own.keys()}
    return common | own
