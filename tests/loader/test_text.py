"""Tests of the texts of batches: the choice of captions, templates, tokens, and datasets that contain only texts."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import streamvid
from streamvid.buckets.bucket import parse_buckets
from streamvid.errors import ConfigError, LoaderError
from streamvid.loader.view.text import parse_template
from tests.clips import encode, frames_of
from tests.loader.conftest import SMALL, build_dataset, in_legs, new_slots
from tests.shard_options import shard_options

DatasetConfig, World = streamvid.DatasetConfig, streamvid.World
STANDARD_DEVIATIONS = 4.9  # two-sided, alpha = 1e-6
NUM_PROMPTS = 60


def prompts() -> Iterator[dict[str, Any]]:
    """Yield rows with weighted captions, two more columns of which one or both are missing, and numbers."""
    for i in range(NUM_PROMPTS):
        yield {
            "caption": [{"text": f"{i} one", "weight": 3}, {"text": f"{i} two"}, {"text": f"{i} none", "weight": 0}],
            "short": f"{i} short" if i % 3 else None, "long": f"{i} long" if i % 2 else "",
            "aes": 5.5 if i % 4 else None, "motion": 10.0, "year": 2000 + i, "camera": "pan left", "is_new": i % 2 == 0,
        }  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dataset of texts, which costs a loader almost nothing."""
    root = tmp_path_factory.mktemp("texts")
    (root / "p.jsonl").write_text("\n".join(map(json.dumps, prompts())))
    streamvid.shard(root / "p.jsonl", root / "ds", shard_options(clips="text", shard_size_bytes=40_000))
    return root / "ds"


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dataset of a still and of clips at 30 fps, which are capped at 24 fps and therefore read at 15.

    Some have no score.
    """
    root = tmp_path_factory.mktemp("scored")
    frames = frames_of("bikes", 96, 64, 30)
    (root / "a.mp4").write_bytes(encode(frames, fps=30))
    (root / "b.mp4").write_bytes(encode(frames[4:26], fps=30))
    still = encode(frames[:1], codec="mjpeg", container="image2pipe", options={"strict": "-1"})
    (root / "c.jpg").write_bytes(still)
    rows = [
        {"path": "a.mp4", "caption": "a street", "aes": 5.5, "motion": 10.0, "score": 3.6, "camera": "pan left"},
        {"path": "b.mp4", "caption": "a lane", "aes": None, "motion": 2.0, "score": None, "camera": None},
        {"path": "c.jpg", "caption": "a still", "aes": 4.25, "motion": None, "score": 4.4, "camera": None},
    ]
    (root / "metadata.json").write_text(json.dumps(rows))
    options = shard_options(buckets=parse_buckets("96x64@9,96x64@1"), fps=24, fps_rule="cap", workers=1)
    streamvid.shard(root, root / "ds", options)
    return root / "ds"


def loader_of(dataset: Any, rank: int = 0, num_ranks: int = 1, **options: Any) -> streamvid.VideoLoader:
    given_options = {"batch_size": 4, "num_workers": 0, "tail": "shrink", **options}
    return streamvid.VideoLoader(dataset, world=World(rank, num_ranks), **given_options)


def delivered(dataset: Any, num_ranks: int = 1, **options: Any) -> dict[tuple[int, str], str]:
    """Return the text of each (epoch, key) over all ranks and epochs, without repeats."""
    found: dict[tuple[int, str], str] = {}
    for rank in range(num_ranks):
        with loader_of(dataset, rank, num_ranks, **options) as loader:
            for batch in loader:
                for slot in new_slots(batch):
                    text = batch.text[slot]
                    assert found.setdefault((loader.epoch, batch.sample_keys[slot]), text) == text
    return found


def column(dataset: Any, name: str) -> dict[str, Any]:
    """Return the values of an index column, by key."""
    table = streamvid.open_dataset(dataset).samples_table()
    return dict(zip(table.column("key").to_pylist(), table.column(name).to_pylist(), strict=True))


def assert_share(hits: int, total: int, share: float) -> None:
    assert abs(hits - total * share) <= STANDARD_DEVIATIONS * math.sqrt(total * share * (1 - share)), (hits, total)


ALL_DRAWS = {
    "captions": {
        "column": {"text": 2, "short": 1, "long": 1},
        "dropout": 0.2,
        "part_dropout": 0.3,
        "template": "{text}{? A {aes:.1f}}{? M {motion:.0f}}",
        "prefix": "sks ",
    }
}


def test_a_text_depends_only_on_seed_key_and_visit(texts: Path) -> None:
    """SAMPLE-1: columns, captions, parts and drops depend on the epoch, but not on ranks, batch sizes or shuffles."""
    config = DatasetConfig(texts, **ALL_DRAWS)
    first = delivered(config, num_epochs=3)
    assert len(first) == 3 * NUM_PROMPTS
    assert delivered(config, num_ranks=3, num_epochs=3, batch_size=7) == first
    assert delivered(config, num_epochs=3, batch_size=1, shuffle="none", schedule={"order": "largest-first"}) == first
    assert delivered(config, num_epochs=3, seed=1) != first
    by_epoch = [{key: text for (epoch, key), text in first.items() if epoch == number} for number in range(3)]
    assert all(a != b for a, b in itertools.combinations(by_epoch, 2))


def test_texts_continue_after_a_resume_with_other_ranks(texts: Path) -> None:
    """SAMPLE-1, PLAN-5: a run over texts that is stopped twice delivers the same texts as an uninterrupted run."""
    config = DatasetConfig(texts, **ALL_DRAWS)
    seen: dict[tuple[int, str], str] = {}
    for loader, batch in in_legs(config, [(1, 4, 5), (3, 4, 4), (2, 4, 10**6)], num_epochs=2, tail="shrink"):
        for slot in new_slots(batch):
            assert (loader.epoch, batch.sample_keys[slot]) not in seen
            seen[loader.epoch, batch.sample_keys[slot]] = batch.text[slot]
    assert seen == delivered(config, num_epochs=2)


def test_texts_of_clips_are_the_same_with_workers(scored: Path) -> None:
    """SAMPLE-1: neither workers nor decode=False change the texts of clips."""
    config = DatasetConfig(scored, captions={"template": "{text}{? {fps:d}}", "part_dropout": 0.5, "dropout": 0.3})
    first = delivered(config, num_epochs=6, batch_size=1)
    assert len(set(first.values())) > 4
    assert delivered(config, num_epochs=6, batch_size=1, num_workers=2) == first
    assert delivered(config, num_epochs=6, batch_size=1, output={"decode": False}) == first


def test_captions_are_drawn_by_their_weights(texts: Path) -> None:
    """Frequencies are tested at alpha = 1e-6. Weight 0 is never drawn, and "first" takes the first caption."""
    found = delivered(texts, num_epochs=50, batch_size=20)
    kinds = Counter(text.split()[1] for text in found.values())
    assert set(kinds) == {"one", "two"} and sum(kinds.values()) == 50 * NUM_PROMPTS
    assert_share(kinds["one"], 50 * NUM_PROMPTS, 0.75)
    by_key: dict[str, set[str]] = defaultdict(set)
    for (_, key), text in found.items():
        by_key[key].add(text)
    assert all(len({text.split()[0] for text in several}) == 1 for several in by_key.values())
    first = delivered(DatasetConfig(texts, captions={"choice": "first"}), num_epochs=2)
    assert {text.split()[1] for text in first.values()} == {"one"}


def test_columns_are_drawn_by_the_weights_of_available_columns(texts: Path) -> None:
    """Frequencies are tested at alpha = 1e-6. A sample without one column uses the weights of the others."""
    config = DatasetConfig(texts, captions={"column": {"short": 1, "long": 3}})
    counts: dict[tuple[bool, bool], Counter[str]] = defaultdict(Counter)
    shorts, longs = column(texts, "user.short"), column(texts, "user.long")
    for (_, key), text in delivered(config, num_epochs=50, batch_size=20).items():
        counts[bool(shorts[key]), bool(longs[key])][text.partition(" ")[2]] += 1
    assert set(counts[False, False]) == {""} and set(counts[True, False]) == {"short"}
    assert set(counts[False, True]) == {"long"} and set(counts[True, True]) == {"short", "long"}
    both = counts[True, True]
    assert_share(both["long"], sum(both.values()), 0.75)
    first = delivered(DatasetConfig(texts, captions={"column": {"long": 3, "short": 1}, "choice": "first"}))
    assert all(text == (longs[key] or shorts[key] or "") for (_, key), text in first.items())


def test_parts_and_texts_are_dropped_as_often_as_requested(texts: Path) -> None:
    """Frequencies are tested at alpha = 1e-6. Each part is dropped independently."""
    config = DatasetConfig(
        texts, captions={"template": "t{? {motion:.0f}}{? {camera}}", "dropout": 0.1, "part_dropout": 0.3}
    )
    kinds = Counter(delivered(config, num_epochs=50, batch_size=20).values())
    total = 50 * NUM_PROMPTS
    assert set(kinds) == {"", "t", "t 10", "t pan left", "t 10 pan left"}
    shares = {"": 0.1, "t": 0.9 * 0.09, "t 10": 0.9 * 0.21, "t pan left": 0.9 * 0.21, "t 10 pan left": 0.9 * 0.49}
    for text, share in shares.items():
        assert_share(kinds[text], total, share)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "{text}{? {fps:d} FPS}{?, {score:.0f} motion score.}",
            ["a street 15 FPS, 4 motion score.", "a lane 15 FPS", "a still, 4 motion score."],
        ),
        (
            "{text}{? [aesthetic score: {aes}, motion score: {motion}]}",
            ["a street [aesthetic score: 5.5, motion score: 10.0]", "a lane", "a still"],
        ),
        (
            "{text}.{? [{? aesthetic score: {aes:.1f}}{? motion score: {motion:.1f}} ]{camera}}",
            ["a street. [ aesthetic score: 5.5 motion score: 10.0 ]pan left", "a lane.", "a still."],
        ),
        ("{text}{? Camera motion: {camera}.}", ["a street Camera motion: pan left.", "a lane", "a still"]),
        ("{text} {fps:.2f} {{4K}}", ["a street 15.00 {4K}", "a lane 15.00 {4K}", "a still"]),
        ("{text} {score:+06.2f} {score:d} {score:.0%}", ["a street +03.60 3 360%", "a lane", "a still +04.40 4 440%"]),
    ],
)
def test_templates_give_exactly_these_texts(scored: Path, template: str, expected: list[str]) -> None:
    """Open-Sora's rows 26 and 27 on delivered batches: the rate is the batch's, and missing values are omitted."""
    config = DatasetConfig(scored, captions={"template": template, "prefix": "sks "})
    found = {}
    with loader_of(config, batch_size=1) as loader:
        for batch in loader:
            found[batch.sample_keys[0][0]] = batch.text[0]
            assert batch.bucket.is_image or batch.fps.tolist() == [15.0]
    assert [found[name] for name in "abc"] == [f"sks {text}" for text in expected]


AESTHETIC_WORDS = (
    (4, "terrible"),
    (4.5, "very poor"),
    (5, "poor"),
    (5.5, "fair"),
    (6, "good"),
    (math.inf, "excellent"),
)


def test_words_by_thresholds_are_annotated_columns(scored: Path, tmp_path: Path) -> None:
    """Open-Sora 1.3's words are computed offline, added with `annotate` and used in a template.

    Each is dropped by chance.
    """
    root = tmp_path / "ds"
    shutil.copytree(scored, root)
    scores = {key: score for key, score in column(root, "user.aes").items() if score is not None}
    words = {key: next(word for most, word in AESTHETIC_WORDS if score < most) for key, score in scores.items()}
    lines = (json.dumps({"key": key, "aes_word": word}) for key, word in words.items())
    (tmp_path / "words.jsonl").write_text("\n".join(lines))
    streamvid.annotate(root, tmp_path / "words.jsonl")
    template = "{text}.{? Aesthetics: {aes_word}.}"
    plain = delivered(DatasetConfig(root, captions={"template": template}), batch_size=1)
    assert sorted(plain.values()) == ["a lane.", "a still. Aesthetics: very poor.", "a street. Aesthetics: good."]
    config = DatasetConfig(root, captions={"template": template, "part_dropout": 0.4})
    found = delivered(config, batch_size=1, num_epochs=300, output={"decode": False})
    kept = [" Aesthetics" in text for (_, key), text in found.items() if key in words]
    assert_share(sum(kept), len(kept), 0.6)


def test_bools_and_integers_are_written_unchanged(texts: Path) -> None:
    found = delivered(DatasetConfig(texts, captions={"template": "{year} {year:,d} {is_new}", "choice": "first"}))
    years, new = column(texts, "user.year"), column(texts, "user.is_new")
    assert all(text == f"{years[key]} {years[key]:,d} {new[key]}" for (_, key), text in found.items())


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{text.__class__}", r"character 1: 'text.__class__' is not a column name; '.', '[' and '!' are not supported"),
        ("{text[0]}", "is not a column name"),
        ("{text!r}", "is not a column name"),
        ("a {}", "character 3: '' is not a column name"),
        ("{text:{aes}}", "the format '{aes' is not allowed"),
        ("{aes:.1000f}", "the format '.1000f' is not allowed; write numbers as {aes:.1f} or {aes:d}"),
        ("{aes:>999999}", "is not allowed"),
        ("{aes:.1d}", "is not allowed"),
        ("{aes:n}", "is not allowed"),
        ("{aes:}", "is not allowed"),
        ("{text", "a brace is never closed; write '{{'"),
        ("text}", "character 5: unmatched brace"),
        ("{text}{? {aes}", "character 9: a part is never closed"),
        ("{text}{? more}", "the part that ends here contains no column"),
        ("no column", "contains no column; to insert the caption, write {text}"),
        ("{?" * 9 + "{aes}" + "}" * 9, "parts are nested more than 8 levels deep"),
        ("{text}" * 1000, "at most 4096 characters"),
        ("{text} {aesthetc}", "captions.template: 'aesthetc' is not a column of the dataset"),
        ("{text} {camera:.1f}", "{camera:.1f} has a number format, but 'camera' is text; write {camera}"),
        ("{text:d}", "'text' is text"),
        ("{clip_sha256}", "'clip_sha256' has type fixed_size_binary"),
    ],
)
def test_invalid_templates_are_refused_at_once(texts: Path, template: str, message: str) -> None:
    """SAFE-1: a template cannot access attributes of values, and no width consumes memory."""
    with pytest.raises(ConfigError) as told:
        loader_of(DatasetConfig(texts, captions={"template": template}))
    assert all(part in str(told.value) for part in message.split(r"\.\*"))


@given(st.from_regex(r"[+ ]?0?[0-9]{0,2},?(\.[0-9]{1,2})?[dfeg%]?", fullmatch=True))
@example(".3")
def test_any_number_is_written_in_any_format(form: str) -> None:
    try:
        parsed = parse_template(f"{{a:{form}}}")
    except ConfigError:
        return
    for value in (0, 3, True, -(2**63), 1.5, float("inf"), -1e308):
        written = parsed.written({"a": value}, lambda part: True)
        assert written is None or isinstance(written, str)
    assert form != ".3" or parsed.written({"a": 3}, lambda part: True) == "3.0"


@given(st.text("{}?:.[]!abc01fd% ", max_size=30))
def test_any_template_is_refused_or_gives_a_text(template: str) -> None:
    """SAFE-1: the length of the text is bounded."""
    try:
        parsed = parse_template(template)
    except ConfigError:
        return
    for value in (None, "", "x", 1.5, 3, True, float("nan"), float("inf"), -(10**30)):
        written = parsed.written({field.name: value for field in parsed.fields()}, lambda part: part % 2 == 0)
        assert written is None or (isinstance(written, str) and len(written) < 4000)


def test_a_column_named_text_does_not_hide_the_captions(tmp_path: Path) -> None:
    """Regression test: metadata with `caption` and `text`, or an annotation with `text`, made the captions empty."""
    rows = [{"caption": [f"{i} one", f"{i} two"], "text": "other" if i % 2 else None} for i in range(4)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    streamvid.shard(tmp_path / "p.jsonl", tmp_path / "ds", shard_options(clips="text"))
    texts = delivered(tmp_path / "ds", num_epochs=8).values()
    assert set(texts) == {f"{i} {word}" for i in range(4) for word in ("one", "two")}
    own = delivered(DatasetConfig(tmp_path / "ds", captions={"column": "user.text"}))
    assert sorted(own.values()) == ["", "", "other", "other"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"captions": {"column": "txet"}}, "captions.column: 'txet' is not a column of the dataset at .*text"),
        (
            {"captions": {"column": "year"}},
            r"captions.column: 'year' of .* has type int64; use a text column \(text, short",
        ),
        (
            {"captions": {"column": {"short": 1, "aes": 1}}},
            "'aes' of .* has type double; .*captions.template='{text} {aes}'",
        ),
        ({"captions": {"column": {}}}, "captions.column={}: must be a column name, or a mapping"),
        ({"captions": {"column": {"short": 0}}}, "weights above 0"),
        ({"captions": {"column": 3}}, "captions.column=3: must be a column"),
        ({"captions": {"choice": "last"}}, "captions.choice='last': must be 'draw' or 'first'"),
        ({"captions": {"part_dropout": 0.5}}, "captions.part_dropout=0.5 applies only to"),
        (
            {"captions": {"part_dropout": 2, "template": "{text}"}},
            "captions.part_dropout=2: must be a number from 0 to 1",
        ),
        ({"captions": {"prefix": 3}}, "captions.prefix=3: must be text"),
    ],
)
def test_wrong_columns_and_values_are_refused_at_once(texts: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loader_of(DatasetConfig(texts, **fields))


# Tokens.


class Counted:
    """Tokenizer that returns the lengths of words and records its calls."""

    pad_token_id = 99

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def __call__(self, texts: list[str]) -> Any:
        self.calls.append(list(texts))
        return [[len(word) for word in text.split()] for text in texts]


def test_tokens_are_padded_with_a_mask_once_per_batch(texts: Path) -> None:
    """A plain function is called once per delivered batch. Tokens are int64 (B, L), and the mask is bool (B, L)."""
    tokenizer, batches = Counted(), []
    config = DatasetConfig(texts, captions={"template": "{text}{? {aes:.1f} aesthetic}", "dropout": 0.2})
    with loader_of(config, output={"tokenizer": tokenizer}, batch_size=8) as loader:
        for batch in loader:
            batches.append(batch.text)
            assert (batch.text_tokens.dtype, batch.text_mask.dtype) == (torch.int64, torch.bool)
            assert batch.text_tokens.shape == batch.text_mask.shape
            for text, tokens, mask in zip(batch.text, batch.text_tokens, batch.text_mask, strict=True):
                words = [len(word) for word in text.split()]
                assert tokens[mask].tolist() == words and mask.tolist() == [True] * len(words) + [False] * (
                    len(mask) - len(words)
                )
                assert set(tokens[~mask].tolist()) <= {99}
    assert tokenizer.calls == batches


def test_tokens_are_the_same_over_ranks_and_after_a_resume(texts: Path) -> None:
    """SAMPLE-1: a batch's tokens depend only on its texts, and are moved and copied with the batch."""
    config = DatasetConfig(texts, **ALL_DRAWS)

    def tokens_of(loader: streamvid.VideoLoader) -> Iterator[tuple[str, list[int]]]:
        for batch in loader:
            copied = batch.to("cpu").clone()
            assert torch.equal(copied.text_tokens, batch.text_tokens)
            for key, tokens, mask in zip(copied.sample_keys, copied.text_tokens, copied.text_mask, strict=True):
                yield key, tokens[mask].tolist()

    with loader_of(config, output={"tokenizer": Counted()}, tail="uneven") as loader:
        whole = dict(tokens_of(loader))
    found: dict[str, list[int]] = {}
    for rank in range(3):
        with loader_of(config, rank, 3, output={"tokenizer": Counted()}, tail="uneven", batch_size=5) as loader:
            found |= dict(tokens_of(loader))
    assert found == whole and len(whole) == NUM_PROMPTS


