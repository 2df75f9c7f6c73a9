"""A job that counts to forty, with a checkpoint at every step: whatever ends it, it goes on where it was."""

from __future__ import annotations

from trainyard.client import JobHandle

from tests.conftest import wait_until
from tests.jobs import document, output, python

WAIT_S = 240

COUNTING = """
    import sys, time
    from pathlib import Path
    from trainyard import tracker
    folder = Path("checkpoints")
    folder.mkdir(exist_ok=True)
    done = max((int(file.stem) for file in folder.glob("*.bin")), default=0)
    print("from", done, flush=True)
    for step in range(done + 1, 41):
        tracker.log({"step": step}, step=step)
        (folder / ".draft").write_bytes(b"%d" % step)
        (folder / ".draft").rename(folder / f"{step}.bin")
        print("step", step, flush=True)
        time.sleep(float(sys.argv[1]))
"""


def counting(pause_s: float = 0.5, **spec: object) -> dict[str, object]:
    checkpoints = {"path": "checkpoints", "pattern": "{step}.bin", "keep": {"last": 2}}
    return document(python(COUNTING, str(pause_s)), checkpoints=checkpoints, gracePeriod="2s", **spec)


def at_step(job: JobHandle, step: int) -> None:
    wait_until(lambda: f"step {step}" in output(job), f"step {step} of {job.name}", WAIT_S)
