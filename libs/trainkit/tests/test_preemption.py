"""SIGTERM anywhere, also within a window and within an evaluation: a run that goes on ends with the bits of one that
was never interrupted."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from trainkit import Callback
from trainkit.checkpoints import folder as folders
from trainkit.loop import agreement
from trainkit.loop.fit import Fit

from libs.trainkit.tests.lives import INTERRUPTED, PATIENCE_S, assert_same_end, last_words, train

PLACES = ["step", "backward", "evaluation", "save"]


def asked(forks: Any, folder: Path, places: list[tuple[int, str]], **options: Any) -> int:
    """A life in which every process gets SIGTERM at its own place. Returns the step at which they ended."""
    codes = forks.run(train, folder, processes=len(places), signal=(signal.SIGTERM, places), **options)
    assert codes == [INTERRUPTED] * len(places), (codes, last_words(folder))
    ends = {log.read_text().splitlines()[-1] for log in folder.glob("rank-*.log")}
    assert len(ends) == 1, ends
    step = int(ends.pop().split()[-1])
    assert folders.by_age(folder / "checkpoints")[-1] == step
    return step


def asked_until_done(forks: Any, folder: Path, *, processes: int, seed: int, **options: Any) -> list[int]:
    """Starts a run again and again, asking it to end at random places; returns at which steps it did."""
    chance, ends = random.Random(seed), list[int]()
    while len(ends) < 3:
        places = [(chance.randrange(2, 9), chance.choice(PLACES)) for _ in range(processes)]
        codes = forks.run(train, folder, processes=processes, signal=(signal.SIGTERM, places), **options)
        if not any(codes):
            return ends
        assert codes == [INTERRUPTED] * processes, (codes, last_words(folder))
        ends.append(folders.by_age(folder / "checkpoints")[-1])
    forks.succeed(train, folder, processes=processes, **options)
    return ends


EVERYTHING = {"accumulate": 5, "workers": 2, "precision": "fp16", "clip_norm": 1.0}
FOUR_BUCKETS = {"bucket_mb": 0.0005, "batch_size": 16, "accumulate": 5}
FSDP = {"strategy": "fsdp", "batch_size": 16, "accumulate": 5, "clip_norm": 1.0}
CASES = [
    pytest.param(1, EVERYTHING, id="one process with workers, accumulation and loss scaling"),
    pytest.param(4, FOUR_BUCKETS, id="DDP on four processes with several buckets"),
    pytest.param(4, FSDP, id="FSDP on four processes"),
]


@pytest.mark.parametrize(("processes", "options"), CASES)
def test_a_run_asked_to_end_at_random_places_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path, forks: Any, processes: int, options: dict[str, Any]
) -> None:
    forks.succeed(train, tmp_path / "whole", processes=processes, **options)

    ends = asked_until_done(forks, tmp_path / "asked", processes=processes, seed=processes, **options)

    assert ends
    assert_same_end(tmp_path / "whole", tmp_path / "asked", processes)


def test_processes_end_together_within_a_window_wherever_the_signal_finds_them(tmp_path: Path, forks: Any) -> None:
    """One is in its third step and the other in its fifth, and the window's end is far."""
    options = {"strategy": "ddp", "accumulate": 24, "max_duration": "2ep", "batch_size": 4, "log_every": None}
    forks.succeed(train, tmp_path / "whole", processes=2, **options)

    end = asked(forks, tmp_path / "asked", [(3, "step"), (5, "backward")], held=True, **options)

    assert end == 5
    forks.succeed(train, tmp_path / "asked", processes=2, **options)
    assert_same_end(tmp_path / "whole", tmp_path / "asked", 2)


def test_an_evaluation_is_left_by_all_processes_and_done_again(tmp_path: Path, forks: Any) -> None:
    """The step is the last of its epoch, and a checkpoint is due after it."""
    options = {"strategy": "ddp", "evaluate_every": "4st", "max_duration": "8st"}
    forks.succeed(train, tmp_path / "whole", processes=2, **options)

    end = asked(forks, tmp_path / "asked", [(3, "evaluation"), (4, "evaluation")], **options)

    assert end == 4
    assert [row for row in (tmp_path / "asked" / "series").read_text().splitlines() if "one/loss" in row] == []
    forks.succeed(train, tmp_path / "asked", processes=2, **options)
    assert_same_end(tmp_path / "whole", tmp_path / "asked", 2)


