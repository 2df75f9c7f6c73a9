"""What Prometheus is shown of attempts and of their agents' silence."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from launcher_yard import WAIT_S, Yard, running_yard

FOREVER = [sys.executable, "-c", "import signal; signal.pause()"]


def phase(yard: Yard, name: str) -> float | None:
    labels = {"pool": yard.settings.pool, "phase": name}
    return yard.registry.get_sample_value("trainyard_launcher_attempts", labels)


def silence(yard: Yard, job_id: str, heard: str) -> float | None:
    labels = {"workspace": "default", "job": job_id, "job_name": "test", "attempt": "1"}
    return yard.registry.get_sample_value("trainyard_attempt_silence_seconds", labels | {"heard": heard})


async def until_silent(yard: Yard, job_id: str, heard: str, seconds: float) -> None:
    async with asyncio.timeout(WAIT_S):
        while (silence(yard, job_id, heard) or 0) < seconds:
            await asyncio.sleep(0.02)


async def test_attempts_are_counted_by_phase_until_they_are_over(tmp_path: Path) -> None:
    async with running_yard(tmp_path) as yard:
        assert (phase(yard, "starting"), phase(yard, "running")) == (0, 0)
        attempt = await yard.run(FOREVER)
        job_id = yard.job_of(attempt)
        assert phase(yard, "running") == 1
        assert silence(yard, job_id, "yes") is not None
        yard.send_stop(attempt)
        await yard.scheduler.ended(attempt)
        async with asyncio.timeout(WAIT_S):
            while phase(yard, "running") or phase(yard, "ended"):
                await asyncio.sleep(0.02)
        assert silence(yard, job_id, "yes") is None


async def test_the_silence_of_an_agent_grows_and_says_whether_it_was_ever_heard(tmp_path: Path) -> None:
    async with running_yard(tmp_path) as yard:
        heard = await yard.run(FOREVER, env={"AGENT_MODE": "silent"})
        unheard = yard.assign(FOREVER, env={"AGENT_MODE": "mute"})
        yard.send_launch(unheard)
        await until_silent(yard, yard.job_of(heard), "yes", 0.5)
        await until_silent(yard, yard.job_of(unheard), "no", 0.5)
        assert silence(yard, yard.job_of(heard), "no") is None
        for attempt in (heard, unheard):
            yard.send_stop(attempt)
