"""Kills at random moments, then everything is counted: nothing lost, nothing twice, nothing left behind."""

import random
from collections import Counter
from pathlib import Path

import psutil
import pytest
from trainyard_protos.v1 import scheduler_pb2

from tests.conftest import wait_until

STEPS = 60
JOBS = 3
ROUNDS = 7

TRAINER = f"""
    import os, pathlib, re, time
    from trainyard import tracker

    marks = pathlib.Path(os.environ["MARKS"])
    me = os.environ["TRAINYARD_JOB_NAME"]

    def mark(name, text):  # one write with O_APPEND: complete or absent, whoever dies
        descriptor = os.open(marks / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, f"{{me}} {{text}}\\n".encode())
        os.close(descriptor)

    folder = pathlib.Path("checkpoints")
    folder.mkdir(exist_ok=True)
    resume = os.environ.get("TRAINYARD_RESUME_FROM")
    start = int(re.search(r"step-(\\d+)", resume)[1]) if resume else 0
    mark("starts", os.environ["TRAINYARD_ATTEMPT"])
    for step in range(start + 1, {STEPS} + 1):
        time.sleep(0.05)
        tracker.log({{"loss": 1.0 / step}}, step=step)
        mark("steps", step)
        if step % 5 == 0:
            draft = folder / "draft"
            draft.write_text(f"weights {{step}}")
            draft.rename(folder / f"step-{{step}}.txt")
    pathlib.Path("exports").mkdir(exist_ok=True)
    pathlib.Path("exports/model.txt").write_text(me)
"""

SPEC = """
    command: [python, train.py]
    code: {{path: .}}
    env: {{MARKS: {marks}}}
    resources: {{cpu: 100m, memory: 128Mi}}
    checkpoints: {{path: checkpoints, pattern: "step-{{step}}.txt"}}
    outputs: [{{path: exports, artifact: {name}-model}}]
    retries: {{limit: 50, backoff: 100ms}}
    gracePeriod: 5s
"""


def marked(folder: Path, name: str) -> list[str]:
    path = folder / name
    return path.read_text().splitlines() if path.exists() else []


def kill_some(yard, rng: random.Random) -> None:
    """The yard, agents, workers, or several of them at once."""
    victims = rng.choice(["yard", "agent", "worker", "burst", "twice"])
    processes = {"agent": yard.agents, "worker": yard.workers}.get(victims, lambda: [*yard.agents(), *yard.workers()])()
    if victims in ("agent", "worker", "burst"):
        for process in rng.sample(processes, min(len(processes), 3 if victims == "burst" else 1)):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue  # ended by itself meanwhile
    for _ in range({"yard": 1, "burst": 1, "twice": 2}.get(victims, 0)):
        yard.kill()
        yard.up()


@pytest.mark.parametrize("seed", [1, 2])
def test_kills_at_random_moments_lose_nothing_and_do_nothing_twice(yard, job_file, tmp_path, seed):
    rng = random.Random(seed)
    marks = tmp_path / "marks"
    marks.mkdir()
    with yard.client() as client:
        names = [f"job-{number}" for number in range(JOBS)]
        jobs = [client.submit(job_file(TRAINER, SPEC.format(marks=marks, name=name), name)).id for name in names]
        for _ in range(ROUNDS):
            goal = len(marked(marks, "steps")) + rng.randint(1, 25)
            wait_until(lambda goal=goal: len(marked(marks, "steps")) >= goal or _over(client, jobs), "some steps")
            kill_some(yard, rng)
        wait_until(lambda: _over(client, jobs), "the end of every job")
        for name, job_id in zip(names, jobs, strict=True):
            _assert_whole(client, name, job_id, tmp_path / "downloads")
        starts = Counter(marked(marks, "starts"))
        assert max(starts.values()) == 1, f"an attempt was started twice: {starts}"
        attempts = [attempt.id for job_id in jobs for attempt in client.job(job_id).status().attempts]
    yard.down()
    yard.assert_nothing_left()
    cgroups = {path.name for path in Path("/sys/fs/cgroup").glob("*/trainyard-*")}
    assert not [name for name in cgroups for attempt in attempts if attempt in name]


def _over(client, jobs) -> bool:
    ends = (scheduler_pb2.JOB_STATE_SUCCEEDED, scheduler_pb2.JOB_STATE_FAILED, scheduler_pb2.JOB_STATE_CANCELLED)
    return all(client.job(job_id).status().state in ends for job_id in jobs)


def _assert_whole(client, name: str, job_id: str, target: Path) -> None:
    job = client.job(job_id)
    status = job.status()
    assert status.state == scheduler_pb2.JOB_STATE_SUCCEEDED, (name, status.reason, status.message)
    assert [attempt.number for attempt in status.attempts] == list(range(1, status.attempt + 1))
    assert list(job.metrics("loss")["loss"].step) == list(range(1, STEPS + 1))
    versions = list(client.versions(kind="checkpoint", job=job_id))
    assert max(version.checkpoint.step for version in versions) == STEPS
    for version in versions:
        client.download(version.id, target / version.id)
        step = version.checkpoint.step
        assert (target / version.id / f"step-{step}.txt").read_text() == f"weights {step}"
    client.download(f"{name}-model", target / name)
    assert (target / name / "model.txt").read_text() == name