def trained(captions: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(captions, trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]"]))
    return tokenizer


def test_a_real_tokenizer(texts: Path) -> None:
    """Hugging Face encodings are accepted directly, padded to one length or ragged, and as a mapping."""
    vocabulary = trained([row["caption"][0]["text"] for row in prompts()])

    def as_mapping(batch: list[str]) -> dict[str, Any]:
        encoded = vocabulary.encode_batch(batch)
        return {
            "input_ids": np.array([one.ids for one in encoded], np.int32),
            "attention_mask": torch.tensor([one.attention_mask for one in encoded]),
            "token_type_ids": [one.type_ids for one in encoded], "words": [one.tokens[0] for one in encoded],
            "overflowing": None,
        }  # fmt: skip

    ragged = {}
    with loader_of(texts, output={"tokenizer": vocabulary.encode_batch}) as loader:
        for batch in loader:
            for key, text, tokens, mask in zip(
                batch.sample_keys, batch.text, batch.text_tokens, batch.text_mask, strict=True
            ):
                assert tokens[mask].tolist() == vocabulary.encode(text).ids
                ragged[key] = tokens[mask].tolist()
    vocabulary.enable_padding(length=7)
    with loader_of(texts, output={"tokenizer": as_mapping}) as loader:
        for batch in loader:
            assert batch.text_tokens.shape == batch.text_mask.shape == (len(batch.text), 7)
            assert batch.text_tokens.dtype == torch.int64 and batch.text_mask.dtype == torch.bool
            assert batch.text_token_type_ids.shape == (len(batch.text), 7) and "text_overflowing" not in batch
            assert batch.text_words == [text.split()[0] for text in batch.text]
            for key, tokens, mask in zip(batch.sample_keys, batch.text_tokens, batch.text_mask, strict=True):
                assert tokens[mask].tolist() == ragged[key]


def test_tokens_with_video(tmp_path: Path) -> None:
    """Tokens are delivered with frames and with stored clips.

    Tokens of shape (B, L) without a mask get a mask of all True.
    """
    root = build_dataset(tmp_path, {SMALL: [4]})
    for decode in (True, False):
        output: dict[str, Any] = {"decode": decode, "tokenizer": lambda texts: torch.ones(len(texts), 3)}
        loader = loader_of(root, output=output, batch_size=2)
        with loader, pytest.raises(LoaderError, match="returned text_tokens with dtype torch.float32; return integers"):
            next(iter(loader))
        output = {"decode": decode, "tokenizer": lambda texts: np.ones((len(texts), 3), np.uint8)}
        with loader_of(root, output=output) as loader:
            (batch,) = loader
            assert batch.text_tokens.tolist() == [[1, 1, 1]] * 4 and bool(batch.text_mask.all())
            assert ("video" in batch) == decode


def test_small_integers_are_padded_with_any_value(texts: Path) -> None:
    class Bytes(Counted):
        pad_token_id = -100

        def __call__(self, batch: list[str]) -> Any:
            return [np.frombuffer(text.encode(), np.uint8) for text in batch]

    with loader_of(texts, output={"tokenizer": Bytes()}) as loader:
        for batch in loader:
            assert batch["text_tokens"].dtype == torch.int64
            assert ((batch["text_tokens"] == -100) == ~batch["text_mask"]).all()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda n: [[1]] * (n - 1), "returned 3 entries of text_tokens for 4 texts"),
        (lambda n: np.ones((2, 2), np.int64), r"returned text_tokens of shape \(2, 2\) for 4 texts"),
        (lambda n: None, "returned text_tokens as a NoneType for 4 texts"),
        (lambda n: ["word"] * n, "returned text_tokens with an entry that is not a list of integers"),
        (lambda n: [["word"]] * n, "returned text_tokens with an entry that is not a list of numbers"),
        (lambda n: {"input_ids": [[1, 2]] * n, "attention_mask": [[1]] * n}, r"a mask of shape \(4, 1\) for tokens of"),
        (
            lambda n: {"input_ids": [[1, 2]] * n, "mask": [[1]] * n, "tokens": [[1]] * n},
            "returned text_tokens under two names",
        ),
        (lambda n: {"x": np.ones(3)}, r"returned text_x of shape \(3,\) for 4 texts"),
        (lambda n: 1 // 0, "the tokenizer failed: ZeroDivisionError: .* \\(texts of .*, .* more|texts of"),
    ],
)
def test_invalid_results_of_a_tokenizer_are_refused(texts: Path, result: Callable[[int], Any], message: str) -> None:
    """The error names the samples. The state does not change, so the run can continue with a corrected tokenizer."""
    with loader_of(texts, output={"tokenizer": lambda batch: result(len(batch))}) as loader:
        before = loader.state_dict()
        with pytest.raises(LoaderError, match=message):
            next(iter(loader))
        assert loader.state_dict() == before


