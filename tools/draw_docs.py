"""Draws the pictures in README.md and docs/: the data flow, the tails, the ring and the shuffles.

    python -m tools.draw_docs [--out docs/content/pictures] [--check]         (from the checkout's root)

The pictures of the tails and the shuffles show plans that this script makes. The figures of the shuffles are results of
`python -m tools.bench_plan`. The output depends on nothing else. --check writes nothing, and exits with status 1 if a
file differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import get_args

from streamvid.plan import Cursor, EpochPlan, PlanOptions, Step
from streamvid.plan.options import Shuffle
from streamvid.plan.tail import Tail

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "content" / "pictures"

# Every picture has a light panel of its own, so that it reads the same on light and on dark pages.
PANEL, INK, SOFT, LINE = "#f8fafc", "#1e293b", "#475569", "#94a3b8"
BLUE, BLUE_FILL = "#1d4ed8", "#dbeafe"
GREEN, GREEN_FILL = "#047857", "#d1fae5"
AMBER, AMBER_FILL = "#b45309", "#fef3c7"
VIOLET, VIOLET_FILL = "#6d28d9", "#ede9fe"
ROSE, ROSE_FILL = "#be123c", "#ffe4e6"
WHITE = "#ffffff"


@dataclass
class Picture:
    """An SVG of fixed size, drawn from top to bottom."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str = LINE, *, dashed: bool = False
    ) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" stroke="{stroke}"'
            f"{dash}/>"
        )

    def text(
        self, x: float, y: float, words: str, *, size: int = 13, color: str = INK, anchor: str = "start",
        bold: bool = False,
    ) -> None:  # fmt: skip
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{anchor}"{weight}>'
            f"{escape(words, quote=False)}</text>"
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{SOFT}" stroke-width="1.5" '
            'marker-end="url(#tip)"/>'
        )

    def dots(self, places: Iterable[tuple[float, float]], size: float, fill: str) -> None:
        path = "".join(f"M{x:g} {y:g}h0" for x, y in places)
        self.parts.append(f'<path d="{path}" stroke="{fill}" stroke-width="{size:g}" stroke-linecap="round"/>')

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" role="img" font-family="system-ui, sans-serif">\n'
            f"<title>{escape(self.title, quote=False)}</title>\n"
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{SOFT}"/></marker></defs>\n'
            f'<rect width="{self.width}" height="{self.height}" rx="10" fill="{PANEL}"/>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"


def data_flow() -> Picture:
    """Draw what happens once offline, and what happens at every online step."""
    picture = Picture(960, 388, "Data flow: offline from videos to shards, online from shards to batches on the GPU")
    picture.text(24, 34, "Offline, once: streamvid shard", bold=True, size=15)
    offline = (
        ("records", "videos, captions", "and columns"),
        ("probe", "size, frames, rate,", "damage"),
        ("assign", "to a bucket, or to", "the rejections"),
        ("shards", "tars, each of", "one bucket"),
    )
    _chain(picture, offline, 24, 50, 198, BLUE_FILL, BLUE)
    picture.box(24, 154, 912, 62, GREEN_FILL, GREEN)
    picture.text(40, 180, "Sealed dataset, on a disk or in an object store", bold=True)
    picture.text(40, 201, "manifest.json · Parquet index · packet index · shards/BUCKET/*.tar", size=12, color=SOFT)
    picture.text(920, 191, "plain tars: other readers can use them too", size=12, color=SOFT, anchor="end")
    picture.arrow(837, 122, 837, 150)
    picture.text(76, 250, "Online, at every step: streamvid.VideoLoader", bold=True, size=15)
    online = (
        ("plan", "step → bucket,", "rank → samples"),
        ("fetch", "ranged reads of", "the packets needed"),
        ("decode", "worker processes,", "checksums verified"),
        ("ring", "frames in shared,", "pinned memory"),
        ("batch", "one shape, the same", "bucket on all ranks"),
        ("GPU", "copied ahead,", "uint8 or yuv420p"),
    )
    picture.arrow(56, 220, 56, 262)
    _chain(picture, online, 24, 266, 132, VIOLET_FILL, VIOLET)
    state = "The position of a run is one number per bucket: resume with any number of workers or ranks."
    picture.text(24, 366, state, size=12, color=SOFT)
    return picture


