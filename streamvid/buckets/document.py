"""A bucket configuration as a file or a mapping: plain YAML fields, or the `bucket_config` of an Open-Sora config.

The fields of the file are those of BucketConfig and of what it is made of, on one level.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from streamvid.buckets.bucket import parse_bucket
from streamvid.buckets.config import BucketConfig, PresetInfo, SizeRule
from streamvid.buckets.frames import FrameRate, FrameRule
from streamvid.buckets.geometry import DEFAULT_MULTIPLE
from streamvid.buckets.model import ModelRule
from streamvid.buckets.opensora import OpenSoraConfig
from streamvid.buckets.policy import Policy
from streamvid.buckets.ratios import Ratios
from streamvid.config import load_config, read_yaml
from streamvid.errors import ConfigError
from streamvid.shipped import shipped_config

_SIZE = ("max_pixels", "height", "width", "max_frames")
_ABOUT = ("name", "source", "notes", "own_choice")
_RATIOS = ("multiple", "min_ar", "max_ar", "num_ar_buckets")
DEFAULT_BUCKETS: Mapping[str, Any] = {"resolution": ("256px",), "num_frames": (1, 17, 33)}
"""Buckets where a user names none."""
_RESOLUTION_NAME = re.compile(r"[0-9]+px?(_.*)?")


@dataclass(frozen=True)
class Document:
    """The fields of the file; `BucketConfig` and its parts document each."""

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
        """Build the configuration. Raises ConfigError that names the field."""
        ratios: dict[str, Any] = {name: getattr(self, name) for name in _RATIOS}
        return BucketConfig(
            buckets=tuple(parse_bucket(text, self.multiple) for text in self.buckets),
            opensora=self._opensora(),
            resolution=self.resolution,
            num_frames=self.num_frames,
            size=SizeRule(**{name: getattr(self, name) for name in _SIZE}),
            ratios=Ratios(tables=self.ratios, **ratios),
            frame_rate=FrameRate.from_json(_known("frame_rate", self.frame_rate, ("rule", "fps"))),
            frame_rule=None if self.frame_rule is None else FrameRule.parse(self.frame_rule),
            model=_model(self.model),
            policy=Policy.from_json(self.policy),
            assign=self.assign,  # type: ignore[arg-type]  # BucketConfig checks it
            about=PresetInfo(self.name, self.source, self.notes, tuple(self.own_choice)),
        )

    def _opensora(self) -> OpenSoraConfig | None:
        form = {name: _by_frames(name, value) for name, value in self.bucket_config.items()}
        if form or self.probabilities is not None:
            return OpenSoraConfig(form, self.probabilities)
        return None


def load_bucket_config(path: str | Path, overrides: Sequence[str] = ()) -> BucketConfig:
    """Load the configuration in a YAML file, the preset of that name, or `bucket_config` of an Open-Sora `.py`.

    overrides: `field=value` each, the value in YAML. Raises ConfigError that names every mistake.
    """
    if str(path).endswith(".py"):
        document = Document(bucket_config=_python_form(Path(path)))
        return document.to_config() if not overrides else _overridden(document, overrides)
    place = shipped_config("buckets", path)
    try:
        return load_config(Document, *_form_alone(place, overrides)).to_config()
    except ConfigError as error:
        message = str(error)
        raise ConfigError(message if str(place) in message else f"{place}: {message}") from None


def bucket_config_of(value: BucketConfig | str | Path | Mapping[str, Any]) -> BucketConfig:
    """Return the configuration that a caller gives: itself, a preset's name, a file, or a mapping of its fields."""
    if isinstance(value, BucketConfig):
        return value
    return bucket_config_from_json(value) if isinstance(value, Mapping) else load_bucket_config(value)


def _form_alone(place: Path, overrides: Sequence[str]) -> tuple[Path | None, Sequence[str]]:
    """Return what `load_config` takes: Open-Sora's mapping without a field around it is its `bucket_config`."""
    tree = read_yaml(place)
    if not tree or not all(isinstance(name, str) and _RESOLUTION_NAME.fullmatch(name) for name in tree):
        return place, overrides
    return None, [f"bucket_config={json.dumps(tree)}", *overrides]


