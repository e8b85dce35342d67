"""A bucket configuration as a file: plain YAML fields, or the `bucket_config` of one of Open-Sora's Python configs."""

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
from streamvid.buckets.config import BucketConfig
from streamvid.buckets.frames import FrameRate, FrameRule
from streamvid.buckets.geometry import DEFAULT_MULTIPLE
from streamvid.buckets.model import ModelRule
from streamvid.buckets.policy import Policy, exact
from streamvid.buckets.ratios import Ratios
from streamvid.config import load_config, read_yaml
from streamvid.errors import ConfigError
from streamvid.shipped import shipped_config

_AS_THEY_ARE = ("max_pixels", "height", "width", "max_frames", "probabilities", "assign", "name", "source", "notes")
_RESOLUTION_NAME = re.compile(r"[0-9]+px?(_.*)?")
_TUPLES = ("resolution", "num_frames", "own_choice")
_RATIOS = ("multiple", "min_ar", "max_ar", "num_ar_buckets")


@dataclass(frozen=True)
class Document:
    """The fields of the file; `BucketConfig` and what it is made of say what each means."""

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
        """ConfigError names the field that cannot be."""
        plain: dict[str, Any] = {name: getattr(self, name) for name in _AS_THEY_ARE}
        plain |= {name: tuple(getattr(self, name)) for name in _TUPLES}
        return BucketConfig(
            **plain,
            buckets=tuple(parse_bucket(text, self.multiple) for text in self.buckets),
            bucket_config={name: _by_frames(name, value) for name, value in self.bucket_config.items()},
            ratios=Ratios(
                self.multiple,
                self.ratios,
                None if self.min_ar is None else _ratio("min_ar", self.min_ar),
                None if self.max_ar is None else _ratio("max_ar", self.max_ar),
                self.num_ar_buckets,
            ),
            frame_rate=FrameRate.from_json(_known("frame_rate", self.frame_rate, ("rule", "fps"))),
            frame_rule=None if self.frame_rule is None else FrameRule.parse(self.frame_rule),
            model=_model(self.model),
            policy=Policy.from_json(self.policy),
        )


def read_file(path: str | Path, overrides: Sequence[str]) -> BucketConfig:
    """`config.load_bucket_config`."""
    if str(path).endswith(".py"):
        document = Document(bucket_config=_python_form(Path(path)))
        return document.to_config() if not overrides else _overridden(document, overrides)
    place = shipped_config("buckets", path)
    try:
        return load_config(Document, *_form_alone(place, overrides)).to_config()
    except ConfigError as error:
        message = str(error)
        raise ConfigError(message if str(place) in message else f"{place}: {message}") from None


def _form_alone(place: Path, overrides: Sequence[str]) -> tuple[Path | None, Sequence[str]]:
    """What `load_config` takes: Open-Sora's mapping alone, without a field around it, is its `bucket_config`."""
    tree = read_yaml(place)
    if not tree or not all(isinstance(name, str) and _RESOLUTION_NAME.fullmatch(name) for name in tree):
        return place, overrides
    return None, [f"bucket_config={json.dumps(tree)}", *overrides]


def to_fields(config: BucketConfig) -> dict[str, Any]:
    """The file's fields of a configuration, without those at their defaults, in types that JSON has."""
    document = Document(
        **{name: getattr(config, name) for name in (*_AS_THEY_ARE, *_TUPLES)},
        **{name: getattr(config.ratios, name) for name in _RATIOS},
        ratios=config.ratios.tables,
        buckets=tuple(bucket.id for bucket in config.buckets),
        bucket_config=config.bucket_config,
        frame_rate=config.frame_rate.to_json() if config.frame_rate != FrameRate() else None,
        frame_rule=None if config.frame_rule is None else str(config.frame_rule),
        model=None if config.model is None else config.model.to_json(),
        policy=config.policy.to_json(),
    )
    default = Document()
    values = {item.name: getattr(document, item.name) for item in fields(document)}
    return {name: _plain(value) for name, value in values.items() if value != getattr(default, name)}


def from_fields(values: Mapping[str, Any]) -> BucketConfig:
    """The configuration that `to_fields` gave the fields of."""
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


def _ratio(name: str, value: float | str) -> Fraction:
    if isinstance(value, str):
        try:
            return Fraction(value.replace(":", "/"))
        except (ValueError, ZeroDivisionError):
            raise ConfigError(f"{name}={value!r}: expected width / height, as 0.5 or '9:16'") from None
    return exact(name, value)


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
    """The literal that a Python file assigns to bucket_config. Nothing of the file is run."""
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
