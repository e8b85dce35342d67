"""How an object store is reached, as flags that all verbs share. Keys are no flags: a process list would show them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias

import click

if TYPE_CHECKING:
    from streamvid.storage import StorageOptions

_Command: TypeAlias = Callable[..., Any]

_FLAGS: dict[str, dict[str, Any]] = {
    "endpoint_url": {"metavar": "URL", "help": "Server of {which} that is not AWS, as http://127.0.0.1:9000."},
    "region": {"metavar": "R", "help": "Region of {which}.  [default: AWS_REGION or ~/.aws/config]"},
    "profile": {"metavar": "P", "help": "Profile in ~/.aws of {which}.  [default: AWS_PROFILE]"},
    "anon": {"is_flag": True, "default": None, "help": "Read {which} without keys."},
    "requester_pays": {"is_flag": True, "default": None, "help": "Pay for reading {which}."},
}


def storage_flags(command: _Command) -> _Command:
    """--endpoint-url, --region, --profile, --anon, --requester-pays; the command gets `storage`: StorageOptions."""

    @wraps(command)
    def wrapped(*args: Any, **given: Any) -> Any:
        return command(*args, storage=_options(_taken(given, "")), **given)

    return _flagged(wrapped, {"": "the bucket"})


def storage_pair_flags(command: _Command) -> _Command:
    """The same flags for both of two stores, and with --source- and --dest- before them for one.

    The command gets `source_storage` and `dest_storage`: StorageOptions. A profile and no keys exclude each other, so
    that one store's own flag of these puts both common ones aside.
    """

    @wraps(command)
    def wrapped(*args: Any, **given: Any) -> Any:
        both = _taken(given, "")
        sides = {side: _joined(both, _taken(given, f"{side}_")) for side in ("source", "dest")}
        options = {f"{side}_storage": _options(values) for side, values in sides.items()}
        return command(*args, **options, **given)

    which = {"": "both buckets", "source_": "SOURCE alone", "dest_": "DEST alone"}
    return _flagged(wrapped, which)


def _flagged(command: Callable[..., Any], which: dict[str, str]) -> Callable[..., Any]:
    for prefix, bucket in reversed(which.items()):
        for name, settings in reversed(_FLAGS.items()):
            if prefix == "dest_" and name in ("anon", "requester_pays"):
                continue  # of reading alone
            flag = "--" + (prefix + name).replace("_", "-")
            text = settings["help"].format(which=bucket)
            if prefix:  # what it falls back on is the flag for both
                text = text.partition("  [default")[0]
            command = click.option(flag, prefix + name, **{**settings, "help": text})(command)
    return command


def _taken(given: dict[str, Any], prefix: str) -> dict[str, Any]:
    values = {name: given.pop(prefix + name, None) for name in _FLAGS}
    return {name: value for name, value in values.items() if value is not None}


def _joined(both: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    keys = {"anon", "profile"}
    common = {name: value for name, value in both.items() if name not in keys or not keys & own.keys()}
    return common | own


def _options(values: dict[str, Any]) -> StorageOptions:
    from streamvid.storage import StorageOptions

    return StorageOptions(**values)
