"""YAML → frozen dataclasses: strict keys, strict types, dotted overrides, every mistake in one error.

    optimizer: {lr: 1e-4}          optimizer.lr=3e-4
          │                              │
          └──── one plain tree ◄─────────┘ ──► names checked ──► types checked (pydantic) ──► a frozen dataclass

The YAML is read by the 1.2 rules, because those of 1.1 bend what people write about video: `16:9` would be the number
969, `no` false, and `1e-4` a string.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from streamvid.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

T = TypeVar("T")
Location = tuple[str | int, ...]

MAX_FILE_BYTES = 1 << 20
# An alias may repeat a whole branch, so a small file can unfold into a huge tree.
MAX_VALUES = 20_000
MAX_DEPTH = 20

_SCALARS = {
    "bool": (r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    "int": (r"^[-+]?[0-9]+$|^0x[0-9a-fA-F]+$", "-+0123456789"),
    "float": (
        r"^[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?$|^[-+]?[0-9]+[eE][-+]?[0-9]+$"
        r"|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$",
        "-+.0123456789",
    ),
    "null": (r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
}


def load_config(cls: type[T], path: str | Path | None, overrides: Sequence[str] = ()) -> T:
    """Build the frozen dataclass `cls` from a YAML file and dotted overrides.

    path: a YAML file of at most 1 MiB; None starts from the defaults.
    overrides: `a.b=c` each, the value in YAML; a later one wins.
    Raises ConfigError with every unknown key (and the nearest known one), wrong type and refused value at once.
    """
    source = "overrides" if path is None else str(path)
    tree: dict[str, Any] = {} if path is None else read_yaml(Path(path))
    for override in overrides:
        _apply_override(tree, override)
    _check_size(tree, source)
    problems = list(_unknown_keys(cls, tree, ()))
    try:
        # As JSON, where pydantic's strict rules fit YAML: a list is a tuple, a string a path, but "3" is no number.
        instance: T = _adapter(cls).validate_json(json.dumps(tree), strict=True)
    except ValueError as error:
        problems += _problems(error, tree)
        raise _config_error(source, problems) from None
    if problems:
        raise _config_error(source, problems)
    return instance


def dump_config(instance: Any) -> str:
    """Write a config dataclass as YAML that `load_config` reads back to an equal instance."""
    import yaml

    tree = _adapter(type(instance)).dump_python(instance, mode="json")
    # In ASCII, because YAML reads some of Unicode's line breaks as spaces.
    text: str = yaml.dump(tree, Dumper=_dumper(), sort_keys=False)
    return text


def _adapter(cls: type[T]) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def _use_yaml_1_2(cls: Any) -> Any:
    import re

    cls.yaml_implicit_resolvers = {}
    for name, (pattern, first) in _SCALARS.items():
        cls.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(pattern), list(first))
    return cls


@functools.cache
def _dumper() -> Any:
    import yaml

    return _use_yaml_1_2(type("Dumper", (yaml.SafeDumper,), {}))


@functools.cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise yaml.MarkedYAMLError(problem="a key must be a plain name", problem_mark=key.start_mark)
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value!r} stands here twice", problem_mark=key.start_mark)
                seen.add(key.value)
            return {str(k.value): self.construct_object(v, deep=True) for k, v in node.value}

        def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
            return int(node.value, 16 if node.value.startswith("0x") else 10)

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    # JSON's types and no others: an explicit `!!binary` or `!!set` is an unknown tag.
    plain = {f"tag:yaml.org,2002:{name}" for name in (*_SCALARS, "str", "map", "seq")}
    Loader.yaml_constructors = {tag: f for tag, f in Loader.yaml_constructors.items() if tag is None or tag in plain}
    return _use_yaml_1_2(Loader)


def _parse_yaml(text: str, where: str) -> Any:
    import yaml

    try:
        return yaml.load(text, Loader=_loader())  # noqa: S506  # a SafeLoader with stricter scalars
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not YAML: {' '.join(str(error).split())}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file of at most 1 MiB holds; ConfigError for anything else."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        text = content.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}; give the path of a YAML file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the config {path} is not UTF-8 text; give the path of a YAML file") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"the config {path} is larger than {MAX_FILE_BYTES} bytes, which no config needs")
    tree = _parse_yaml(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds a {type(tree).__name__} at its top; allowed is a mapping of fields")
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {override!r} is not of the form name=value or section.name=value")
    node = tree
    for depth, part in enumerate(parts[:-1]):
        child = node.get(part)
        if child is not None and not isinstance(child, dict):
            section = ".".join(parts[: depth + 1])
            raise ConfigError(f"override {override!r}: {section} is {child!r}, which has no fields of its own to set")
        # A fresh copy: the same branch may stand elsewhere too, by a YAML alias.
        node[part] = {} if child is None else dict(child)
        node = node[part]
    node[parts[-1]] = _parse_yaml(text, f"the value of override {override!r}")


def _check_size(tree: Any, source: str) -> None:
    count = 0
    pending = [(tree, 0)]
    while pending:
        value, depth = pending.pop()
        count += 1
        if count > MAX_VALUES or depth > MAX_DEPTH:
            raise ConfigError(f"{source} unfolds to more than {MAX_VALUES} values or {MAX_DEPTH} levels")
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        pending.extend((child, depth + 1) for child in children)


def _unknown_keys(annotation: Any, value: Any, location: Location) -> Iterator[str]:
    """Every key below `value` that no dataclass in `annotation` has, as a sentence that names the nearest known one."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type) and isinstance(value, dict):
        hints = typing.get_type_hints(annotation)
        names = [field.name for field in dataclasses.fields(annotation) if field.init]
        for key, child in value.items():
            if key in names:
                yield from _unknown_keys(hints[key], child, (*location, key))
                continue
            nearest = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"allowed: {', '.join(names)}"
            yield f"{_dotted((*location, key))} is no field; {hint}"
    elif origin in (typing.Union, types.UnionType):
        options = [a for a in arguments if dataclasses.is_dataclass(a)] or arguments
        found = [list(_unknown_keys(option, value, location)) for option in options]
        yield from min(found, key=len)
    elif isinstance(value, dict) and isinstance(origin, type) and issubclass(origin, Mapping):
        for key, child in value.items():
            yield from _unknown_keys(arguments[1], child, (*location, key))
    elif isinstance(value, list) and isinstance(origin, type) and issubclass(origin, Sequence):
        for index, child in enumerate(value):
            yield from _unknown_keys(arguments[0], child, (*location, index))


