"""Tests of flags derived from option dataclasses, and of the instances built from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner

from streamvid.cli.flags import GroupedCommand, option_flags
from streamvid.config import check_options, option
from streamvid.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    kind: Literal["copy", "native"] = option("copy", help="What is stored.", flag="--clips")
    rate: Fraction | float | None = option(None, help="Frame rate.", metavar="R")
    counts: tuple[int, ...] = option((1, 17), help="Frame counts.", shown_default="1,17")
    columns: str | tuple[str, ...] | None = option(None, help="Columns.")
    hidden: int = option(1, help="Not a flag.", flag="")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class Outer:
    inner: Inner = option(default_factory=Inner, group="Inner things")
    size_bytes: int = option(512 * 10**6, help="Size.", flag="--size", minimum=10)
    path: str | Path | None = option(None, help="Where.", shown_default="here")
    pairs: Mapping[str, str] = option(default_factory=dict, help="Pairs.", metavar="NAME=COLUMN", flag="--pair")
    fast: bool = option(False, help="Faster.")
    safe: bool = option(True, help="Safer.")
    plain: int = 0

    def __post_init__(self) -> None:
        check_options(self)


def run(*arguments: str) -> Any:
    found: list[Any] = []

    @click.command(cls=GroupedCommand)
    @option_flags(Outer, "options")
    def command(options: Outer) -> None:
        found.append(options)

    result = CliRunner().invoke(command, list(arguments))
    if isinstance(result.exception, ConfigError):
        raise result.exception
    return found[0] if found else result.output


def test_defaults_are_those_of_the_dataclass() -> None:
    assert run() == Outer()


def test_every_kind_of_option() -> None:
    options = run(
        *("--clips", "native", "--rate", "30000/1001", "--counts", "1,33", "--columns", "a,b", "--columns", "c"),
        *("--size", "1GiB", "--path", "p", "--pair", "x=y", "--pair", "z=a=b", "--fast", "--no-safe"),
    )
    inner = Inner("native", Fraction(30000, 1001), (1, 33), ("a,b", "c"))
    assert options == Outer(inner, 2**30, "p", {"x": "y", "z": "a=b"}, True, False)


def test_help_shows_groups_and_defaults() -> None:
    text = run("--help")
    assert "Inner things:" in text and "Options:" in text
    assert "[default: 512MB]" in text and "[default: 1,17]" in text and "[default: here]" in text
    assert "--hidden" not in text and "--plain" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--size", "much"), "'much' is not a size; write it as 512MB"),
        (("--rate", "1/0"), "write it as 24, 0.5 or 30000/1001"),
        (("--counts", "1,x"), "without spaces as 1,17"),
        (("--pair", "x"), "'x' is not of the form NAME=COLUMN"),
        (("--pair", "x=1", "--pair", "x=2"), "'x' is given more than once"),
        (("--clips", "some"), "'some' is not one of"),
    ],
)
def test_wrong_values_name_the_flag(arguments: tuple[str, ...], message: str) -> None:
    text = run(*arguments)
    assert arguments[0] in text and message in text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size_bytes": 9}, "size_bytes=9: must be an integer of at least 10"),
        ({"size_bytes": True}, "size_bytes=True: must be an integer"),
        ({"fast": 1}, "fast=1: must be True or False"),
        ({"inner": {"kind": "some"}}, "kind='some': must be 'copy' or 'native'"),
        ({"inner": {"knid": "copy"}}, "inner has no field 'knid'; did you mean 'kind'?"),
        ({"inner": 3}, "inner is of type int; allowed: Inner or a mapping of its fields"),
    ],
)
def test_wrong_fields_name_what_is_allowed(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Outer(**fields)
    assert message in str(caught.value)
