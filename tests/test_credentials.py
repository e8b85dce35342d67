"""Tests of SAFE-1: credentials are recognized in locations and in messages that quote them; other text is unchanged."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamvid.credentials import hide_all_credentials, hide_credentials
from streamvid.errors import ConfigError, Rejected, StreamvidError, refuse_credentials
from tests.locations import CANARY, ORDINARY, mistyped

QUOTES = ("{}", "'{}'", '"{}"', "({})", "[{}, x]", "url={}", "--work-dir={}: no", "file {}: no", "x={{a: {}}}")


@given(mistyped, st.sampled_from(QUOTES))
def test_no_location_and_no_message_shows_a_secret(url: str, quote: str) -> None:
    assert CANARY not in hide_credentials(url)
    for text in (quote.format(url), f"a {quote.format(url)} b, and {quote.format(url)}", quote.format(repr(url))):
        assert CANARY not in hide_all_credentials(text)
        for error in (StreamvidError(text), Rejected(text, kind="bad-path")):
            again = pickle.loads(pickle.dumps(error))
            assert CANARY not in f"{error} {error!r} {again} {again.args}"
    with pytest.raises(ConfigError, match="work_dir=") as refused:
        refuse_credentials("work_dir", url)
    assert CANARY not in str(refused.value)


@pytest.mark.parametrize(
    "query",
    [
        f"X-Amz-Credential={CANARY}%2Fs3&X-Amz-Security-Token={CANARY}&X-Amz-Signature={CANARY}",
        *(f"AWSAccessKeyId={CANARY}&Expires=1&Signature={CANARY}", f"se=1&sig={CANARY}", f"token={CANARY}"),
    ],
)
@pytest.mark.parametrize("quote", QUOTES)
def test_signatures_of_presigned_urls_are_hidden(query: str, quote: str) -> None:
    for url in (f"https://b.example/clip.mp4?{query}", f"s3:/b/clip.mp4?{query}"):
        assert CANARY not in hide_credentials(url)
        assert CANARY not in str(StreamvidError(f"cannot read {quote.format(url)}"))
        with pytest.raises(ConfigError, match="dataset=") as refused:
            refuse_credentials("dataset", url)
        assert CANARY not in str(refused.value)
    for plain in ("https://b.example/clip.mp4?sigma=1&t=2", "what?sig", "a&b=c"):
        assert hide_credentials(plain) == plain


@pytest.mark.parametrize(
    "url",
    [
        *(f"s3://KEY:{CANARY}%40bucket/ds", f"s3://KEY:a/{CANARY}%40bucket/ds", f"s3://:{CANARY}@bucket/ds"),
        *(f"url=s3://KEY:{CANARY}@bucket", f"${{X}}s3://KEY:{CANARY}@bucket"),
    ],
)
def test_an_encoded_at_sign_or_text_before_a_url_hides_no_secret_from_the_check(url: str) -> None:
    assert CANARY not in hide_credentials(url) and CANARY not in hide_all_credentials(f"cannot open {url}")
    with pytest.raises(ConfigError, match="dest="):
        refuse_credentials("dest", url)
    assert hide_credentials("s3://bucket/a%40b") == "s3://bucket/a%40b"


@pytest.mark.parametrize("before", [" ", "\t", "'", '"', "<"])
def test_a_space_or_a_quote_before_a_location_hides_no_secret_from_the_check(before: str) -> None:
    with pytest.raises(ConfigError, match="dest="):
        refuse_credentials("dest", f"{before}s3://KEY:{CANARY}@bucket/ds")
    assert CANARY not in hide_credentials(f"{before}s3:/KEY:{CANARY}@bucket/ds")


@pytest.mark.parametrize("text", ORDINARY)
@pytest.mark.parametrize("quote", QUOTES)
def test_other_text_is_unchanged(text: str, quote: str) -> None:
    assert hide_credentials(text) == text
    assert hide_all_credentials(quote.format(text)) == quote.format(text)
    refuse_credentials("work_dir", text)


@given(st.text("ab1:/@. \\='-", max_size=40))
def test_cleaning_accepts_any_text(text: str) -> None:
    """Cleaning accepts any text, never lengthens it, and leaves text without "@" or a signature unchanged."""
    assert "@" in text or hide_all_credentials(text) == hide_credentials(text) == text
    assert len(hide_all_credentials(text)) <= len(text)
