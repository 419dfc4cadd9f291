"""Slurm's forms of a time limit, and sizes as people read them."""

from __future__ import annotations

import pytest

from orchestra.sizes.units import binary, slurm_time_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("4:00:00", 14400),
        ("1-12", 129600),
        ("1-00:30", 88200),
        ("2-01:02:03", 176523),
        (" 10 ", 600),
        ("UNLIMITED", None),
        ("infinite", None),
    ],
)
def test_every_form_of_slurm_is_read(text: str, seconds: int | None) -> None:
    assert slurm_time_s(text) == seconds


@pytest.mark.parametrize("text", ["", "4h", "1:2:3:4", "-5", "1-", "1.5", "tomorrow"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="time limit"):
        slurm_time_s(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (600_000, "586 KiB"),
        ((1 << 20) - 1, "1024 KiB"),
        (9_696_768, "9.25 MiB"),
        (5 << 30, "5 GiB"),
        (3 << 41, "6 TiB"),
    ],
)
def test_a_size_has_three_digits_in_the_unit_that_fits(num_bytes: int, text: str) -> None:
    assert binary(num_bytes) == text
