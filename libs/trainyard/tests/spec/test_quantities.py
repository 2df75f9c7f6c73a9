from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainyard.spec.quantities import QuantityError, cpu_cores, memory_bytes, seconds

WHOLE = st.integers(0, 10**9)
ANYTHING = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers()))


@given(WHOLE)
def test_thousandths_of_a_core_are_thousandths(count: int) -> None:
    assert cpu_cores(f"{count}m") == pytest.approx(count / 1000)


@given(WHOLE)
def test_cores_as_a_number_and_as_a_text_are_the_same(count: int) -> None:
    assert cpu_cores(count) == cpu_cores(str(count)) == count


@given(WHOLE, st.sampled_from(["Ki", "Mi", "Gi", "Ti", "Pi"]))
def test_binary_units_of_memory_are_exact(count: int, unit: str) -> None:
    power = ["Ki", "Mi", "Gi", "Ti", "Pi"].index(unit) + 1
    assert memory_bytes(f"{count}{unit}") == count * 1024**power


@given(WHOLE, st.sampled_from(["", "k", "M", "G", "T", "P"]))
def test_decimal_units_of_memory_are_exact(count: int, unit: str) -> None:
    assert memory_bytes(f"{count}{unit}") == count * 1000 ** ["", "k", "M", "G", "T", "P"].index(unit)


def test_a_part_of_a_unit_of_memory_is_exact() -> None:
    assert memory_bytes("1.5Gi") == 3 * 2**29
    assert memory_bytes("0.1G") == 100_000_000


@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
def test_the_parts_of_a_duration_add_up(days: int, hours: int, minutes: int, rest: int) -> None:
    assert seconds(f"{days}d{hours}h{minutes}m{rest}s") == days * 86400 + hours * 3600 + minutes * 60 + rest


def test_milliseconds_and_weeks_are_units_too() -> None:
    assert seconds("250ms") == 0.25
    assert seconds("1.5h") == 5400
    assert seconds("2w") == 14 * 86400


@pytest.mark.parametrize("parse", [cpu_cores, memory_bytes, seconds])
@given(value=ANYTHING)
def test_anything_else_is_refused_with_what_is_allowed(parse, value) -> None:
    try:
        assert parse(value) >= 0
    except QuantityError as error:
        assert error.allowed


@pytest.mark.parametrize("parse", [cpu_cores, memory_bytes, seconds])
@given(value=ANYTHING | st.from_regex(r"\A[0-9]{1,3}(\.[0-9])? ?[A-Za-z]{1,7}\Z"))
def test_what_is_suggested_is_accepted(parse, value) -> None:
    try:
        parse(value)
    except QuantityError as error:
        if error.suggestion:
            parse(error.suggestion.strip('"'))


@pytest.mark.parametrize(
    ("parse", "value", "suggestion"),
    [
        (cpu_cores, 0.25, '"250m"'),
        (cpu_cores, "4 CPUs", "4"),
        (memory_bytes, "16GB", "16G"),
        (memory_bytes, "16 gib", "16Gi"),
        (memory_bytes, 1.5, '"1.5Gi"'),
        (seconds, 30, "30s"),
        (seconds, "30", "30s"),
        (seconds, "1 hour 30 min", "1h30m"),
        (seconds, "5 parsecs", ""),
    ],
)
def test_what_was_meant_is_suggested(parse, value: object, suggestion: str) -> None:
    with pytest.raises(QuantityError) as caught:
        parse(value)
    assert caught.value.suggestion == suggestion


@pytest.mark.parametrize("text", ["1s\n", "1 s", "-1s", "s", "", "1e3s", "١s", "9" * 50 + "s"])
def test_only_the_exact_spelling_is_a_duration(text: str) -> None:
    with pytest.raises(QuantityError):
        seconds(text)
