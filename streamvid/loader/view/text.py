"""The text of a delivery: which of a sample's captions, in which template, or none (SAMPLE-1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from streamvid.config import check_options, option
from streamvid.dataset.captions import captions_from_json
from streamvid.dataset.reader import Dataset
from streamvid.errors import ConfigError, IntegrityError
from streamvid.loader.view.sampling import CAPTION, CAPTION_COLUMN, CAPTION_DROPOUT, CAPTION_PART
from streamvid.loader.view.template import Field, Part, parse_template
from streamvid.plan.hashing import hash_text, uniform

CaptionChoice: TypeAlias = Literal["draw", "first"]

_CAPTIONS = "captions"  # all captions of a sample, of which `text` is the first
_TEXT, _FPS = "text", "fps"  # in a template: the caption, and the rate of the frames that are delivered


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Text that is delivered with a sample."""

    column: str | Mapping[str, float] = option(
        "text",
        help="Column that `batch.text` comes from; or several with weights, {'short': 1, 'long': 3}, of which one that "
        "the sample has is drawn for each delivery.",
    )
    choice: CaptionChoice = option(
        "draw", help="Draw one of several captions of a sample by weight, or take the first."
    )
    template: str | None = option(
        None,
        help="Text over columns, '{text} {fps:.0f} FPS{?, {motion:.0f} motion score.}'. {fps} is the rate of the "
        "delivered frames, :d rounds down. A part {? ...} is left out if it names a missing value.",
    )
    prefix: str = option("", help="Text before the caption.")
    dropout: float = option(0.0, help="Probability that a delivery has an empty text.", minimum=0.0, maximum=1.0)
    part_dropout: float = option(
        0.0, help="Probability that a part {? ...} of the template is left out.", minimum=0.0, maximum=1.0
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.template is not None:
            parse_template(self.template)
        elif self.part_dropout:
            raise ConfigError(f"part_dropout={self.part_dropout!r}: needs a template with parts {{? ...}}")
        if not self.weights or not all(_is_weight(weight) for weight in self.weights.values()):
            raise ConfigError(
                f"column={self.column!r}: must be a column, or columns with weights above 0, such as "
                "{'short': 1, 'long': 3}"
            )

    @property
    def weights(self) -> Mapping[str, float]:
        """How often each column is taken, by its name."""
        if isinstance(self.column, Mapping):
            return {name: weight for name, weight in self.column.items() if isinstance(name, str)}
        return {self.column: 1.0} if isinstance(self.column, str) else {}


@dataclass(frozen=True)
class TextRule:
    """The texts of one dataset's deliveries.

    columns: index columns of captions with their weights. captions: whether the dataset has samples with several.
    template: None for none; template_columns: its names → index columns, but for the two that are no columns.
    """

    options: TextOptions = field(default_factory=TextOptions)
    columns: tuple[tuple[str, float], ...] = ((_TEXT, 1.0),)
    captions: bool = False
    template: Part | None = None
    template_columns: tuple[tuple[str, str], ...] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """The index columns that `text` reads, besides "key" and "fps"."""
        names = [name for name, _ in self.columns] + [name for _, name in self.template_columns]
        return tuple(dict.fromkeys(names + ([_CAPTIONS] if self.captions else [])))

    def text(self, row: Mapping[str, Any], *, seed: int, visit: int, dropout_visit: int | None = None) -> str:
        """What a delivery has as its text.

        row: an index row with "key", `needed` and the "fps" of what is delivered. dropout_visit: what dropout is drawn
        by, where not by `visit`, as what is said of a visit was encoded once. Raises IntegrityError.
        """
        options, draw = self.options, (hash_text(row["key"]), visit)
        dropped_by = (draw[0], visit if dropout_visit is None else dropout_visit)
        if options.dropout > 0.0 and uniform(seed, CAPTION_DROPOUT, *dropped_by) < options.dropout:
            return ""
        caption = self._caption(row, seed, draw)
        if self.template is not None:
            values = {field: row[column] for field, column in self.template_columns}
            values |= {_TEXT: caption, _FPS: row["fps"] or None}
            written = self.template.written(values, lambda part: self._is_kept(part, seed, draw))
            caption = caption if written is None else written
        return options.prefix + caption

    def _caption(self, row: Mapping[str, Any], seed: int, draw: tuple[int, int]) -> str:
        there = [(column, weight) for column, weight in self.columns if row[column]]
        if not there:
            return ""
        column = there[0][0]
        if len(there) > 1 and self.options.choice == "draw":
            column = _drawn(there, uniform(seed, CAPTION_COLUMN, *draw))
        if column != _TEXT or not self.captions or row[_CAPTIONS] is None or self.options.choice == "first":
            return str(row[column])
        try:
            captions = captions_from_json(row[_CAPTIONS])
        except ValueError as error:
            raise IntegrityError(f"the index's captions cannot be read: {error}; copy the dataset again") from error
        return _drawn(captions, uniform(seed, CAPTION, *draw))

    def _is_kept(self, part: int, seed: int, draw: tuple[int, int]) -> bool:
        share = self.options.part_dropout
        return share == 0.0 or uniform(seed, CAPTION_PART, *draw, part) >= share


def text_rule(options: TextOptions, dataset: Dataset) -> TextRule:
    """What the options mean for a dataset. Raises ConfigError for columns that it does not have, or of another type."""
    columns = []
    for name, weight in options.weights.items():
        # A column of the user's by that name, beside the one that was given for captions, is `user.text`.
        column = _TEXT if name == _TEXT else dataset.column(name, "captions.column")
        if not _is_text(dataset, column):
            raise ConfigError(
                f"captions.column: {name!r} of {dataset.url} holds {_kind(dataset, column)}, not text"
                f"{_nearest(dataset)}; numbers come in by a template: captions.template='{{{name}}}'"
            )
        columns.append((column, float(weight)))
    captions = any(column == _TEXT for column, _ in columns)
    template = None if options.template is None else parse_template(options.template)
    found = {} if template is None else _template_columns(template, dataset)
    return TextRule(options, tuple(columns), captions, template, tuple(found.items()))


def _template_columns(template: Part, dataset: Dataset) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in template.fields():
        if one.name == _TEXT:
            _check_format(one, False, "a text")
        elif one.name != _FPS:
            column = dataset.column(one.name, "captions.template")
            is_text, kind = _is_text(dataset, column), _kind(dataset, column)
            if not is_text and not dataset.is_numeric(column):
                raise ConfigError(f"captions.template: {one.name!r} holds {kind}; texts and numbers can be written")
            _check_format(one, not is_text, kind)
            found[one.name] = column
    return found


def _check_format(one: Field, is_number: bool, kind: str) -> None:
    if one.format and not is_number:
        raise ConfigError(
            f"captions.template: {{{one.name}:{one.format}}} writes a number, and {one.name!r} is {kind}; "
            f"write {{{one.name}}}"
        )


def _is_text(dataset: Dataset, column: str) -> bool:
    return _kind(dataset, column) in ("string", "large_string")


def _kind(dataset: Dataset, column: str) -> str:
    return str(dataset.samples_schema.field(column).type)


def _nearest(dataset: Dataset) -> str:
    texts = [name for name in dataset.user_columns if _is_text(dataset, dataset.column(name))]
    return f"; texts are in {', '.join([_TEXT, *texts[:8]])}"


def _is_weight(weight: object) -> bool:
    return not isinstance(weight, bool) and isinstance(weight, int | float) and 0 < weight <= 1e12


def _drawn(options: Sequence[tuple[str, float]], share: float) -> str:
    """The one within whose part of all weights, laid end to end, `share` lies; share is in [0, 1)."""
    there = [(text, weight) for text, weight in options if weight > 0]
    place, end = share * sum(weight for _, weight in there), 0.0
    for text, weight in there:
        end += weight
        if place < end:
            return text
    return there[-1][0]  # where rounding has left nothing
