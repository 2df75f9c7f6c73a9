"""What a worker finds when it starts: variables, secrets, inputs, code, Python packages."""

import hashlib
import os
import subprocess

import pytest

from tests.jobs import WAIT_S, document, output, python, reasons

SECRET = "correct-horse-battery-staple"


@pytest.fixture(scope="module")
def mode():
    """Workers are the agent's business, which is the same process in both modes."""
    return "embedded"


@pytest.fixture(scope="module")
def yard_settings():
    return {"TRAINYARD_LAUNCHER_CAPACITY_CPU": "16", "KEY_OF_THE_LAUNCHER": SECRET}


def print_variable(name):
    return python(f"import os; print(os.environ.get({name!r}))")


def test_variables_of_the_spec_reach_the_workers(client):
    job = client.submit(document(print_variable("GREETING"), env={"GREETING": "hello"}))
    job.wait(WAIT_S)
    assert output(job) == ["hello"]


def test_workers_are_told_who_they_are(client):
    code = (
        "import os; print(*(os.environ['TRAINYARD_' + n] for n in ('JOB_ID', 'JOB_NAME', 'ATTEMPT', 'NODE', 'RANK')))"
    )
    job = client.submit(document(python(code), "who"))
    job.wait(WAIT_S)
    assert output(job) == [f"{job.id} who 1 0 0"]


def hash_of(variable):
    return python(f"import hashlib, os; print(hashlib.sha256(os.environ[{variable!r}].encode()).hexdigest())")


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def files_with(folder, text):
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_a_secret_reaches_the_workers_and_is_stored_nowhere(client, shared_yard, tmp_path):
    (tmp_path / "key").write_text(SECRET + "\n")
    for source in ({"env": "KEY_OF_THE_LAUNCHER"}, {"file": str(tmp_path / "key")}):
        job = client.submit(document(hash_of("KEY"), secrets=[{"name": "KEY", "from": source}]))
        job.wait(WAIT_S)
        assert output(job) == [digest(SECRET)]
    assert files_with(shared_yard.folder, SECRET) == []
    assert SECRET not in str(list(client.events())) + str(job.status())


def test_a_secret_that_is_not_there_fails_the_job_and_names_it(client):
    job = client.submit(document(["true"], secrets=[{"name": "KEY", "from": {"env": "NOT_SET_ANYWHERE"}}]))
    ended = job.wait(WAIT_S, check=False)
    assert ended.reason == "SecretUnavailable"
    assert "NOT_SET_ANYWHERE" in ended.message


def test_inputs_are_unpacked_where_the_spec_says(client, tmp_path):
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "data" / "deep" / "numbers.txt").write_text("1 2 3")
    client.upload(tmp_path / "data", "numbers", aliases=["stable"])
    for reference in ("numbers", "numbers@1", "numbers@stable"):
        inputs = [{"artifact": reference, "path": "in/here"}]
        job = client.submit(document(["cat", "in/here/deep/numbers.txt"], inputs=inputs))
        job.wait(WAIT_S)
        assert output(job) == ["1 2 3"]


def test_an_input_that_is_not_there_fails_the_job_and_names_it(client):
    job = client.submit(document(["true"], inputs=[{"artifact": "nowhere@7", "path": "data"}]))
    ended = job.wait(WAIT_S, check=False)
    assert ended.reason == "InputUnavailable"
    assert "nowhere@7" in ended.message


def code_folder(folder):
    for name in ("train.py", "kept.txt", "ignored.log", "private.key", "data/big.bin"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("print('code')")
    (folder / ".gitignore").write_text("*.log\n")
    (folder / ".yardignore").write_text("*.key\n")
    return folder


LIST_FILES = python("import os; print(*sorted(os.path.join(r, f)[2:] for r, _, fs in os.walk('.') for f in fs))")


def test_code_travels_without_what_is_ignored_or_excluded(client, tmp_path):
    code = {"path": str(code_folder(tmp_path)), "exclude": ["data/"]}
    job = client.submit(document(LIST_FILES, code=code))
    job.wait(WAIT_S)
    files = output(job)[0].split()
    assert {"train.py", "kept.txt"} <= set(files)
    assert not {"ignored.log", "private.key", "data/big.bin"} & set(files)


def test_code_can_be_an_artifact(client, tmp_path):
    client.upload(code_folder(tmp_path), "my-code", kind="code")
    job = client.submit(document(["python", "train.py"], code={"artifact": "my-code@latest"}))
    job.wait(WAIT_S)
    assert output(job) == ["code"]


@pytest.fixture
def repository(tmp_path):
    """A git repository with `jobs/train.py` that says which commit it is of: first (tag v1), then second (main)."""
    folder = tmp_path / "repository"
    (folder / "jobs").mkdir(parents=True)
    environ = os.environ | {
        f"GIT_{who}_{what}": "x@example.com" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }

    def git(*arguments):
        return subprocess.run(
            ["git", *arguments], cwd=folder, env=environ, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q", "-b", "main")
    for word in ("first", "second"):
        (folder / "jobs" / "train.py").write_text(f"print({word!r})")
        git("add", ".")
        git("commit", "-q", "-m", word)
        if word == "first":
            git("tag", "v1")
    return folder, git("rev-parse", "v1"), git("rev-parse", "main")


def test_code_can_be_a_commit_a_tag_or_a_branch_of_a_git_repository(client, repository):
    folder, first, _ = repository
    for ref, word in ((first, "first"), ("v1", "first"), ("main", "second")):
        code = {"git": {"url": folder.as_uri(), "ref": ref, "path": "jobs"}}
        job = client.submit(document(["python", "train.py"], code=code))
        job.wait(WAIT_S)
        assert output(job) == [word], ref


@pytest.mark.parametrize("broken", [{"ref": "no-such-tag"}, {"path": "no/such/folder"}, {"url": "file:///nowhere.git"}])
def test_code_that_git_cannot_get_fails_the_job_and_is_not_tried_again(client, repository, broken):
    git = {"url": repository[0].as_uri(), "ref": "v1", "path": "jobs"} | broken
    job = client.submit(document(["python", "train.py"], code={"git": git}, retries={"limit": 2, "backoff": "0s"}))
    ended = job.wait(WAIT_S, check=False)
    assert (ended.reason, ended.attempt) == ("CodeUnavailable", 1)
    assert next(iter(broken.values())) in ended.message


def test_requirements_become_an_environment_that_the_next_job_shares(client, shared_yard, tmp_path):
    (tmp_path / "requirements.txt").write_text("six==1.17.0\n")
    (tmp_path / "train.py").write_text("import six; print(six.__version__, six.__file__)")
    spec = document(["python", "train.py"], code={"path": str(tmp_path)}, python={"requirements": "requirements.txt"})
    environments = shared_yard.folder / "cache" / "envs"
    jobs = []
    for _ in range(2):
        jobs.append(client.submit(spec))
        jobs[-1].wait(WAIT_S)
    first, second = (output(job, 0) for job in jobs)
    assert first == second
    assert first[0].startswith("1.17.0 " + str(environments))
    assert len([path for path in environments.iterdir() if path.is_dir()]) == 1


def test_requirements_that_cannot_be_met_fail_the_job_with_their_reason(client, tmp_path):
    (tmp_path / "requirements.txt").write_text("six==999.0\n")
    spec = document(["true"], code={"path": str(tmp_path)}, python={"requirements": "requirements.txt"})
    job = client.submit(spec)
    ended = job.wait(WAIT_S, check=False)
    assert reasons(job) == ["EnvironmentFailed"]
    assert "six==999.0" in ended.message
