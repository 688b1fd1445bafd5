"""Sizes of memory in words."""

import pytest

from accum_sweep.units import parse_bytes, show_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1B", 1),
        ("8GiB", 8 * 2**30),
        ("8 gib", 8 * 2**30),
        ("1.5GB", 1_500_000_000),
        (".5KiB", 512),
        ("80GiB", 85_899_345_920),
        ("2TiB", 2**41),
        ("100 MB", 100_000_000),
    ],
)
def test_a_size_is_a_number_and_a_unit(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("8", "no unit"),
        (8, "no unit"),
        (True, "no size"),
        ("8Gib/s", "no size"),
        ("8 GiB GiB", "no size"),
        ("-1GiB", "no size"),
        ("nan", "no size"),
        ("1e3GiB", "no size"),
        ("8XiB", "unknown unit XiB"),
        ("8G", "unknown unit G"),
        ("0GiB", "less than a byte"),
        ("0.5B", "less than a byte"),
        ("", "no size"),
    ],
)
def test_what_is_no_size_says_why(text: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(68, "68 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (8 * 2**30, "8 GiB"), (3 * 2**41, "6 TiB")],
)
def test_a_size_is_shown_in_the_unit_it_fills(size: int, text: str) -> None:
    assert show_bytes(size) == text


@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, 4659609, 4660000, 2**30 - 1, 10**12 + 7, 2**50 + 1])
def test_rounded_up_is_never_less(size: int) -> None:
    assert size <= parse_bytes(show_bytes(size, up=True)) <= 1.002 * size
