"""Strict loading of YAML files and dotted overrides into frozen dataclasses. A single error reports all mistakes.

    optimizer: {lr: 1e-4}          optimizer.lr=3e-4
          │                              │
          └──── one plain tree ◄─────────┘ ──► names checked ──► types checked (pydantic) ──► a frozen dataclass

Files are parsed as YAML 1.2. YAML 1.1 would misread common values: `16:9` as the number 969, `no` as false, and `1e-4`
as a string.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from streamvid.errors import ConfigError, refuse_credentials

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

T = TypeVar("T")
Location = tuple[str | int, ...]

MAX_FILE_BYTES = 1 << 20
# An alias may repeat a whole branch, so a small file can expand to a huge tree.
MAX_VALUES = 20_000
MAX_DEPTH = 20
_MAX_DIGITS = 40

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


def load_config(cls: type[T], path: str | Path | None, overrides: Sequence[str | tuple[str, object]] = ()) -> T:
    """Build the frozen dataclass `cls` from a YAML file and dotted overrides.

    path: YAML file of at most 1 MiB; None to start from the defaults.
    overrides: strings of the form `a.b=c`, where c is YAML, or pairs such as ("a.b", value). Later overrides win.
    Raises one ConfigError that lists every unknown key (with the nearest known key), wrong type and invalid value.
    """
    source = "overrides" if path is None else str(path)
    tree: dict[str, Any] = {} if path is None else read_yaml(Path(path))
    for override in overrides:
        _apply_override(tree, override)
    _check_size(tree, source)
    problems = list(_unknown_keys(cls, tree, ()))
    try:
        # pydantic's strict rules for JSON suit YAML: a list can become a tuple, but "3" cannot become a number.
        instance: T = _adapter(cls).validate_json(json.dumps(tree), strict=True)
    except ValueError as error:
        problems += _problems(error, tree)
        raise _config_error(source, problems) from None
    if problems:
        raise _config_error(source, problems)
    return instance


def dump_config(instance: Any) -> str:
    """Return a config dataclass as YAML text, from which `load_config` builds an equal instance."""
    import yaml

    tree = _adapter(type(instance)).dump_python(instance, mode="json")
    # The output is ASCII, because YAML reads some Unicode line breaks as spaces.
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
                    raise yaml.MarkedYAMLError(problem="a key cannot be a list or mapping", problem_mark=key.start_mark)
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"key {key.value!r} appears twice", problem_mark=key.start_mark)
                seen.add(key.value)
            return {str(k.value): self.construct_object(v, deep=True) for k, v in node.value}

        def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
            return int(node.value, 16 if node.value.startswith("0x") else 10)

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    # Only JSON types are allowed, so an explicit `!!binary` or `!!set` is an unknown tag.
    plain = {f"tag:yaml.org,2002:{name}" for name in (*_SCALARS, "str", "map", "seq")}
    Loader.yaml_constructors = {tag: f for tag, f in Loader.yaml_constructors.items() if tag is None or tag in plain}
    return _use_yaml_1_2(Loader)


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML text. If the text is invalid, raises a ConfigError whose message begins with `where`."""
    import yaml

    try:
        return yaml.load(text, Loader=_loader())  # noqa: S506  # a SafeLoader with stricter scalars
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # The parser quotes an excerpt, which may truncate credentials so that they are no longer recognized.
        reason = str(error) if "@" not in text else str(getattr(error, "problem", "syntax error"))
        raise ConfigError(f"{where} is not valid YAML: {' '.join(reason.split())}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a mapping from a YAML file of at most 1 MiB. Raises ConfigError if the file cannot be read or is invalid."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"the config {path} is larger than {MAX_FILE_BYTES} bytes; use a smaller file")
        tree = parse_yaml(content.decode("utf-8"), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the config {path} is not UTF-8 text; save it as UTF-8") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} contains data of type {type(tree).__name__}; it must map field names to values")
    return tree


