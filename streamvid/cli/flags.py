"""Command-line flags derived from option dataclasses, and option objects built from the given flags.

flags_of(ShardOptions) ──► --workers N, --where TEXT, …        flags of a dataclass and its nested dataclasses
take(flags, given)     ──► {"work": {"workers": 2}}            values of the given flags, without defaults
@option_flags(StorageOptions, "storage")                       both steps, as a decorator
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from functools import wraps
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import click

from streamvid.config import OptionInfo, allowed_choices, nested_options, option_info, option_types
from streamvid.errors import ConfigError, refuse_credentials

T = TypeVar("T")
Values: TypeAlias = dict[str, Any]
"""Values parsed by click, keyed by flag name or, in nested mappings, by field name."""

Command = TypeVar("Command", bound=Callable[..., Any])
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SHOWN_UNITS = (("GiB", 2**30), ("GB", 10**9), ("MiB", 2**20), ("MB", 10**6), ("KiB", 2**10), ("kB", 10**3))


class Parsed(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """Click type for values that `parse` converts.

    If `parse` raises ValueError, the message is "VALUE is not EXPECTED".
    """

    def __init__(self, name: str, parse: Callable[[str], Any], expected: str) -> None:
        self.name = name
        self._parse = parse
        self._expected = expected

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):  # click converts some values twice
            return value
        try:
            return self._parse(value)
        except (ValueError, ZeroDivisionError):
            self.fail(f"{value!r} is not {self._expected}", param, ctx)


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _parse_number(text: str) -> float:
    """Parse a number. Return a whole number as int, because some codecs accept only integers."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _parse_pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name or not value:
        raise ValueError
    return name, value


BYTE_SIZE = Parsed("size", _parse_size, "a size; write it as 512MB, 1GiB or a number of bytes")
NUMBER = Parsed("number", _parse_number, "a number")
RATE = Parsed("rate", Fraction, "a number; write it as 24, 0.5 or 30000/1001")
"""Click type for exact numbers, such as frame rates and ratios."""


def list_of(kind: Any, shown_default: str | None = None) -> Parsed:
    """Return the click type for comma-separated values.

    Each value is parsed as `kind` if `kind` is int or float; otherwise, the value is text.
    """
    item = kind if kind in (int, float) else str

    def parse(text: str) -> tuple[Any, ...]:
        words = [word.strip() for word in text.split(",")]
        if not all(words):  # a list with spaces arrives as several arguments, the first of which ends with a comma
            raise ValueError
        return tuple(map(item, words))

    # The default serves as the example if it is a list rather than a description.
    example = shown_default if shown_default and " " not in shown_default else "a,b" if item is str else "1,2"
    items = "items" if item is str else "numbers"
    return Parsed(
        "list", parse, f"a comma-separated list of {items}; write it without spaces as {example}, or omit this option"
    )


class Location(click.Path):
    """Click parameter type for paths and URLs. Raises ConfigError for text that contains credentials."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        refuse_credentials(self.name if param is None else param.opts[0], value)
        return super().convert(value, param, ctx)


LOCATION = Location()


class Flag(click.Option):
    """Click option that also stores its help group and the path of its field in the option object."""

    def __init__(self, *args: Any, group: str | None = None, path: Sequence[str] = (), **attributes: Any) -> None:
        self.group = group
        self.path = tuple(path)
        super().__init__(*args, **attributes)


class GroupedCommand(click.Command):
    """Click command whose help lists flags by group. Flags without a group come first, under "Options"."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                groups.setdefault(getattr(param, "group", None) or "Options", []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


def flags_of(
    cls: type,
    *,
    group: str | None = None,
    prefix: str = "",
    exclude: Collection[str] = (),
    path: tuple[str, ...] = (),
) -> list[Flag]:
    """Create flags for all options that a dataclass and its nested dataclasses declare, in the order of the fields.

    group: help heading for options that declare no group.
    prefix: prefix of each flag's name, as in --source-region.
    exclude: names of fields that get no flag.
    """
    flags: list[Flag] = []
    types = option_types(cls)
    for field in dataclasses.fields(cls):
        info = option_info(field)
        if info is None or field.name in exclude or info.flag == "":
            continue
        place, title = (*path, field.name), group if info.group is None else info.group
        nested = nested_options(types[field.name])
        if nested is not None:
            flags += flags_of(nested, group=title, prefix=prefix, exclude=exclude, path=place)
        else:
            flags.append(_flag(field, info, types[field.name], title, prefix, place))
    return flags


def take(flags: Sequence[Flag], given: Values) -> Values:
    """Remove the values of these flags from `given`, and return them as nested mappings from field to value."""
    tree: Values = {}
    for flag in flags:
        value = given.pop(str(flag.name), None)
        if value is not None:
            node = tree
            for name in flag.path[:-1]:
                node = node.setdefault(name, {})
            node[flag.path[-1]] = value
    return tree


