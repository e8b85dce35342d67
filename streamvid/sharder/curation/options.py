"""Options of curation. Each stage is off by default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from streamvid.config import check_options, option
from streamvid.errors import ConfigError

Score: TypeAlias = Literal["motion", "blur"]
SCORES: tuple[Score, ...] = get_args(Score)
BARS = "bars"
"""Name of the figure that measures black bars; see bars.py."""
BAR_COLUMNS = ("bar_left", "bar_top", "bar_right", "bar_bottom")
Dedup: TypeAlias = Literal["mark", "keep-largest"]
SIGNATURE, GROUP = "signature", "duplicate_group"
"""Figure for finding near-duplicates, and the column that holds the group of each near-duplicate."""
CURATION_VERSION = 1
"""Version of the definitions in this folder, which determine a dataset's content. It changes whenever they change."""


@dataclass(frozen=True, slots=True)
class AddedColumn:
    """Column that curation adds. kind: type of the column in the index. option: name of the option that adds it."""

    name: str
    kind: str
    option: str


@dataclass(frozen=True)
class CurationOptions:
    """Options for measuring the pictures of each file before buckets are assigned. Each file is decoded once.

    scores: figures to compute and to store as columns, for `where` and for the loader. "motion" is the mean change in
        luma within 1/8 second, in levels from 0 to 255. "blur" is the share of the differences between neighboring
        pixels that remains after a blur filter, from 0 (sharp) to 1 (blurred). `docs/content/guides/curation.md`
        describes both.
    scene_cuts: True to divide each video, or each of its time ranges, into scenes at hard cuts. Each scene becomes a
        clip, as if the metadata listed the scenes as time ranges.
    black_bars: True to find borders that stay black in all frames, and to store their sizes in the columns bar_left,
        bar_top, bar_right and bar_bottom, in pixels of the displayed frame. Native clips are cropped accordingly before
        a bucket is assigned; copies keep their bars.
    dedup: "mark" stores the group of each near-duplicate in the duplicate_group column. "keep-largest" also rejects all
        rows of a group except the one with the most pixels. If several rows have the same number of pixels, the longest
        is kept; remaining ties go to the row with the most bytes, then to the first row.
    """

    scores: tuple[str, ...] = option((), help="Scores to compute and store as columns: motion, blur.", metavar="LIST")

    scene_cuts: bool = option(False, help="Divide videos into clips at hard cuts.")
    black_bars: bool = option(False, help="Find constant black borders, and crop them from native clips.")
    dedup: Dedup | None = option(
        None,
        help='Store groups of near-duplicates in the duplicate_group column; "keep-largest" also drops smaller copies.',
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name in self.scores:
            if name not in SCORES:
                raise ConfigError(
                    f"scores={list(self.scores)}: {name!r} is not a valid score; use {' or '.join(SCORES)}"
                )
        if len(set(self.scores)) < len(self.scores):
            raise ConfigError(f"scores={list(self.scores)} contains duplicates; list each score only once")

    @property
    def is_on(self) -> bool:
        """True if files must be decoded before buckets are assigned."""
        return bool(self.figures) or self.scene_cuts

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of the figures to compute, in a fixed order; see FIGURES in figures.py."""
        bars = [BARS] if self.black_bars else []
        return (*self._scores, *bars, *([] if self.dedup is None else [SIGNATURE]))

    @property
    def columns(self) -> tuple[AddedColumn, ...]:
        """Columns that curation adds."""
        scores = [AddedColumn(name, "double", "scores") for name in self._scores]
        bars = [AddedColumn(name, "int64", "black_bars") for name in BAR_COLUMNS if self.black_bars]
        groups = [] if self.dedup is None else [AddedColumn(GROUP, "string", "dedup")]
        return (*scores, *bars, *groups)

    @property
    def _scores(self) -> tuple[str, ...]:
        return tuple(score for score in SCORES if score in self.scores)

    @property
    def findings(self) -> dict[str, Any]:
        """Settings that determine the figures and the scenes that curation finds."""
        return {"version": CURATION_VERSION, "figures": list(self.figures), "scene_cuts": self.scene_cuts}

    def to_json(self) -> dict[str, Any]:
        """Return everything that determines the result of curation."""
        return self.findings if self.dedup is None else {**self.findings, "dedup": self.dedup}