def _apply_override(tree: dict[str, Any], override: str | tuple[str, object]) -> None:
    if isinstance(override, str):
        refuse_credentials("override", override)  # before it is split, because a secret may contain "="
        name, equals, text = override.partition("=")
        if not equals or not all(name.strip().split(".")):
            raise ConfigError(f"override {override!r} is not of the form name=value or section.name=value")
        value = parse_yaml(text, f"the value of override {override!r}")
    else:
        name, value = override
    parts = name.strip().split(".")
    node = tree
    for depth, part in enumerate(parts[:-1]):
        child = node.get(part)
        if child is not None and not isinstance(child, dict):
            section = ".".join(parts[: depth + 1])
            raise ConfigError(
                f"override {override!r}: {section} is {child!r}, not a section of fields; override {section} itself, "
                "or make it a section in the file"
            )
        # The branch is copied, because a YAML alias may share it with other parts of the tree.
        node[part] = {} if child is None else dict(child)
        node = node[part]
    node[parts[-1]] = value


def _check_size(tree: Any, source: str) -> None:
    count = 0
    pending = [(tree, 0)]
    while pending:
        value, depth = pending.pop()
        count += 1
        if count > MAX_VALUES or depth > MAX_DEPTH:
            raise ConfigError(
                f"{source} contains more than {MAX_VALUES} values or more than {MAX_DEPTH} nesting levels; simplify it"
            )
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        pending.extend((child, depth + 1) for child in children)


def _unknown_keys(annotation: Any, value: Any, location: Location) -> Iterator[str]:
    """Yield a message, with the nearest known key, for every key below `value` that is not a field of `annotation`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type) and isinstance(value, dict):
        hints = typing.get_type_hints(annotation)
        names = [field.name for field in dataclasses.fields(annotation) if field.init]
        for key, child in value.items():
            if key in names:
                yield from _unknown_keys(hints[key], child, (*location, key))
                continue
            yield f"{_dotted((*location, key))} is not a field; {_known(key, names)}"
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


def _known(key: object, names: Collection[str]) -> str:
    nearest = difflib.get_close_matches(str(key), names, n=1, cutoff=0.5)
    return f"did you mean {nearest[0]!r}?" if nearest else f"allowed: {', '.join(names)}"


def _problems(error: ValueError, tree: dict[str, Any]) -> list[str]:
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return [str(error)]
    by_field: dict[Location, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        by_field.setdefault(_field_location(details, tree), []).append(details)
    # In a union, the intended member is the one that matched the value most deeply.
    outer = {location[:depth] for location in by_field for depth in range(len(location))}
    return [_sentence(location, found) for location, found in by_field.items() if location not in outer]


def _field_location(details: ErrorDetails, tree: Any) -> Location:
    """Return the location of a pydantic error, omitting the names of union members, which do not appear in the file."""
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
            return f"{_dotted(location[:-1])} is too short: it has no item with index {location[-1]}; add items"
        return f"{name} is missing and has no default; set it in the file or with {name}=VALUE"
    if first["type"] == "value_error":
        message = str(first.get("ctx", {}).get("error", first["msg"]))
        return f"{name}: {message}" if location else message
    words = dict.fromkeys(item["msg"].removeprefix("Input should be ") for item in found)
    allowed = " or ".join(words).replace("an object", "a section of fields")
    text, remedy = json.dumps(first["input"], default=str), ""
    if first["type"] in ("string_type", "path_type") and isinstance(first["input"], int | float):
        remedy = f"; put it in quotes: '{text}' in a file, \"'{text}'\" in a shell"
    return f"{name} is {text[:200]}; allowed: {allowed}{remedy}"


def _dotted(location: Location) -> str:
    return ".".join(str(part) for part in location)


def _config_error(source: str, problems: list[str]) -> ConfigError:
    if len(problems) == 1:
        return ConfigError(f"{source}: {problems[0]}")
    lines = "\n".join(f"  - {problem}" for problem in problems)
    return ConfigError(f"{len(problems)} mistakes in {source}:\n{lines}")


# Options. Flags, YAML fields, errors and reference documentation all derive from one declaration per option.


@dataclasses.dataclass(frozen=True, slots=True)
class OptionInfo:
    """Documentation and limits for one option, as declared with `option`.

    shown_default: text to show in place of a default that depends on other values.
    flag: name of the command-line flag; None for a name derived from the field's name, "" for no flag.
    minimum, maximum: inclusive bounds of a number.
    above: exclusive lower bound of a number.
    """

    help: str = ""
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    group: str | None = None
    flag: str | None = None
    shown_default: str | None = None
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None


def option(default: Any = dataclasses.MISSING, *, default_factory: Any = dataclasses.MISSING, **info: Any) -> Any:
    """Declare a field of an option dataclass. The other keyword arguments set the fields of OptionInfo."""
    metadata = {"option": OptionInfo(**info)}
    return dataclasses.field(default=default, default_factory=default_factory, metadata=metadata)


def option_info(field: dataclasses.Field[Any]) -> OptionInfo | None:
    """Return the OptionInfo of a field, or None if the field was not declared with `option`."""
    info = field.metadata.get("option")
    return info if isinstance(info, OptionInfo) else None


@functools.cache
def option_types(cls: type) -> Mapping[str, tuple[Any, ...]]:
    """Map each field name to the types that the field allows: the members of its union, or its single type."""
    hints = typing.get_type_hints(cls)
    return {field.name: _members(hints[field.name]) for field in dataclasses.fields(cls)}


def nested_options(members: Sequence[Any]) -> type | None:
    """Return the option dataclass among a field's types, or None if no type is an option dataclass."""
    for kind in members:
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return kind if any(option_info(field) for field in dataclasses.fields(kind)) else None
    return None