def test_a_tokenizer_that_cannot_be_called_is_refused(texts: Path) -> None:
    with pytest.raises(ConfigError, match="output.tokenizer='t5': must be a function that accepts a list of texts"):
        loader_of(texts, output={"tokenizer": "t5"})
    with pytest.raises(ConfigError, match="'text_mask' is reserved for the tokenizer's result"):
        loader_of(texts, output={"tokenizer": len}, columns=("text_mask",))


# Datasets that contain only texts.


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_texts_are_delivered_exactly_once_over_all_ranks(texts: Path, num_ranks: int) -> None:
    """PLAN-2, PLAN-4: columns and a filter work as for clips, and batches contain no video."""
    found: Counter[str] = Counter()
    lengths = []
    for rank in range(num_ranks):
        options: dict[str, Any] = {"batch_size": 3, "columns": ("year",), "where": "motion > 5 and year < 2050"}
        with loader_of(texts, rank, num_ranks, **options) as loader:
            lengths.append(len(loader))
            assert loader.shapes == [] and loader.ring_bytes < 2**21
            for batch in loader:
                assert {"video", "clips", "layout"}.isdisjoint(batch) and batch.bucket.is_text
                assert bool(batch.fps.isnan().all()) and not loader.worker_pids
                rows = zip(batch.text, batch.year.tolist(), batch.is_repeat.tolist(), strict=True)
                for text, year, again in rows:
                    assert int(text.split()[0]) == year - 2000
                    found[str(int(year))] += not again
    assert found == {str(2000 + number): 1 for number in range(50)} and len(set(lengths)) == 1


