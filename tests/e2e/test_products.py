"""What jobs leave behind comes back as it was: outputs, checkpoints, artifacts."""

import random

import pytest
from trainyard import errors

from tests.conftest import wait_until
from tests.jobs import WAIT_S, document, output, python


@pytest.fixture
def tree(tmp_path):
    """Files of many sizes, empty and deep ones, a script that may run."""
    folder = tmp_path / "tree"
    bits = random.Random(7)
    for name, size in {"empty": 0, "one": 1, "deep/er/small.txt": 900, "large.bin": 3_000_000}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bits.randbytes(size))
    (folder / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (folder / "run.sh").chmod(0o755)
    return folder


def content(folder):
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mode & 0o100)
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_an_output_comes_back_as_it_was(client, tree, tmp_path):
    job = client.submit(
        document(["cp", "-r", str(tree), "exports"], outputs=[{"path": "exports", "artifact": "model"}])
    )
    job.wait(WAIT_S)
    [version] = client.versions("model", job=job.id)
    assert (version.kind, version.producer.job_id, version.producer.fence) == ("output", job.id, 1)
    client.download("model", tmp_path / "back")
    assert content(tmp_path / "back") == content(tree)


def test_an_uploaded_tree_comes_back_as_it_was_and_is_stored_once(client, tree, tmp_path):
    first = client.upload(tree, "data", aliases=["stable"])
    again = client.upload(tree, "data")
    assert (first.number, first.files) == (1, 5)
    assert again.digest == first.digest
    client.download("data@stable", tmp_path / "back")
    assert content(tmp_path / "back") == content(tree)


def test_an_output_that_is_not_there_fails_the_job(client):
    job = client.submit(document(["true"], outputs=[{"path": "exports", "artifact": "nothing"}]))
    ended = job.wait(WAIT_S, check=False)
    assert ended.reason == "OutputsNotStored"
    assert "exports" in " ".join(ended.exit.unstored)


CHECKPOINTS = """
    import pathlib
    from trainyard import tracker
    for step, score in enumerate([0.1, 0.9, 0.2, 0.3, 0.4], 1):
        tracker.log({"score": score}, step=step)
        draft = pathlib.Path("checkpoints/draft")
        draft.write_text(f"weights {step}")
        draft.rename(f"checkpoints/step-{step}.txt")
"""


@pytest.mark.parametrize(
    ("keep", "steps"),
    [
        ({"last": 2}, [4, 5]),
        ({"last": 1, "best": {"metric": "score", "mode": "max"}}, [2, 5]),
        ({"last": 1, "best": {"metric": "score", "mode": "min"}}, [1, 5]),
    ],
)
def test_the_newest_checkpoints_and_the_best_one_are_kept(client, keep, steps):
    checkpoints = {"path": "checkpoints", "pattern": "step-{step}.txt", "keep": keep}
    job = client.submit(document(python(CHECKPOINTS), checkpoints=checkpoints))
    job.wait(WAIT_S)
    assert sorted(version.checkpoint.step for version in client.versions(job=job.id)) == steps


def test_a_retried_job_finds_its_newest_checkpoint(client):
    code = """
        import os, pathlib
        resume = os.environ.get("TRAINYARD_RESUME_FROM")
        print("resuming from", resume and pathlib.Path(resume).name, resume and pathlib.Path(resume).read_text())
        folder = pathlib.Path(os.environ["TRAINYARD_CHECKPOINT_DIR"])
        if not resume:
            for step in (1, 2):
                (folder / "draft").write_text(f"weights {step}")
                (folder / "draft").rename(folder / f"step-{step}.txt")
            raise SystemExit(1)
    """
    checkpoints = {"path": "checkpoints", "pattern": "step-{step}.txt"}
    job = client.submit(document(python(code), checkpoints=checkpoints, retries={"limit": 1, "backoff": "0s"}))
    ended = job.wait(WAIT_S)
    assert output(job) == ["resuming from None None", "resuming from step-2.txt weights 2"]
    assert ended.attempts[1].exit.resumed_from


def test_a_damaged_chunk_is_never_handed_out(client, shared_yard, tmp_path):
    (tmp_path / "file").write_bytes(random.Random(1).randbytes(50_000))
    client.upload(tmp_path / "file", "fragile")
    newest = shared_yard.packs()[-1]
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.chmod(0o600)
    newest.write_bytes(data)
    with pytest.raises(errors.Defect, match="damaged"):
        client.download("fragile", tmp_path / "back")
    assert not (tmp_path / "back" / "file").exists()


def test_what_a_forgotten_job_left_is_gone(client, shared_yard):
    job = client.submit(document(["true"], ttl="500ms"))
    ended = job.wait(WAIT_S)
    folder = shared_yard.folder / "attempts" / ended.attempt_id
    wait_until(lambda: job.id not in [each.id for each in client.list()], "the job to be forgotten")
    wait_until(lambda: not folder.exists(), "its folder to be removed")
    wait_until(lambda: not list(client.runs(f'job = "{job.id}"')), "its run to be removed")