def build(make: Callable[..., T], flags: Sequence[Flag], tree: Mapping[str, Any]) -> T:
    """Build options from the result of `take`.

    Error messages name the flag instead of the field.

    make: class of the options, or a function that creates the options.
    """
    try:
        return make(**tree)
    except ConfigError as error:
        for flag in flags:
            place = f"{'.'.join(flag.path)}="
            if str(error).startswith(place):
                raise ConfigError(f"{flag.opts[0]} {str(error).removeprefix(place)}") from None
        raise


def add_flags(flags: Sequence[Flag]) -> Callable[[Command], Command]:
    """Return a decorator that adds these flags to a command."""

    def decorate(command: Command) -> Command:
        params = command.__dict__.setdefault("__click_params__", [])
        params.extend(reversed(flags))
        return command

    return decorate


def option_flags(
    cls: type, into: str, *, group: str | None = None, exclude: Collection[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the flags of the dataclass `cls` to a command.

    The command receives an instance of `cls` as the argument whose name is `into`."""
    flags = flags_of(cls, group=group, exclude=exclude)

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def wrapped(*args: Any, **given: Any) -> Any:
            return command(*args, **{into: build(cls, flags, take(flags, given))}, **given)

        return add_flags(flags)(wrapped)

    return decorate


def _flag(
    field: dataclasses.Field[Any],
    info: OptionInfo,
    members: tuple[Any, ...],
    group: str | None,
    prefix: str,
    path: tuple[str, ...],
) -> Flag:
    name = (info.flag or f"--{field.name.replace('_', '-')}").removeprefix("--")
    attributes = _attributes(field, info, members)
    declared = f"--{prefix}{name}"
    if attributes.get("is_flag") and field.default is True:
        declared += f"/--{prefix}no-{name}"
    default = info.shown_default or _shown_default(field, attributes)
    return Flag(
        [declared, "__".join((prefix.replace("-", "_") + path[0], *path[1:]))],
        group=group,
        path=path,
        default=None,
        metavar=info.metavar,
        help=f"{info.help}  [default: {default}]" if default else info.help,
        **attributes,
    )


def _attributes(field: dataclasses.Field[Any], info: OptionInfo, members: Sequence[Any]) -> dict[str, Any]:
    """Return the attributes of the click option for a field. They depend on the field's type."""
    kinds = [member for member in members if member is not type(None)]
    origins = {typing.get_origin(kind): kind for kind in kinds}
    choices = allowed_choices(field, members)
    items = next((typing.get_args(kind)[0] for origin, kind in origins.items() if _is_sequence(origin)), None)
    if choices:
        return {"type": click.Choice(choices)}
    if any(isinstance(origin, type) and issubclass(origin, Mapping) for origin in origins):
        pair = Parsed("name=value", _parse_pair, f"of the form {info.metavar or 'NAME=VALUE'}")
        return {"type": pair, "multiple": True, "callback": _pairs}
    if items is not None:
        if str in kinds:  # repeatable, because a value may contain commas
            return {"multiple": True, "callback": _one_or_more}
        return {"type": list_of(items, info.shown_default)}
    if kinds == [bool]:
        return {"is_flag": True}
    return {"type": _param_type(field.name, kinds)}


def _is_sequence(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Sequence)


def _param_type(name: str, kinds: Sequence[Any]) -> click.ParamType[Any]:
    if Fraction in kinds:
        return RATE
    if float in kinds:
        return NUMBER if int in kinds else click.FLOAT
    if int in kinds:
        return BYTE_SIZE if name.endswith("_bytes") else click.INT
    return LOCATION if Path in kinds else click.STRING


def _pairs(ctx: click.Context, param: click.Parameter, values: Sequence[tuple[str, str]]) -> dict[str, str] | None:
    found = dict(values or ())
    if len(found) < len(values or ()):
        twice = [name for name, _ in values if [other for other, _ in values].count(name) > 1]
        raise click.BadParameter(f"{twice[0]!r} is given more than once; pass it only once", ctx, param)
    return found or None


def _one_or_more(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> str | tuple[str, ...] | None:
    if not values:
        return None
    return tuple(values) if len(values) > 1 else values[0]


def _shown_default(field: dataclasses.Field[Any], attributes: Mapping[str, Any]) -> str:
    value = field.default
    if value is None or isinstance(value, bool) or value in (dataclasses.MISSING, "", ()):
        return ""
    if attributes.get("type") is BYTE_SIZE:
        for unit, factor in _SHOWN_UNITS:
            if value % factor == 0:
                return f"{value // factor}{unit}"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
