"""Page content that mkdocs inserts: reference tables derived from the code, and files of the checkout.

A page says where: `<!-- options: streamvid.ViewOptions -->`, `<!-- command: shard -->`, `<!-- errors -->`,
`<!-- presets -->`, `<!-- recipes -->`, `<!-- file: CHANGELOG.md -->`. An unknown name fails the build.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import streamvid
from streamvid import errors
from streamvid.cli.main import cli
from streamvid.config import nested_options, option_info, option_types
from streamvid.recipes.registry import RECIPES

ROOT = Path(__file__).resolve().parent.parent
_PAGE_OF = {"README.md": "index.md", "streamvid/dataset/README.md": "reference/dataset-format.md"}
_PLACEHOLDER = re.compile(
    r"^<!-- (?P<kind>options|command|errors|presets|recipes|file)(?:: (?P<name>\S+(?: \S+)*?))? -->$", re.MULTILINE
)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill the placeholders of a page."""
    return _PLACEHOLDER.sub(lambda match: _FILLERS[match["kind"]](match["name"]), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Remove the backslashes that keep vertical bars from dividing table cells; within code they would be shown."""
    return re.sub(r"<td.*?</td>", lambda cell: cell[0].replace("\\|", "|"), html, flags=re.DOTALL)


def _options(name: str) -> str:
    cls = _named(name)
    types = option_types(cls)
    rows = []
    for field in dataclasses.fields(cls):
        info = option_info(field)
        if info is None:
            continue
        nested = nested_options(types[field.name])
        if nested is not None:
            default = f"see [{nested.__name__}](#{nested.__name__.lower()})"
        else:
            default = info.shown_default or _default_text(field)
        rows.append((f"`{field.name}`", f"`{_type_text(types[field.name])}`", default, info.help))
    return _table(("Option", "Type", "Default", "Meaning"), rows)


def _default_text(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    return "required" if field.default_factory is dataclasses.MISSING else f"`{field.default_factory()!r}`"


def _type_text(members: tuple[Any, ...]) -> str:
    return " | ".join(word for member in members for word in _words(member))


def _words(member: Any) -> list[str]:
    if typing.get_origin(member) is typing.Literal:
        return [repr(word) for word in typing.get_args(member)]
    if member is type(None):
        return ["None"]
    text = member.__name__ if isinstance(member, type) and not typing.get_args(member) else str(member)
    return [re.sub(r"\b(?:\w+\.)+(\w)", r"\1", text)]


def _command(name: str) -> str:
    command: click.Command | None = cli
    for word in name.split():
        command = command.get_command(click.Context(command), word) if isinstance(command, click.Group) else None
    if command is None:
        raise ValueError(f"no command {name!r}")
    ctx = click.Context(command, info_name=f"streamvid {name}")
    parts = [inspect.cleandoc(command.help or ""), "```text\n" + command.get_usage(ctx) + "\n```"]
    groups: dict[str, list[tuple[str, str]]] = {}
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
        if record is not None:
            groups.setdefault(getattr(param, "group", None) or "Options", []).append((f"`{record[0]}`", record[1]))
    for title, rows in groups.items():
        parts += [f"**{title}**", _table(("Flag", "Meaning"), rows)]
    if command.epilog:
        parts.append("```text\n" + inspect.cleandoc(command.epilog.replace("\b", "")) + "\n```")
    return "\n\n".join(parts)


def _errors(_: str | None) -> str:
    rows = []

    def add(cls: type, depth: int) -> None:
        indent = "&nbsp;&nbsp;&nbsp;&nbsp;" * depth
        rows.append((f"{indent}`{cls.__name__}`", (inspect.getdoc(cls) or "").splitlines()[0]))
        for child in cls.__subclasses__():
            if child.__module__ == errors.__name__:
                add(child, depth + 1)

    add(errors.StreamvidError, 0)
    return _table(("Error", "Raised when"), rows)


def _presets(_: str | None) -> str:
    texts = []
    for path in sorted((ROOT / "configs" / "buckets").glob("*.yaml")):
        texts.append(f"### {path.stem}\n\n```yaml\n{path.read_text().rstrip()}\n```")
    return "\n\n".join(texts)


def _recipes(_: str | None) -> str:
    rows = [
        (
            f"`{recipe.name}`",
            recipe.title,
            ", ".join(recipe.kinds),
            ", ".join(f"`{name}`" for name in recipe.presets),
            ", ".join(f"`{name}`" for name in recipe.lora_targets),
            recipe.example,
        )
        for recipe in RECIPES.values()
    ]
    return _table(("`--recipe`", "Models", "Trains", "`--preset`", "Layers with adapters", "Such as"), rows)


def _file(name: str) -> str:
    """Return a Markdown file of the checkout; links to files that are not pages of the site become names."""

    def relinked(match: re.Match[str]) -> str:
        path = (Path(name).parent / match["path"]).as_posix()
        page = _PAGE_OF.get(path)
        return f"[{match['text']}]({page})" if page else f"{match['text']} (`{path}`)"

    return re.sub(r"\[(?P<text>[^\]]*)\]\((?P<path>(?![a-z]+:|#)[^)]*)\)", relinked, (ROOT / name).read_text())


def _named(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(streamvid if module == "streamvid" else importlib.import_module(module), attribute)


def _table(headers: tuple[str, ...], rows: list[Any]) -> str:
    lines = [headers, ("---",) * len(headers), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


_FILLERS: dict[str, Callable[[typing.Any], str]] = {
    "options": _options,
    "command": _command,
    "errors": _errors,
    "presets": _presets,
    "recipes": _recipes,
    "file": _file,
}