def test_the_evaluation_after_the_last_step_can_be_left_too(tmp_path: Path, forks: Any) -> None:
    options = {"evaluate_every": None, "max_duration": "6st"}
    forks.succeed(train, tmp_path / "whole", **options)

    assert asked(forks, tmp_path / "asked", [(6, "evaluation")], **options) == 6

    forks.succeed(train, tmp_path / "asked", **options)
    assert_same_end(tmp_path / "whole", tmp_path / "asked", 1)


@pytest.mark.parametrize("sums", [False, True], ids=["means", "sums"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (4, 2)])
def test_another_number_of_processes_goes_on_with_the_gradients_of_all(
    tmp_path: Path, forks: Any, before: int, after: int, sums: bool
) -> None:
    options = {"accumulate": 4, "max_duration": "5st", "batch_size": 8, "plain": True, "sums": sums}
    names = {1: "single", 2: "ddp", 4: "fsdp"}
    forks.succeed(train, tmp_path / "whole", **options)

    places = [(2, "step")] * before
    end = asked(forks, tmp_path / "resized", places, held=True, strategy=names[before], **options)
    forks.succeed(train, tmp_path / "resized", processes=after, strategy=names[after], **options)

    assert end == 2
    whole, resized = (json.loads((tmp_path / name / "weights").read_text()) for name in ("whole", "resized"))
    for name, weight in whole.items():
        torch.testing.assert_close(torch.tensor(resized[name]), torch.tensor(weight), rtol=1e-4, atol=1e-6)


def group(folder: str, **options: Any) -> None:
    """As torchrun starts it: in a session of its own, whose processes all get the signal, from outside."""
    os.setsid()
    code = "import os, signal, sys; os.killpg(int(sys.argv[1]), signal.SIGTERM)"

    class Sent(Callback):
        def on_step_start(self, fit: Fit, batch: Any) -> None:
            if fit.state.step == 3 and fit.resumed_step is None:
                subprocess.run([sys.executable, "-c", code, str(os.getpid())], start_new_session=True, check=True)

    train(folder, also=[Sent()], **options)


def test_workers_that_load_data_outlive_a_signal_to_the_whole_group(tmp_path: Path, forks: Any) -> None:
    options = {"workers": 2, "max_duration": "8st", "accumulate": 4}
    forks.succeed(train, tmp_path / "whole", **options)

    codes = forks.run(group, tmp_path / "asked", **options)

    assert codes == [INTERRUPTED], last_words(tmp_path / "asked")
    forks.succeed(train, tmp_path / "asked", **options)
    assert_same_end(tmp_path / "whole", tmp_path / "asked", 1)


class Freezing(Callback):
    """Both processes get SIGTERM, the second one when it is to do its part of the first checkpoint. When all have heard
    of it, that one stands still, with all its threads, before it says where it is."""

    def __init__(self, pid: Path) -> None:
        self._pid, self._thawed = pid, threading.Event()

    def on_checkpoint_start(self, fit: Fit) -> None:
        if fit.strategy.rank == 1 and fit.state.step == 4:
            agreement = fit._signals._agreement
            assert agreement is not None
            self._begin, agreement._begin = agreement._begin, self._freeze
            self._pid.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGTERM)
            assert self._thawed.wait(PATIENCE_S)

    def _freeze(self) -> Any:
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread too stops at once
        self._thawed.set()
        return self._begin()

    def on_step_start(self, fit: Fit, batch: Any) -> None:
        if fit.strategy.rank == 0 and fit.state.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            deadline = time.monotonic() + PATIENCE_S
            while not (agreement := fit._signals._agreement) or not agreement.begun:
                assert time.monotonic() < deadline
                time.sleep(0.005)


def with_one_that_freezes(folder: str, **options: Any) -> None:
    pid = Path(folder, "frozen")
    try:
        train(folder, also=[Freezing(pid)], grace_s=1.0, **options)
    finally:
        if os.environ["RANK"] == "0":
            os.kill(int(pid.read_text()), signal.SIGCONT)