def _members(annotation: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def allowed_choices(field: dataclasses.Field[Any], members: Sequence[Any]) -> tuple[str, ...]:
    """Return the words that `choices` or a Literal type allows for an option. Return () if the option has neither."""
    info = option_info(field)
    if info is not None and info.choices:
        return info.choices
    literals = [member for member in members if typing.get_origin(member) is typing.Literal]
    return tuple(str(word) for literal in literals for word in typing.get_args(literal))


def options_of(cls: type[T], value: Any, name: str) -> T:
    """Return `value` as an instance of `cls`: None gives the defaults, and a mapping sets the fields that it contains.

    name: name to use for the value in error messages, where its fields appear as `name.field`.
    """
    if isinstance(value, cls):
        return value
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(
            f"{name} is of type {type(value).__name__}; allowed: {cls.__name__} or a mapping of its fields"
        )
    known = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    for key in value or {}:
        if key not in known:  # the value may be a secret and is not shown
            raise ConfigError(f"{name} has no field {key!r}; {_known(key, known)}")
    _refuse_missing(cls, value or {}, name)
    try:
        return cls(**(value or {}))
    except ConfigError as error:
        raise ConfigError(f"{name}.{error}") from None


def from_fields(cls: type[T], value: object, name: str) -> T:
    """Build a dataclass from a JSON object. Unknown fields are ignored, because a later version may have added them.

    If the value is not an object or lacks a required field, raises a ConfigError whose message begins with `name`.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}={value!r}: must be an object with the fields of {cls.__name__}")
    _refuse_missing(cls, value, name)
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    return cls(**{name: value[name] for name in known if name in value})


def _refuse_missing(cls: type, value: Mapping[Any, Any], name: str) -> None:
    required = [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING]
    if missing := [field for field in required if field not in value]:
        raise ConfigError(f"{name} is missing required fields; add {', '.join(missing)}")


def exact(name: str, value: object) -> Fraction:
    """Return a number, or a string such as "9/16", as an exact fraction. Raises ConfigError for any other value."""
    # Exponents are not allowed in text, because a short text such as "1e999999" would expand to a huge number.
    is_number = isinstance(value, int | float | Fraction) and not isinstance(value, bool)
    if is_number or (isinstance(value, str) and len(value) <= _MAX_DIGITS and "e" not in value.lower()):
        try:
            return Fraction(str(value).replace(":", "/"))
        except (ValueError, ZeroDivisionError):
            pass  # this also rejects inf and nan
    raise ConfigError(f"{name}={value!r}: must be a finite number, such as 0.5 or '9/16', without an exponent")


def check_options(instance: Any) -> None:
    """Check the type, choices and bounds of every field declared with `option`.

    Also convert mappings to nested options, and numbers and strings to Fraction for fields of that type. Call this
    function first in `__post_init__`. Raises ConfigError with the allowed values if a check fails.
    """
    cls: Any = type(instance)
    members_of = option_types(cls)
    for field in dataclasses.fields(instance):
        info, members = option_info(field), members_of[field.name]
        if info is None:
            continue
        nested, value = nested_options(members), getattr(instance, field.name)
        if value is None and type(None) in members:
            continue
        if Path in members and isinstance(value, str | Path):
            refuse_credentials(field.name, value)
        if nested is not None and set(members) <= {nested, type(None)}:
            object.__setattr__(instance, field.name, options_of(nested, value, field.name))
            continue
        if set(members) <= {Fraction, type(None)}:
            value = exact(field.name, value)
            object.__setattr__(instance, field.name, value)
        choices = allowed_choices(field, members)
        is_word = not choices or value in choices
        if not (is_word and _is_of_type(value, members) and _is_within(value, info)):
            shown = str(value) if isinstance(value, Fraction) else repr(value)
            raise ConfigError(f"{field.name}={shown}: must be {_allowed(info, members, choices)}")


class Options:
    """Base class for option dataclasses. Its `__post_init__` calls `check_options`."""

    def __post_init__(self) -> None:
        check_options(self)


_SIMPLE: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    Fraction: "a number",
    bool: "True or False",
    str: "text",
    type(None): "None",
}


def _is_of_type(value: Any, members: Sequence[Any]) -> bool:
    """Return True if the value has one of these types, or if this function cannot check one of the types."""
    if not set(members) <= _SIMPLE.keys():
        return True
    if isinstance(value, bool) or value is None:
        return type(value) in members
    if isinstance(value, float):
        return float in members and not math.isnan(value)
    return isinstance(value, tuple(members)) or (isinstance(value, int) and float in members)


def _is_within(value: Any, info: OptionInfo) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float | Fraction):
        return True
    is_large_enough = (info.minimum is None or value >= info.minimum) and (info.above is None or value > info.above)
    return is_large_enough and (info.maximum is None or value <= info.maximum)


def _allowed(info: OptionInfo, members: Sequence[Any], choices: Sequence[str]) -> str:
    kinds = [member for member in members if member is not type(None)]
    kinds_allowed = dict.fromkeys(_SIMPLE[kind] for kind in kinds if kind in _SIMPLE)
    words = [repr(word) for word in choices] or list(kinds_allowed)
    is_range = info.minimum is not None and info.maximum is not None
    first, last = ("from", "to") if is_range else ("of at least", "of at most" if info.above is None else "and at most")
    ends = ((first, info.minimum), ("above", info.above), (last, info.maximum))
    bounds = " ".join(f"{word} {int(bound) if bound % 1 == 0 else bound}" for word, bound in ends if bound is not None)
    text = " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
    return f"{text} {bounds}".strip() + (", or None" if type(None) in members else "")


def require(holds: bool, name: str, value: Any, allowed: str) -> None:
    """Raise ConfigError, with `name`, `value` and `allowed` in the message, unless `holds` is true."""
    if not holds:
        raise ConfigError(f"{name} is {value}; allowed: {allowed}")


def require_integer(
    name: str, value: object, lowest: int, highest: int | None = None, error: type[Exception] = ConfigError
) -> int:
    """Return the value if it is an integer (not a bool) within the bounds. Otherwise, raise `error`."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < lowest
        or (highest is not None and value > highest)
    ):
        allowed = f"of at least {lowest}" if highest is None else f"from {lowest} to {highest}"
        raise error(f"{name}={value!r}: must be an integer {allowed}")
    return value
