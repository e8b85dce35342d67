"""Reading and writing bucket configurations as files or mappings.

A file contains YAML fields, or the `bucket_config` of an Open-Sora config. The YAML fields are the fields of
BucketConfig and its parts, without nesting.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

from streamvid.buckets.bucket import Bucket
from streamvid.buckets.config import BucketConfig, PresetInfo, SizeRule
from streamvid.buckets.frames import FrameRate, FrameRule
from streamvid.buckets.geometry import DEFAULT_MULTIPLE
from streamvid.buckets.model import ModelRule
from streamvid.buckets.opensora import OpenSoraConfig
from streamvid.buckets.policy import Policy
from streamvid.buckets.ratios import Ratios
from streamvid.config import load_config, options_of, read_yaml
from streamvid.errors import ConfigError
from streamvid.shipped import shipped_config

Part = TypeVar("Part", SizeRule, Ratios, PresetInfo)

DEFAULT_BUCKETS: Mapping[str, Any] = {"resolution": ("256px",), "num_frames": (1, 17, 33)}
"""Fields of the default bucket configuration."""
_RESOLUTION_NAME = re.compile(r"[0-9]+(px?|k)?(_.*)?")
_PYTHON_NAMES = ("bucket_config", "probabilities", "image_size", "num_frames")


@dataclass(frozen=True)
class Document:
    """Fields of a configuration file. The fields are documented in `BucketConfig` and its parts."""

    name: str = ""
    source: str = ""
    notes: str = ""
    own_choice: tuple[str, ...] = ()
    buckets: tuple[str, ...] = ()
    bucket_config: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)
    resolution: tuple[str, ...] = ()
    num_frames: tuple[int, ...] = ()
    max_pixels: int | None = None
    height: int | None = None
    width: int | None = None
    max_frames: int | None = None
    multiple: int = DEFAULT_MULTIPLE
    ratios: Mapping[str, Mapping[str, str | int]] = field(default_factory=dict)
    min_ar: int | float | str | None = None
    max_ar: int | float | str | None = None
    num_ar_buckets: int | None = None
    probabilities: str | None = None
    frame_rate: Mapping[str, str | int | float] | None = None
    frame_rule: str | None = None
    model: Mapping[str, str | int | float | None] | None = None
    policy: Mapping[str, str | int | float | None] = field(default_factory=dict)
    assign: str = "draw"

    def to_config(self) -> BucketConfig:
        """Build the configuration. Raises a ConfigError that names the field if a value is invalid."""
        return BucketConfig(
            buckets=self.buckets,  # type: ignore[arg-type]  # BucketConfig parses them
            opensora=self._opensora(),
            resolution=self.resolution,
            num_frames=self.num_frames,
            size=self._part(SizeRule),
            ratios=replace(self._part(Ratios), tables=self.ratios),
            frame_rate=options_of(FrameRate, self.frame_rate, "frame_rate"),
            frame_rule=None if self.frame_rule is None else FrameRule.of(self.frame_rule),
            model=None if self.model is None else options_of(ModelRule, {"name": "model", **self.model}, "model"),
            policy=options_of(Policy, self.policy, "policy"),
            assign=self.assign,  # type: ignore[arg-type]  # BucketConfig checks it
            about=replace(self._part(PresetInfo), own_choice=tuple(self.own_choice)),
        )

    def _part(self, cls: type[Part]) -> Part:
        """Build an object such as SizeRule from the document fields that have the same names as its own fields."""
        return cls(**{item.name: getattr(self, item.name) for item in fields(cls) if hasattr(self, item.name)})

    def _opensora(self) -> OpenSoraConfig | None:
        form = {name: _by_frames(name, value) for name, value in self.bucket_config.items()}
        if form or self.probabilities is not None:
            return OpenSoraConfig(form, self.probabilities)
        return None


def load_bucket_config(path: str | Path, overrides: Sequence[str] = ()) -> BucketConfig:
    """Load a configuration from a YAML file, a preset's name, or an Open-Sora `.py` file.

    Only `bucket_config` and `probabilities` are read from a `.py` file. If it has no `bucket_config`, the `image_size`
    and `num_frames` of Open-Sora 1.0 are read instead.

    overrides: items of the form `field=value`, with the value in YAML. Raises a ConfigError that lists every mistake.
    """
    if str(path).endswith(".py"):
        form = _python_form(Path(path))
        return Document(**(form | _changed(load_config(Document, None, overrides)))).to_config()
    place = shipped_config("buckets", path)
    try:
        return load_config(Document, *_form_alone(place, overrides)).to_config()
    except ConfigError as error:
        message = str(error)
        raise ConfigError(message if str(place) in message else f"{place}: {message}") from None


def bucket_config_of(value: BucketConfig | str | Path | Mapping[str, Any]) -> BucketConfig:
    """Return a BucketConfig unchanged, or build one from a preset's name, a file, or a mapping of fields."""
    if isinstance(value, BucketConfig):
        return value
    return bucket_config_from_json(value) if isinstance(value, Mapping) else load_bucket_config(value)