def _chain(
    picture: Picture, steps: Sequence[tuple[str, str, str]], left: float, top: float, width: float, fill: str, ink: str
) -> None:
    gap = (912 - width * len(steps)) / (len(steps) - 1)
    for number, (name, first, second) in enumerate(steps):
        x = left + number * (width + gap)
        picture.box(x, top, width, 72, fill, ink)
        picture.text(x + width / 2, top + 24, name, bold=True, color=ink, anchor="middle", size=14)
        picture.text(x + width / 2, top + 44, first, size=12, anchor="middle")
        picture.text(x + width / 2, top + 60, second, size=12, anchor="middle")
        if number:
            picture.arrow(x - gap + 2, top + 36, x - 3, top + 36)


#: What the picture of the tails shows: one bucket of 15 samples, two ranks with batches of 3.
TAIL_SAMPLES, TAIL_RANKS, TAIL_BATCH = 15, 2, 3
STEP_WIDTH, CELL_WIDTH = 112, 34
TAIL_TEXTS: dict[Tail, tuple[str, str]] = {
    "carry": ("the next epoch opens", "with the remainder"),
    "drop": ("the remainder is", "left out"),
    "pad": ("repeats fill the", "last step"),
    "shrink": ("one smaller step,", "equal on all ranks"),
    "uneven": ("one smaller step,", "no repeats"),
}


def tails() -> Picture:
    """Draw, for every tail policy, the steps that a plan makes from the last samples of a bucket."""
    policies = get_args(Tail)
    picture = Picture(960, 104 + 92 * len(policies), "What each tail makes of the last samples of a bucket")
    about = f"One bucket of {TAIL_SAMPLES} samples, {TAIL_RANKS} ranks, batch size {TAIL_BATCH}: "
    about += f"a step takes {TAIL_RANKS * TAIL_BATCH}."
    picture.text(24, 34, about, bold=True, size=15)
    picture.text(200, 62, "epoch 0", color=SOFT, size=12)
    picture.text(600, 62, "epoch 1", color=SOFT, size=12)
    for row, tail in enumerate(policies):
        top = 76 + 92 * row
        picture.text(24, top + 26, f'tail="{tail}"', bold=True)
        for line, words in enumerate(TAIL_TEXTS[tail]):
            picture.text(24, top + 45 + 16 * line, words, size=12, color=SOFT)
        options = PlanOptions(tail=tail, shuffle="none", shard_locality=1)
        plan = EpochPlan({"b": [TAIL_SAMPLES]}, {"b": TAIL_BATCH}, options, TAIL_RANKS)
        first = plan.steps(0, plan.num_steps)
        left_over = sum(report.num_carried + report.num_dropped for report in plan.report())
        _steps(picture, first, 200, top)
        if left_over:
            _left_over(picture, 200 + STEP_WIDTH * len(first), top, left_over, carried=tail == "carry")
        following = plan.at(plan.next_epoch())
        _steps(picture, following.steps(0, following.num_steps), 600, top)
    bottom = picture.height - 14
    legend = ((BLUE_FILL, BLUE, "sample of epoch 0"), (GREEN_FILL, GREEN, "sample of epoch 1"))
    extra = ((AMBER_FILL, AMBER, "marked repeat"), (WHITE, LINE, "not delivered in this epoch"))
    for number, (fill, ink, words) in enumerate((*legend, *extra)):
        picture.box(200 + 180 * number, bottom - 12, 14, 14, fill, ink)
        picture.text(220 + 180 * number, bottom, words, size=12, color=SOFT)
    return picture