def test_texts_and_videos_in_one_loader(texts: Path, tmp_path: Path) -> None:
    """PLAN-3: each batch contains only texts or only videos, and each kind has its own batch size."""
    videos = build_dataset(tmp_path, {SMALL: [5, 4]})
    sizes = {"text": 20, "*": 2}
    mixed = [DatasetConfig(videos), DatasetConfig(texts, num_repeats=2, captions={"prefix": "T "})]
    counts: Counter[str] = Counter()
    for workers in (0, 1):
        with loader_of(mixed, batch_size=sizes, tail="drop", num_workers=workers) as loader:
            for batch in loader:
                counts[batch.bucket.id] += len(batch.text)
                assert (len(batch.text) == sizes.get(batch.bucket.id, 2) and "video" in batch) or batch.bucket.is_text
                assert all(text.startswith("T ") for text in batch.text) == batch.bucket.is_text
                assert isinstance(batch.digest(), int) and batch.to("cpu").text == batch.text
    assert counts == {"text": 240, SMALL.id: 16}
    with pytest.raises(ConfigError, match="cannot be used with bucket text, .* set batch_size instead"):
        loader_of(mixed, batch_size=None, max_tokens_per_batch=1000)


def test_texts_are_not_all_read_ahead(tmp_path: Path) -> None:
    """Memory: a loader of texts prefetches some batches, and not the whole epoch."""
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"prompt": f"p {n}"}) for n in range(800)))
    streamvid.shard(tmp_path / "p.jsonl", tmp_path / "ds", shard_options(clips="text", workers=1))
    with loader_of(tmp_path / "ds", batch_size=2) as loader:
        for batch in loader:
            assert loader.stats().queue_depth <= 64 and len(batch.text) == 2
        assert loader.stats().num_steps == 400