def bucket_config_to_json(config: BucketConfig) -> dict[str, Any]:
    """Return the fields of a file, without those at their defaults, in types that JSON has."""
    opensora = config.opensora
    document = Document(
        **{name: getattr(config.about, name) for name in _ABOUT},
        **{name: getattr(config.size, name) for name in _SIZE},
        **{name: getattr(config.ratios, name) for name in _RATIOS},
        ratios=config.ratios.tables,
        buckets=tuple(bucket.id for bucket in config.buckets),
        bucket_config={} if opensora is None else opensora.bucket_config,
        probabilities=None if opensora is None else opensora.probabilities,
        resolution=config.resolution,
        num_frames=config.num_frames,
        frame_rate=config.frame_rate.to_json() if config.frame_rate != FrameRate() else None,
        frame_rule=None if config.frame_rule is None else str(config.frame_rule),
        model=None if config.model is None else config.model.to_json(),
        policy=config.policy.to_json(),
        assign=config.assign,
    )
    default = Document()
    values = {item.name: getattr(document, item.name) for item in fields(document)}
    return {name: _plain(value) for name, value in values.items() if value != getattr(default, name)}


def bucket_config_from_json(values: Mapping[str, Any]) -> BucketConfig:
    """Build a configuration from the fields of a file. Raises ConfigError."""
    known = [item.name for item in fields(Document)]
    unknown = [name for name in values if name not in known]
    if unknown:
        raise ConfigError(f"bucket configuration has no field {unknown[0]!r}; it has {', '.join(known)}")
    return Document(**values).to_config()


def _by_frames(name: str, entries: object) -> dict[int, Any]:
    if not isinstance(entries, Mapping):
        raise ConfigError(f"bucket_config[{name!r}]={entries!r}: expected frame counts, as 33: [1.0, 12]")
    return {_count(name, frames): value for frames, value in entries.items()}


def _count(name: str, frames: object) -> int:
    # JSON has its keys as text.
    if isinstance(frames, str) and frames.isdecimal():
        return int(frames)
    if isinstance(frames, bool) or not isinstance(frames, int):
        raise ConfigError(f"bucket_config[{name!r}] has the key {frames!r}: expected a frame count, as 33")
    return frames


def _model(values: Mapping[str, Any] | None) -> ModelRule | None:
    if values is None:
        return None
    named = {"name": "model", **values}
    return ModelRule.from_json(_known("model", named, tuple(ModelRule.__slots__)) or named)


def _known(where: str, values: Mapping[str, Any] | None, names: tuple[str, ...]) -> Mapping[str, Any] | None:
    for name in values or {}:
        if name not in names:
            raise ConfigError(f"{where} has no field {name!r}; it has {', '.join(names)}")
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Fraction):
        return str(value)
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _overridden(document: Document, overrides: Sequence[str]) -> BucketConfig:
    given = load_config(Document, None, overrides)
    changed = {item.name for item in fields(given) if getattr(given, item.name) != getattr(Document(), item.name)}
    own = {name: getattr(given, name) for name in changed}
    return Document(**{"bucket_config": document.bucket_config, **own}).to_config()


def _python_form(path: Path) -> dict[str, Any]:
    """Return the literal that a Python file assigns to bucket_config, without running the file."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in reversed(tree.body):  # what is assigned last holds
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["bucket_config"]:
                form = ast.literal_eval(node.value)
                # Their configs may replace the one that they build on, and say so in a key of its own.
                return {str(name): value for name, value in form.items() if name != "_delete_"}
    except (OSError, SyntaxError, ValueError, AttributeError, RecursionError, MemoryError) as error:
        raise ConfigError(f"cannot read bucket_config of {path}: {error}; write it as YAML") from None
    raise ConfigError(f"{path} assigns no bucket_config; write the configuration as YAML")