def _steps(picture: Picture, steps: Iterable[Step], left: float, top: float) -> None:
    for number, step in enumerate(steps):
        x = left + STEP_WIDTH * number
        picture.box(x, top + 6, STEP_WIDTH - 6, 72, WHITE)
        for rank in range(TAIL_RANKS):
            part = step.for_rank(rank)
            for place in range(TAIL_BATCH):
                box = (x + 4 + CELL_WIDTH * place, top + 12 + 32 * rank, CELL_WIDTH - 4, 26)
                if place >= len(part.indices):
                    continue
                fill, ink = (GREEN_FILL, GREEN) if part.visits[place] > 0 else (BLUE_FILL, BLUE)
                if part.is_repeat[place]:
                    fill, ink = AMBER_FILL, AMBER
                picture.box(*box, fill, ink)
                label = str(int(part.indices[place]) + 1)
                picture.text(box[0] + 15, box[1] + 18, label, anchor="middle", color=ink, bold=True)


def _left_over(picture: Picture, left: float, top: float, count: int, *, carried: bool) -> None:
    for number in range(count):
        x, y = left + 4 + CELL_WIDTH * (number % TAIL_BATCH), top + 12 + 32 * (number // TAIL_BATCH)
        picture.box(x, y, CELL_WIDTH - 4, 26, WHITE, LINE, dashed=True)
        picture.text(x + 15, y + 18, str(TAIL_SAMPLES - count + number + 1), anchor="middle", color=SOFT)
    if carried:
        picture.arrow(left + STEP_WIDTH, top + 25, 594, top + 25)


def ring() -> Picture:
    """Draw the shared memory of a loader: compressed clips, and batches from three buckets in one arena."""
    picture = Picture(960, 330, "Shared memory of a loader: clips that were read, and the ring of batches")
    picture.text(24, 34, "Shared memory of one rank: loader.ring_bytes", bold=True, size=15)
    picture.text(24, 66, "Clips read ahead", bold=True)
    picture.text(24, 84, "compressed bytes, an eighth of the ring or the two largest clips", size=12, color=SOFT)
    x = 24.0
    for width in (46, 30, 64, 22, 40, 52, 28, 36):
        picture.box(x, 94, width, 30, AMBER_FILL, AMBER)
        x += width + 4
    picture.box(x, 94, 936 - x, 30, WHITE, dashed=True)
    picture.text((x + 936) / 2, 114, "free", size=12, color=SOFT, anchor="middle")
    picture.text(24, 166, "Ring of batches", bold=True)
    sized = "decoded frames, room for the three largest batches or prefetch_bytes, whichever is more"
    picture.text(24, 184, sized, size=12, color=SOFT)
    x = 24.0
    batches = (
        (264, "256px-33f-16x9", "caller", VIOLET_FILL, VIOLET),
        (120, "256px-17f-1x1", "ready", GREEN_FILL, GREEN),
        (36, "1f", "", GREEN_FILL, GREEN),
        (264, "256px-33f-16x9", "being decoded", BLUE_FILL, BLUE),
        (120, "256px-17f-1x1", "decoding", BLUE_FILL, BLUE),
    )
    for width, bucket, words, fill, ink in batches:
        picture.box(x, 194, width, 62, fill, ink)
        picture.text(x + width / 2, 220, bucket, size=12, color=ink, bold=True, anchor="middle")
        picture.text(x + width / 2, 240, words, size=12, color=ink, anchor="middle")
        x += width + 4
    picture.box(x, 194, 936 - x, 62, WHITE, dashed=True)
    picture.text((x + 936) / 2, 229, "free", size=12, color=SOFT, anchor="middle")
    first = "A batch takes exactly the bytes of its bucket. Workers write frames straight to their place."
    second = "A place is free again when the last tensor over it dies. A full ring waits; nothing is overwritten."
    picture.text(24, 290, first, size=13)
    picture.text(24, 310, second, size=13)
    return picture


@dataclass(frozen=True)
class ShuffleRow:
    """Results of tools/bench_plan.py for 2 million samples, 20,000 shards, 60 buckets, 64 ranks and batch size 4."""

    label: str
    shuffle: Shuffle
    window: int
    neighbors_kept: float
    shards_per_batch: float


SHUFFLES = (
    ShuffleRow('"none"', "none", 1, 1.00, 1.03),
    ShuffleRow('"shards"', "shards", 1, 0.99, 1.03),
    ShuffleRow('"window", 4', "window", 4, 0.84, 1.16),
    ShuffleRow('"window", 16', "window", 16, 0.30, 1.66),
    ShuffleRow('"window", 64', "window", 64, 0.09, 2.79),
)
SHUFFLE_SHARDS, SHUFFLE_SAMPLES = 64, 6


def shuffle() -> Picture:
    """Draw the new places of a small bucket's samples, and what each shuffle keeps together and reads."""
    picture = Picture(960, 372, "Shuffles: where samples go, which neighbors stay together, and what a batch reads")
    picture.text(24, 34, "From stored place (left to right) to place in the epoch (top to bottom)", bold=True, size=15)
    small = f"{SHUFFLE_SHARDS} shards of {SHUFFLE_SAMPLES} samples, seed 0; each dot is a sample"
    picture.text(24, 54, small, size=12, color=SOFT)
    side, gap = 168.0, 18.0
    for number, row in enumerate(SHUFFLES):
        left = 24 + number * (side + gap)
        picture.box(left, 68, side, side, WHITE)
        stored = _stored_places(row)
        scale = (side - 8) / len(stored)
        places = [(round(left + 4 + old * scale, 1), round(72 + new * scale, 1)) for new, old in enumerate(stored)]
        picture.dots(places, 2.6, BLUE)
        picture.text(left + side / 2, 256, row.label, bold=True, anchor="middle")
        _bar(picture, left, 272, side, row.neighbors_kept, f"neighbors kept: {row.neighbors_kept:.2f}", ROSE)
        words = f"shards per batch: {row.shards_per_batch:.2f}"
        _bar(picture, left, 316, side, row.shards_per_batch / 4, words, GREEN)
    return picture


def _stored_places(row: ShuffleRow) -> list[int]:
    options = PlanOptions(shuffle=row.shuffle, window=row.window, tail="drop", shard_locality=1)
    plan = EpochPlan({"b": [SHUFFLE_SAMPLES] * SHUFFLE_SHARDS}, {"b": 1}, options, 1, Cursor())
    steps = plan.steps(0, plan.num_steps)
    return [int(step.shards[0]) * SHUFFLE_SAMPLES + int(step.indices[0]) for step in steps]


def _bar(picture: Picture, left: float, top: float, width: float, share: float, words: str, ink: str) -> None:
    picture.box(left, top, width, 8, WHITE)
    picture.box(left, top, max(2.0, round(width * share, 1)), 8, ink, ink)
    picture.text(left, top + 24, words, size=12, color=SOFT)


def badge(left: str, right: str) -> Callable[[], Picture]:
    """Return a badge with two words, as READMEs show it."""

    def draw() -> Picture:
        widths = [round(10 + 6.6 * len(words)) for words in (left, right)]
        picture = Picture(sum(widths), 20, f"{left}: {right}")
        picture.parts.append(f'<rect width="{widths[0]}" height="20" rx="3" fill="{SOFT}"/>')
        picture.parts.append(f'<rect x="{widths[0]}" width="{widths[1]}" height="20" rx="3" fill="{BLUE}"/>')
        picture.text(widths[0] / 2, 14, left, size=11, color=WHITE, anchor="middle")
        picture.text(widths[0] + widths[1] / 2, 14, right, size=11, color=WHITE, anchor="middle")
        return picture

    return draw


PICTURES: dict[str, Callable[[], Picture]] = {
    "data-flow.svg": data_flow,
    "tails.svg": tails,
    "ring.svg": ring,
    "shuffle.svg": shuffle,
    "badge-license.svg": badge("license", "Apache-2.0"),
    "badge-python.svg": badge("python", "3.11 or newer"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER, help="Output folder.")
    parser.add_argument("--check", action="store_true", help="Write nothing, and exit with status 1 if a file differs.")
    options = parser.parse_args()
    differing = []
    for name, draw in PICTURES.items():
        path, text = options.out / name, draw().svg()
        if not path.is_file() or path.read_text() != text:
            differing.append(name)
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    print(f"{len(PICTURES)} pictures, {len(differing)} {'differ' if options.check else 'new'}: {', '.join(differing)}")
    return 1 if options.check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
