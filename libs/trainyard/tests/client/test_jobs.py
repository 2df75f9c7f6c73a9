from pathlib import Path

import grpc
import pytest
from trainyard import errors
from trainyard.client import AsyncClient, AsyncJobHandle
from trainyard.client.documents import MAX_BYTES
from trainyard_protos.v1 import scheduler_pb2

from libs.trainyard.tests.client.scripted import JOB_ID, Refusal, ScriptedYard, document, event, job

NOT_PACKED = Refusal(grpc.StatusCode.FAILED_PRECONDITION, "pack it", "CodeNotPacked")


async def test_a_file_is_sent_as_it_is(yard: ScriptedYard, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("kind: TrainingJob  # as written\n")
    async with AsyncClient() as client:
        handle = await client.submit(file)
    assert (handle.id, handle.name) == (JOB_ID, "digits")
    (request,) = yard.asked("Submit")
    assert request.document.text == "kind: TrainingJob  # as written\n"
    assert request.document.filename == str(file)
    assert request.workspace == "default"
    assert request.idempotency_key


class _Model:
    def to_json(self) -> str:
        return document()


@pytest.mark.parametrize("source", ["kind: TrainingJob\n", document(), {"kind": "TrainingJob"}, _Model()])
async def test_a_job_can_be_text_a_mapping_or_a_model(yard: ScriptedYard, source: object) -> None:
    async with AsyncClient() as client:
        await client.submit(source)  # type: ignore[arg-type]
    assert "TrainingJob" in yard.asked("Submit")[0].document.text


async def test_every_submission_has_an_idempotency_key_of_its_own(yard: ScriptedYard) -> None:
    async with AsyncClient() as client:
        await client.submit(document())
        await client.submit(document())
        await client.submit(document(), idempotency_key="mine")
    first, second, third = (request.idempotency_key for request in yard.asked("Submit"))
    assert first != second
    assert third == "mine"


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "FileUnreadable"), (b"\xff\xfe\x00", "NotText"), (b"#" * (MAX_BYTES + 1), "DocumentTooLarge")],
)
async def test_an_unreadable_file_is_refused_before_anything_is_sent(
    yard: ScriptedYard, tmp_path: Path, content: bytes | None, reason: str
) -> None:
    file = tmp_path / "job.yaml"
    if content is not None:
        file.write_bytes(content)
    async with AsyncClient() as client:
        with pytest.raises(errors.InvalidArgument) as caught:
            await client.submit(file)
    assert caught.value.reason == reason
    assert yard.calls == []


