"""Tests of weights as exact fractions: accepted spellings, and errors that suggest one."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamvid.errors import ConfigError
from streamvid.plan.mix import exact_fraction


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_fractions_and_texts_are_exact(numerator: int, denominator: int) -> None:
    expected = Fraction(numerator, denominator)
    assert exact_fraction("weight", expected) == exact_fraction("weight", f"{numerator}/{denominator}") == expected
    assert exact_fraction("weight", numerator / 100) == exact_fraction("weight", Decimal(numerator) / 100)
    assert exact_fraction("weight", numerator / 100) == Fraction(numerator, 100)


@given(st.integers(1, 999), st.integers(1, 999))
def test_a_floating_point_quotient_is_accepted_or_an_exact_text_is_suggested(numerator: int, denominator: int) -> None:
    """1 / 3 and 1 - 0.7 have too many digits; the text that the error suggests is accepted and exact."""
    try:
        assert exact_fraction("weight", numerator / denominator) == Fraction(numerator, denominator)
    except ConfigError as error:
        (text,) = re.findall(r"write the text '(\d+(?:/\d+)?)'", str(error))
        assert exact_fraction("weight", text) == Fraction(numerator, denominator)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1 / 3, r"weight=0\.33+: .* write the text '1/3' or fractions\.Fraction\(1, 3\)"),
        (1 - 0.7, r"weight=0\.30+4: .* write the text '3/10' or fractions\.Fraction\(3, 10\)"),
        (2**0.5, r"at most 12 digits, such as 2, 0\.5 or '1/3'; use a number with fewer digits$"),
        (1e-300, r"at most 12 digits, such as 2, 0\.5 or '1/3'; use a number with fewer digits$"),
        (1e300, r"at most 12 digits, such as 2, 0\.5 or '1/3'; use a number with fewer digits$"),
        (0, r"weight=0: must be a number above 0"),
        (-1 / 3, r"weight=-0\.3+: must be a number above 0"),
        (True, "must be a number above 0, such as 2, 0.5 or '3/2'"),
        ("a third", "must be a number above 0"),
        ("1/0", "must be a number above 0"),
        (float("nan"), "must be a number above 0"),
        (float("inf"), "must be a number above 0"),
    ],
)
def test_invalid_weights_are_refused(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        exact_fraction("weight", value)
