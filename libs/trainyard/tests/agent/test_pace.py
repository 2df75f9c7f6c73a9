"""How long training will take, at the pace of the last minutes."""

from trainyard.agent.pace import WINDOW_NS, Pace

S = 10**9


def test_without_a_total_or_two_steps_nothing_is_said():
    pace = Pace()
    assert pace.seconds_left(100) is None
    pace.add(1, 1 * S)
    assert pace.seconds_left(100) is None
    pace.add(2, 2 * S)
    assert pace.seconds_left(0) is None


def test_an_even_pace_is_the_time_of_a_step_for_every_step_left():
    pace = Pace()
    for step in range(50):
        pace.add(step, step * 2 * S)
    assert pace.seconds_left(100) == 2 * 51


def test_what_is_done_before_the_first_step_is_no_part_of_the_pace():
    pace = Pace()
    for time_s, step in ((0, 40), (300, 40), (302, 41)):
        pace.add(step, time_s * S)
    assert pace.seconds_left(50) == 2 * 9


def test_a_pace_that_changed_is_forgotten_after_the_window():
    pace = Pace()
    for step in range(1_000):
        pace.add(step, step * S)
    slow_from = 1_000 * S
    for number in range(WINDOW_NS // (10 * S) + 2):
        pace.add(1_000 + number, slow_from + number * 10 * S)
    step = 1_000 + WINDOW_NS // (10 * S) + 1
    assert pace.seconds_left(step + 7) == 7 * 10


def test_steps_longer_than_the_window_still_make_a_pace():
    pace = Pace()
    for step in range(4):
        pace.add(step, step * 3 * WINDOW_NS)
    assert pace.seconds_left(5) == 2 * 3 * WINDOW_NS / S


def test_what_falls_behind_the_newest_step_changes_nothing():
    pace = Pace()
    pace.add(10, 10 * S)
    pace.add(20, 20 * S)
    pace.add(5, 30 * S)
    pace.add(30, 15 * S)
    assert pace.seconds_left(30) == 10


def test_a_run_that_is_longer_than_it_said_has_no_time_left():
    pace = Pace()
    pace.add(1, 1 * S)
    pace.add(5, 2 * S)
    assert pace.seconds_left(3) == 0