def test_a_process_ends_within_its_grace_period_when_another_one_does_not_say_where(tmp_path: Path, forks: Any) -> None:
    """It does not wait for the checkpoint in the making either, of which the other one has a part to do."""
    options = {"strategy": "ddp", "accumulate": 4, "max_duration": "12st", "log_every": None, "plain": True}
    forks.succeed(train, tmp_path / "whole", processes=2, **options)

    codes = forks.run(with_one_that_freezes, tmp_path / "asked", processes=2, **options)

    assert codes[0] == INTERRUPTED and codes[1] > 0, (codes, last_words(tmp_path / "asked"))
    said = (tmp_path / "asked" / "rank-0.log").read_text()
    assert "the processes did not agree on where within grace_s=1 seconds: the run goes on from its last" in said, said
    forks.succeed(train, tmp_path / "asked", processes=2, **options)
    assert_same_end(tmp_path / "whole", tmp_path / "asked", 2)


class Hanging(Callback):
    """The second process stops for ever in a step, once all have agreed on where they end."""

    def on_forward_end(self, fit: Fit, loss: Any) -> None:
        agreement = fit._signals._agreement
        if fit.strategy.rank == 1 and agreement is not None and agreement.begun:
            assert agreement.wait(PATIENCE_S) is not None
            threading.Event().wait()


def with_one_that_hangs(folder: str, **options: Any) -> None:
    train(folder, also=[Hanging()], grace_s=1.0, **options)


@pytest.mark.parametrize(
    ("accumulate", "code", "message"),
    [
        (4, INTERRUPTED, "rank 1 did not come to that step within grace_s=1 seconds: no checkpoint was made"),
        (1, 1, "a process hangs, this one or one that it waits for"),
    ],
    ids=["before the last checkpoint", "in a collective"],
)
def test_a_process_that_hangs_after_agreeing_does_not_keep_the_others(
    tmp_path: Path, forks: Any, accumulate: int, code: int, message: str
) -> None:
    options = {"strategy": "ddp", "accumulate": accumulate, "max_duration": "8st", "log_every": None, "plain": True}
    forks.succeed(train, tmp_path / "whole", processes=2, **options)

    signals = (signal.SIGTERM, [(5, "step"), (5, "step")])
    codes = forks.run(with_one_that_hangs, tmp_path / "asked", processes=2, signal=signals, held=True, **options)

    assert codes == [code, 1], (codes, last_words(tmp_path / "asked"))
    assert message in (tmp_path / "asked" / "rank-0.log").read_text()
    assert "in on_forward_end" in (tmp_path / "asked" / "rank-1.log").read_text()  # where it hangs
    assert folders.by_age(tmp_path / "asked" / "checkpoints") == [4]
    forks.succeed(train, tmp_path / "asked", processes=2, **options)
    assert_same_end(tmp_path / "whole", tmp_path / "asked", 2)


class Asked(Callback):
    """Only the first process gets SIGTERM; it waits until it says so."""

    def on_step_start(self, fit: Fit, batch: Any) -> None:
        if fit.strategy.rank == 0 and fit.state.step == 2:
            warned, handler = threading.Event(), logging.StreamHandler()
            handler.addFilter(lambda record: warned.set() or True)
            logging.getLogger("trainkit").addHandler(handler)
            os.kill(os.getpid(), signal.SIGTERM)
            assert warned.wait(PATIENCE_S)


def with_one_that_is_asked(folder: str) -> None:
    agreement.WARN_AFTER_S = 0.01
    train(folder, also=[Asked()], strategy="ddp", max_duration="4st")


def test_a_signal_that_only_one_process_gets_is_reported_and_the_run_continues(tmp_path: Path, forks: Any) -> None:
    forks.succeed(with_one_that_is_asked, tmp_path, processes=2)
    said = (tmp_path / "rank-0.log").read_text()
    assert "This process was asked to end, and rank 1 was not yet. The run continues until all processes have" in said
    assert (tmp_path / "end-1").exists()