def _form_alone(place: Path, overrides: Sequence[str]) -> tuple[Path | None, Sequence[str]]:
    """Return arguments for `load_config` that put a bare Open-Sora mapping into the `bucket_config` field."""
    tree = read_yaml(place)
    if not tree or not all(_RESOLUTION_NAME.fullmatch(str(name)) for name in tree):
        return place, overrides
    return None, [f"bucket_config={json.dumps(tree)}", *overrides]


def bucket_config_to_json(config: BucketConfig) -> dict[str, Any]:
    """Return the fields of a configuration file that differ from their defaults, as JSON values."""
    form = config.opensora or OpenSoraConfig({})
    parts: tuple[Any, ...] = (config, config.about, config.size, config.ratios, form)
    values = {item.name: getattr(part, item.name) for part in parts for item in fields(part)}
    values["ratios"] = config.ratios.tables
    values["policy"] = _changed(config.policy)
    values["frame_rate"] = _changed(config.frame_rate) or None
    document = Document(**{item.name: values[item.name] for item in fields(Document)})
    return {name: _plain(value) for name, value in _changed(document).items()}


def stored_buckets(config: BucketConfig) -> dict[str, object]:
    """Return the bucket configuration for the manifest: a plain list if only the buckets are configured."""
    is_listed = config.buckets or config.resolution
    if is_listed and config.ratios == Ratios(config.multiple):
        plain = BucketConfig(
            buckets=config.buckets, resolution=config.resolution, num_frames=config.num_frames, ratios=config.ratios
        )
        if replace(config, about=PresetInfo()) == plain:
            return {"buckets": [f"{bucket.id} {bucket.size_at_frames}" for bucket in config.table.candidates]}
    return {"bucket_config": bucket_config_to_json(replace(config, about=PresetInfo()))}


def _changed(options: Policy | FrameRate | Document) -> dict[str, object]:
    """Return the fields that differ from their defaults."""
    default = type(options)()
    values = {item.name: getattr(options, item.name) for item in fields(options)}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def bucket_config_from_json(values: Mapping[str, Any]) -> BucketConfig:
    """Build a configuration from the fields in a file. Raises ConfigError for unknown fields or invalid values."""
    known = [item.name for item in fields(Document)]
    unknown = [name for name in values if name not in known]
    if unknown:
        raise ConfigError(f"the bucket configuration has no field {unknown[0]!r}; allowed: {', '.join(known)}")
    return Document(**values).to_config()


def _by_frames(name: str, entries: object) -> dict[int, Any]:
    if not isinstance(entries, Mapping):
        raise ConfigError(f"bucket_config[{name!r}]={entries!r}: must contain frame counts, such as {{33: [1.0, 12]}}")
    return {_count(name, frames): value for frames, value in entries.items()}


def _count(name: str, frames: object) -> int:
    # In JSON, every key is a string.
    if isinstance(frames, str) and frames.isdecimal():
        return int(frames)
    if isinstance(frames, bool) or not isinstance(frames, int):
        raise ConfigError(f"bucket_config[{name!r}] has the key {frames!r}; expected a frame count, such as 33")
    return frames


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Fraction | FrameRule):
        return str(value)
    if isinstance(value, Bucket):
        return value.id
    if isinstance(value, ModelRule):
        return value.to_json()
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _python_form(path: Path) -> dict[str, Any]:
    """Return the fields to which a Python file assigns literals, without running the file."""
    found: dict[str, Any] = {}
    try:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:  # the last assignment counts
            if isinstance(node, ast.Assign) and (name := ast.unparse(node.targets[0])) in _PYTHON_NAMES:
                found[name] = ast.literal_eval(node.value)
        if found.get("bucket_config") is not None:
            # The key _delete_ declares that an Open-Sora config replaces the config that it builds on.
            form = {str(name): value for name, value in found["bucket_config"].items() if name != "_delete_"}
            return {"bucket_config": form, "probabilities": found.get("probabilities")}
        if {"image_size", "num_frames"} <= set(found):
            height, width = found["image_size"]
            return {"height": height, "width": width, "num_frames": (found["num_frames"],)}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}; check the path") from None
    except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        raise ConfigError(f"cannot read the buckets in {path}: {error}; write the configuration as YAML") from None
    raise ConfigError(
        f"{path} assigns neither bucket_config nor the image_size and num_frames of Open-Sora 1.0; write the "
        "configuration as YAML"
    )
