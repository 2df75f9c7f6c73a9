"""The checker finds each kind of wrong there is: what is proven with it is proven."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest

from tests.checker import Stored, StoredSeries, differences
from tests.faults.trainer import evidence
from tests.faults.trainer.evidence import Told

SEED = 7
FIRST = Told(attempt=1, rank=0, steps=tuple(range(1, 41)), complete=False)
SECOND = Told(attempt=2, rank=0, steps=tuple(range(31, 61)), complete=True)
TOLD = (FIRST, SECOND)


def series(name: str, points: list[tuple[int, int]]) -> StoredSeries:
    """What should be stored at (attempt, step)."""
    names = evidence.TRAIN_NAMES if name in evidence.TRAIN_NAMES else evidence.VALIDATION_NAMES
    make = evidence.train_values if name in evidence.TRAIN_NAMES else evidence.validation_values
    values = [make(SEED, attempt, 0, step)[names.index(name)] for attempt, step in points]
    attempts, steps = zip(*points, strict=True)
    return StoredSeries(name, 0, attempts, steps, np.array(values, dtype="<f8").view("<u8"))


def due(name: str, points: list[tuple[int, int]]) -> list[tuple[int, int]]:
    every = 1 if name in evidence.TRAIN_NAMES else evidence.VALIDATE_EVERY
    return [(attempt, step) for attempt, step in points if step % every == 0]


def whole() -> Stored:
    """A retried job of which nothing is lost."""
    hidden = [(1, step) for step in FIRST.steps] + [(2, step) for step in SECOND.steps]
    stitched = [(1, step) for step in range(1, 31)] + [(2, step) for step in SECOND.steps]
    names = (*evidence.TRAIN_NAMES, *evidence.VALIDATION_NAMES)
    printed = {
        (told.attempt, 0): [
            evidence.line(SEED, told.attempt, 0, step) for step in told.steps if step % evidence.PRINT_EVERY == 0
        ]
        for told in TOLD
    }
    return Stored(
        hidden=[series(name, due(name, hidden)) for name in names],
        stitched=[series(name, due(name, stitched)) for name in names],
        lines=printed,
        checkpoints=[(30, evidence.weights(SEED, 30)), (60, evidence.weights(SEED, 60))],
        outputs=evidence.weights(SEED, 60),
    )


def points_of(each: StoredSeries, keep: list[int]) -> StoredSeries:
    return replace(
        each,
        attempt=tuple(each.attempt[row] for row in keep),
        step=tuple(each.step[row] for row in keep),
        bits=each.bits[keep],
    )


def with_rows(stored: Stored, kind: str, change) -> Stored:
    """The first series of a kind with other rows."""
    found = list(getattr(stored, kind))
    found[0] = points_of(found[0], change(list(range(len(found[0].step)))))
    return replace(stored, **{kind: found})


def flipped(stored: Stored, kind: str) -> Stored:
    found = list(getattr(stored, kind))
    bits = found[0].bits.copy()
    bits[5] ^= np.uint64(1)
    found[0] = replace(found[0], bits=bits)
    return replace(stored, **{kind: found})


def test_what_is_whole_differs_in_nothing():
    assert differences(SEED, TOLD, whole()) == []


def test_the_last_row_of_a_killed_worker_may_lack_or_be_there():
    without = with_rows(whole(), "hidden", lambda rows: rows[:39] + rows[40:])
    assert differences(SEED, TOLD, without) == []


@pytest.mark.parametrize("kind", ["hidden", "stitched"])
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda rows: rows[:3] + rows[4:], "step 4 missing"),
        (lambda rows: [*rows[:4], 3, *rows[4:]], "step 4 2 times"),
        (lambda rows: [1, 0, *rows[2:]], "out of order"),
        (lambda rows: rows[:-1], "step 60 missing"),
    ],
    ids=["missing", "doubled", "disordered", "cut"],
)
def test_rows_that_are_missing_doubled_or_disordered_are_found(kind, change, found):
    assert any(found in text for text in differences(SEED, TOLD, with_rows(whole(), kind, change)))


@pytest.mark.parametrize("kind", ["hidden", "stitched"])
def test_one_flipped_bit_is_found(kind):
    (text,) = differences(SEED, TOLD, flipped(whole(), kind))
    assert "step 6 is 0x" in text


@pytest.mark.parametrize("kind", ["hidden", "stitched"])
def test_a_series_that_is_gone_is_found(kind):
    stored = whole()
    assert differences(SEED, TOLD, replace(stored, **{kind: getattr(stored, kind)[1:]}))


def test_points_and_lines_of_nobody_are_found():
    found = differences(SEED, [FIRST], replace(whole(), stitched=[], checkpoints=[], outputs=None), over=False)
    assert any("attempt 2 rank 0" in text and "kept no diary" in text for text in found)
    assert any("lines of (2, 0): invented" in text for text in found)


def test_lines_that_are_missing_doubled_or_changed_are_found():
    good = whole().lines
    for lines, found in (
        ([], "step 50 missing"),
        ([*good[(2, 0)], *good[(2, 0)]], "step 50 2 times"),
        ([good[(2, 0)][0] + "!"], "invented"),
    ):
        assert any(found in text for text in differences(SEED, TOLD, replace(whole(), lines={**good, (2, 0): lines})))


def test_the_last_line_of_a_killed_worker_must_be_there_too():
    found = differences(SEED, TOLD, replace(whole(), lines={**whole().lines, (1, 0): []}))
    assert found == ["attempt 1 rank 0 line: step 25 missing"]


def test_damaged_and_missing_files_are_found():
    stored = whole()
    damaged = bytes([stored.checkpoints[0][1][0] ^ 1]) + stored.checkpoints[0][1][1:]
    for changed, found in (
        (replace(stored, checkpoints=[(30, damaged), stored.checkpoints[1]]), "checkpoint of step 30"),
        (replace(stored, checkpoints=stored.checkpoints[:1]), "checkpoint of step 60: missing"),
        (replace(stored, outputs=None), "the output"),
    ):
        (text,) = differences(SEED, TOLD, changed)
        assert found in text


def test_the_known_function_reaches_every_kind_of_value():
    logged = {struct.pack("<d", value) for step in range(1, 200) for value in evidence.train_values(SEED, 1, 0, step)}
    assert {struct.pack("<Q", bits) for bits in evidence._SPECIAL} <= logged


def test_a_diary_tells_what_was_written_and_whether_it_was_ended(tmp_path):
    diary = evidence.Diary(tmp_path, 1, 0)
    for step in (1, 2, 3):
        diary.step(step)
    assert list(evidence.read_diaries(tmp_path)) == [Told(1, 0, (1, 2, 3), complete=False)]
    diary.step(evidence.END)
    assert list(evidence.read_diaries(tmp_path)) == [Told(1, 0, (1, 2, 3), complete=True)]
