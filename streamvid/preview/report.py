"""Self-contained HTML pages: a dataset report with a contact sheet per bucket, and the forecast of a run."""

from __future__ import annotations

import base64
from dataclasses import dataclass, fields
from typing import Any

from streamvid.dataset.passes import Progress, no_progress
from streamvid.dataset.reader import Dataset
from streamvid.errors import StreamvidError
from streamvid.forecast.contents import contents_of
from streamvid.forecast.histograms import histograms_of
from streamvid.forecast.run import MetadataFacts, RunForecast
from streamvid.plan.span import BucketReport
from streamvid.preview import charts
from streamvid.preview.browse import Browser, RowQuery
from streamvid.preview.deliver import Deliverer, ViewSettings
from streamvid.preview.options import ReportOptions
from streamvid.preview.render import render, static_file
from streamvid.preview.sample import SampleFacts
from streamvid.video.encode.showing import jpeg

_PICTURE_WIDTH = 224


@dataclass(frozen=True, slots=True)
class SheetPicture:
    """One sample in a contact sheet.

    picture: data URL of the JPEG; None if the sample cannot be decoded.
    problem: reason why there is no picture.
    """

    facts: SampleFacts
    picture: str | None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Sheet:
    """Contact sheet of one bucket."""

    bucket_id: str
    num_samples: int
    pictures: tuple[SheetPicture, ...]


def report_of(dataset: Dataset, options: ReportOptions | None = None, progress: Progress = no_progress) -> str:
    """Return the report as HTML. Raises DatasetError or StorageError if the dataset cannot be read."""
    options, contents = options or ReportOptions(), contents_of(dataset)
    sheets, num_bytes, names = [], 0, list(dict.fromkeys(one.bucket_id for one in contents.buckets))
    browser, deliverer = Browser(dataset), Deliverer(dataset)
    try:
        for done, name in enumerate(names):
            progress("report", done, len(names))
            if num_bytes > options.picture_bytes:
                break
            sheet = _sheet(browser, deliverer, name, options.samples_per_bucket)
            num_bytes += sum(len(one.picture or "") for one in sheet.pictures)
            sheets.append(sheet)
    finally:
        deliverer.close()
    progress("report", len(names), len(names))
    return render(
        "report.html",
        title="Report",
        url=dataset.url,
        style=_style(),
        contents=contents,
        areas=charts.bucket_areas(contents.buckets),
        histograms=histograms_of(dataset),
        bars=charts.bars,
        sheets=sheets,
        num_left_out=len(names) - len(sheets),
    )


def plan_page(plan: RunForecast) -> str:
    """Return a forecast of a run as self-contained HTML."""
    names = [field.name for field in fields(BucketReport)]
    about = plan.about
    return render(
        "plan.html",
        title="Plan",
        url=plan.source,
        style=_style(),
        plan=plan,
        buckets=[[getattr(one, name) for name in names] for one in plan.counts.buckets],
        tails=[
            (
                one.tail,
                one.num_steps,
                one.num_delivered,
                100 * one.share_left_out,
                100 * one.share_repeated,
                one.num_starved_buckets,
            )
            for one in plan.counts.tails
        ],
        shapes=[
            (
                name,
                *(None if share is None else 100 * share for share in (one.crop_mean, one.crop_max)),
                one.upscale_mean,
                100 * one.frames_unused_share,
            )
            for name, one in plan.shapes.items()
        ],
        left_out=[(one.kind, one.num_rows) for one in about.left_out] if isinstance(about, MetadataFacts) else [],
    )


def _style() -> Any:
    from markupsafe import Markup

    return Markup(static_file("style.css").decode())  # noqa: S704 - our own file


def _sheet(browser: Browser, deliverer: Deliverer, bucket_id: str, num_samples: int) -> Sheet:
    query = RowQuery(bucket=bucket_id)
    total = browser.count(query)
    count = min(num_samples, total)
    pictures = []
    for number in range(count):
        (facts,) = browser.page(query, number * total // count, 1).rows
        pictures.append(_picture(deliverer, facts))
    return Sheet(bucket_id, total, tuple(pictures))


def _picture(deliverer: Deliverer, facts: SampleFacts) -> SheetPicture:
    if not facts.values.get("clip_width"):  # text or audio
        return SheetPicture(facts, None)
    try:
        (frame,) = deliverer.poster(facts.place, ViewSettings())
    except StreamvidError as error:
        return SheetPicture(facts, None, str(error))
    data = base64.b64encode(jpeg(frame, _PICTURE_WIDTH)).decode()
    return SheetPicture(facts, f"data:image/jpeg;base64,{data}")