def _problems(error: ValueError, tree: dict[str, Any]) -> list[str]:
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return [str(error)]
    by_field: dict[Location, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        by_field.setdefault(_field_location(details, tree), []).append(details)
    # Of a union, the member that got deepest into the value is the one that was meant.
    outer = {location[:depth] for location in by_field for depth in range(len(location))}
    return [_sentence(location, found) for location, found in by_field.items() if location not in outer]


def _field_location(details: ErrorDetails, tree: Any) -> Location:
    """Pydantic's location less the names of the union's members, which are no place in the file."""
    kept: list[str | int] = []
    missing = details["type"] == "missing"
    for index, part in enumerate(details["loc"]):
        if isinstance(tree, dict) and part in tree:
            tree = tree[str(part)]
        elif isinstance(tree, list) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
        elif not (missing and index == len(details["loc"]) - 1):
            continue
        kept.append(part)
    return tuple(kept)


def _sentence(location: Location, found: list[ErrorDetails]) -> str:
    name = _dotted(location)
    first = found[0]
    if first["type"] == "missing":
        if isinstance(location[-1], int):
            return f"{_dotted(location[:-1])} is too short: it has no item {location[-1]} (counted from 0)"
        return f"{name} is missing and has no default; set it in the file or with {name}=VALUE"
    if first["type"] == "value_error":
        message = str(first.get("ctx", {}).get("error", first["msg"]))
        return f"{name}: {message}" if location else message
    allowed = " or ".join(dict.fromkeys(item["msg"].removeprefix("Input should be ") for item in found))
    text = json.dumps(first["input"], default=str)
    allowed = allowed.replace("an object", "a section of fields")
    remedy = ""
    if first["type"] in ("string_type", "path_type") and isinstance(first["input"], int | float):
        remedy = f"; in quotes it is one: \"'{text}'\""
    return f"{name} is {text[:200]}; allowed: {allowed}{remedy}"


def _dotted(location: Location) -> str:
    return ".".join(str(part) for part in location)


def _config_error(source: str, problems: list[str]) -> ConfigError:
    if len(problems) == 1:
        return ConfigError(f"{source}: {problems[0]}")
    lines = "\n".join(f"  - {problem}" for problem in problems)
    return ConfigError(f"{len(problems)} mistakes in {source}:\n{lines}")


# What dataclasses that are built so check of themselves.


def require(holds: bool, name: str, value: Any, allowed: str) -> None:
    """ConfigError unless it holds."""
    if not holds:
        raise ConfigError(f"{name} is {value}; allowed: {allowed}")


def require_at_least(instance: Any, least: int, *names: str) -> None:
    """ConfigError for the first of these fields that is less; None is allowed."""
    for name in names:
        value = getattr(instance, name)
        require(value is None or value >= least, name, value, f"{least} and up")


def require_one_of(instance: Any, first: str, second: str) -> None:
    """ConfigError where both fields are given."""
    values = (getattr(instance, first), getattr(instance, second))
    if None not in values:
        raise ConfigError(f"{first}={values[0]} and {second}={values[1]} are both set; allowed: one, the other null")