async def test_code_is_packed_when_the_yard_asks_for_it(yard: ScriptedYard, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("print('hi')\n")
    file = tmp_path / "job.json"
    file.write_text(document(code={"path": "src"}))
    yard.refusals["Submit"] = [NOT_PACKED]
    async with AsyncClient() as client:
        await client.submit(file)
    refused, accepted = yard.asked("Submit")
    assert refused.packed_code == ""
    assert accepted.packed_code == "digits-code@4"
    assert accepted.idempotency_key == refused.idempotency_key
    (commit,) = yard.asked("Commit")
    assert [each.path for each in commit.manifest.files] == ["train.py"]
    (chunks,) = yard.asked("PutChunks")
    assert chunks[0].data == b"print('hi')\n"


async def test_leftovers_and_credentials_are_not_packed_and_that_is_told(
    yard: ScriptedYard, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("train.py", "exports/model.bin", "exports/x/y", "ckpt/step-9.pt", "ckpt/notes", ".env", "a/id_rsa"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("x")
    file = tmp_path / "job.json"
    outputs = [{"path": "exports", "artifact": "model"}]
    checkpoints = {"path": "ckpt", "pattern": "step-{step}.pt"}
    file.write_text(document(code={"path": "."}, outputs=outputs, checkpoints=checkpoints))
    yard.refusals["Submit"] = [NOT_PACKED]
    async with AsyncClient() as client:
        await client.submit(file)
    (commit,) = yard.asked("Commit")
    assert [each.path for each in commit.manifest.files] == ["job.json", "train.py"]
    results, credentials = caplog.messages
    assert "not packed: 'ckpt' (2 files), 'exports' (2 files): the job writes its outputs or checkpoints" in results
    assert "spec.inputs" in results
    assert "not packed: '.env', 'a/id_rsa': looks like credentials" in credentials
    assert "spec.secrets" in credentials


@pytest.mark.parametrize(
    ("command", "suggestion"),
    [
        (["python", "-X", "dev", "trian.py", "--x"], '["python", "-X", "dev", "train.py", "--x"]'),
        (["train.py", "--x"], '["python", "train.py", "--x"]'),
        (["./train.py"], '["src/train.py"]'),
        (["trian.py"], '["python", "train.py"]'),
        (["sh", "start.sh"], ""),
    ],
)
async def test_a_command_whose_script_is_not_there_is_refused_with_the_one_that_was_meant(
    yard: ScriptedYard, tmp_path: Path, command: list[str], suggestion: str
) -> None:
    scripts = tmp_path / "src" if command == ["./train.py"] else tmp_path
    scripts.mkdir(exist_ok=True)
    (scripts / "train.py").touch()
    file = tmp_path / "job.json"
    file.write_text(document(command=command, code={"path": "."}))
    yard.refusals["Submit"] = [NOT_PACKED]
    async with AsyncClient() as client:
        with pytest.raises(errors.InvalidSpec) as caught:
            await client.submit(file)
    (problem,) = caught.value.problems
    assert problem.field.startswith("spec.command[")
    assert problem.suggestion == suggestion
    assert yard.asked("Commit") == []


@pytest.mark.parametrize(
    "command",
    [
        ["python", "-c", "x.py"],
        ["python", "-m", "x"],
        ["python", "data/x.py"],
        ["python", "package", "--x"],
        ["/opt/x.py"],
        ["bash", "-ec", "x.sh"],
    ],
)
async def test_a_command_that_names_no_script_of_the_code_is_left_alone(
    yard: ScriptedYard, tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").touch()
    file = tmp_path / "job.json"
    file.write_text(document(command=command, code={"path": "."}, inputs=[{"artifact": "set", "path": "data"}]))
    yard.refusals["Submit"] = [NOT_PACKED]
    async with AsyncClient() as client:
        await client.submit(file)
    assert len(yard.asked("Submit")) == 2


async def test_missing_code_is_named(yard: ScriptedYard, tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_text(document(code={"path": "nowhere"}))
    yard.refusals["Submit"] = [NOT_PACKED]
    async with AsyncClient() as client:
        with pytest.raises(errors.InvalidArgument, match="nowhere"):
            await client.submit(file)


async def test_each_of_a_batch_is_answered_on_its_own(yard: ScriptedYard, tmp_path: Path) -> None:
    (tmp_path / "path.json").write_text(document(code={"path": "."}))
    async with AsyncClient() as client:
        good, bad, packed = await client.submit_batch(["one\n", "bad\n", tmp_path / "path.json"])
    assert isinstance(good, AsyncJobHandle)
    assert good.name == "one"
    assert isinstance(bad, errors.InvalidSpec)
    assert bad.problems[0].field == "spec.command"
    assert isinstance(packed, AsyncJobHandle)


async def test_listing_reads_every_page_up_to_the_limit(yard: ScriptedYard) -> None:
    yard.jobs = [job(name=f"job-{number}") for number in range(5)]
    async with AsyncClient() as client:
        everything = [each.name async for each in client.list(states_in=["running", "failed"], labels={"a": "b"})]
        some = [each.name async for each in client.list(limit=3)]
    assert everything == ["job-0", "job-1", "job-2", "job-3", "job-4"]
    assert some == ["job-0", "job-1", "job-2"]
    request = yard.asked("ListJobs")[0]
    assert list(request.states) == [scheduler_pb2.JOB_STATE_RUNNING, scheduler_pb2.JOB_STATE_FAILED]
    assert dict(request.labels) == {"a": "b"}


async def test_an_unknown_state_names_those_there_are(yard: ScriptedYard) -> None:
    async with AsyncClient() as client:
        with pytest.raises(errors.InvalidArgument) as caught:
            [each async for each in client.list(states_in=["runing"])]
    assert "running" in caught.value.hint


async def test_a_yard_that_came_back_answers_the_first_call(yard: ScriptedYard) -> None:
    async with AsyncClient() as client:
        await client.get(JOB_ID)
        await yard.stop()
        with pytest.raises(errors.NotRunning):
            await client.get(JOB_ID)
        await yard.start()
        assert (await client.get(JOB_ID)).id == JOB_ID


async def test_watching_goes_on_where_it_was_when_the_yard_restarts(yard: ScriptedYard) -> None:
    yard.events = [
        [event(1, "Submitted", "queued"), event(2, "Admitted", "starting"), "die"],
        [event(3, "Running", "running")],
    ]
    async with AsyncClient() as client:
        seen = [each.seq async for each in client.watch(JOB_ID)]
    assert seen == [1, 2, 3]
    assert [request.after_seq for request in yard.asked("Watch")] == [0, 2]


async def test_watching_ends_at_once_when_the_yard_was_shut_down(yard: ScriptedYard) -> None:
    yard.events = [[event(1, "Submitted", "queued"), Refusal(grpc.StatusCode.UNAVAILABLE, "going down")]]
    (yard.folder / "yard.json").rename(yard.folder / "gone")
    async with AsyncClient(f"127.0.0.1:{yard.port}") as client:
        client._connection.target = type(client._connection.target)(
            client._connection.target.endpoint, "a-token", home=yard.folder
        )
        with pytest.raises(errors.NotRunning):
            [each async for each in client.watch(JOB_ID)]


async def test_a_job_can_be_named_anywhere_as_people_name_it(yard: ScriptedYard) -> None:
    async with AsyncClient() as client:
        await client.series("@last")
        [each async for each in client.versions(job="digits")]
        await client.stacks(JOB_ID)
    assert [request.id for request in yard.asked("GetJob")] == ["@last", "digits"]
    assert yard.asked("ListSeries")[0].selector.job_id == JOB_ID
    assert yard.asked("ListVersions")[0].job_id == JOB_ID


async def test_waiting_ends_with_the_job(yard: ScriptedYard) -> None:
    yard.events = [[event(1, "Running", "running"), event(2, "Succeeded", "succeeded")]]
    async with AsyncClient() as client:
        handle = await client.job(JOB_ID)
        yard.job = job("running", event_seq=0)
        waiting = handle.wait(check=False)
        found = await waiting
    assert found.id == JOB_ID


@pytest.mark.parametrize(("state", "kind"), [("failed", errors.JobFailed), ("cancelled", errors.JobCancelled)])
async def test_waiting_raises_unless_the_job_succeeded(
    yard: ScriptedYard, state: str, kind: type[errors.YardError]
) -> None:
    yard.job = job(state, reason="RetryLimit", message="wrong data")
    async with AsyncClient() as client:
        handle = await client.job(JOB_ID)
        with pytest.raises(kind, match="wrong data"):
            await handle.wait()
        assert (await handle.wait(check=False)).reason == "RetryLimit"
