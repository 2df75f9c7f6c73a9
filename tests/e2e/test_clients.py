"""The Python clients against a real yard."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from trainyard import errors
from trainyard.client import AsyncClient
from trainyard.home import read_endpoint
from trainyard.spec import load
from trainyard_protos.v1 import scheduler_pb2, scheduler_pb2_grpc

from tests.conftest import wait_until
from tests.jobs import WAIT_S, document, output, python, running


@pytest.fixture
async def asynchronous(shared_yard):
    endpoint = read_endpoint(shared_yard.folder).endpoint
    async with AsyncClient(endpoint, token=(shared_yard.folder / "token").read_text().strip()) as client:
        yield client


async def test_the_asynchronous_client_submits_follows_and_reads(asynchronous):
    job = await asynchronous.submit(document(python("print('hello')"), "async"))
    followed = [line.text async for event in job.follow() for line in event.lines.lines]
    ended = await job.wait(WAIT_S)
    assert "hello" in followed
    assert [line.line.text async for line in job.logs(ranks=[0])] == ["hello"]
    assert [event.type async for event in job.events()][-1] == "Succeeded"
    assert ended.state == scheduler_pb2.JOB_STATE_SUCCEEDED


def test_a_job_is_submitted_as_mapping_text_file_or_model(client, tmp_path):
    text = (
        "apiVersion: trainyard.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: forms}\n"
        "spec: {command: ['true'], resources: {cpu: 500m}}\n"
    )
    (tmp_path / "job.yaml").write_text(text)
    for source in (document(["true"], "forms"), text, tmp_path / "job.yaml", load(text)):
        client.submit(source).wait(WAIT_S)


def test_the_same_key_gives_the_same_job(client):
    first, again = (client.submit(document(["true"]), idempotency_key="one") for _ in range(2))
    other = client.submit(document(["true"]), idempotency_key="another")
    assert first.id == again.id != other.id
    for job in (first, other):
        job.wait(WAIT_S)


def test_each_of_a_batch_succeeds_or_fails_on_its_own(client):
    answers = client.submit_batch(
        [document(["true"], "good"), document(["true"], "BAD"), *(document(["true"], f"b-{n}") for n in range(10))]
    )
    assert isinstance(answers[1], errors.InvalidSpec)
    assert "metadata.name" in [problem.field for problem in answers[1].problems]
    jobs = [answer for answer in answers if not isinstance(answer, errors.YardError)]
    assert [job.name for job in jobs] == ["good", *(f"b-{n}" for n in range(10))]
    for job in jobs:
        job.wait(WAIT_S)


def test_a_watch_goes_on_from_its_cursor_without_gap_or_repetition(client):
    job = client.submit(document(["true"], "watched"))
    job.wait(WAIT_S)
    stored = [event.seq for event in job.events()]
    assert stored == sorted(set(stored)) and len(stored) >= 4
    for cursor in (0, *stored[:-1]):
        expected = [seq for seq in stored if seq > cursor]
        watch = client.watch(job.id, cursor)
        assert [next(watch).seq for _ in expected] == expected
        watch.close()


def test_a_watch_hears_what_happens_while_it_lasts(client):
    last = max((event.seq for event in client.events()), default=0)
    watch = client.watch("", last)
    job = client.submit(document(["true"], "heard"))
    types = []
    for event in watch:
        if event.object_id == job.id:
            types.append(event.type)
        if types and types[-1] == "Succeeded":
            break
    assert types[0] == "Submitted" and "Running" in types


def test_a_list_is_filtered_and_paged(client):
    jobs = [
        client.submit(document(["true"], f"listed-{n}", labels={"parity": "odd" if n % 2 else "even"}))
        for n in range(7)
    ]
    failing = client.submit(document(["false"], "listed-fails"))
    for job in (*jobs, failing):
        job.wait(WAIT_S, check=False)

    def names(**filters):
        return [job.name for job in client.list(name_contains="listed-", **filters)]

    assert names() == ["listed-fails", *(f"listed-{n}" for n in reversed(range(7)))]
    assert names(labels={"parity": "odd"}) == ["listed-5", "listed-3", "listed-1"]
    assert names(states_in=["failed"]) == ["listed-fails"]
    assert names(limit=3) == ["listed-fails", "listed-6", "listed-5"]


def test_pages_of_a_list_join_without_gap_or_repetition(shared_yard, client):
    for job in [client.submit(document(["true"], f"paged-{n}")) for n in range(5)]:
        job.wait(WAIT_S)
    metadata = [("authorization", "Bearer " + (shared_yard.folder / "token").read_text().strip())]
    request = scheduler_pb2.ListJobsRequest(name_contains="paged-", page_size=2)
    pages = []
    with grpc.insecure_channel(read_endpoint(shared_yard.folder).endpoint) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        while not pages or request.page_token:
            answer = stub.ListJobs(request, metadata=metadata, timeout=WAIT_S)
            pages.append([job.name for job in answer.jobs])
            request.page_token = answer.next_page_token
    assert pages == [["paged-4", "paged-3"], ["paged-2", "paged-1"], ["paged-0"]]


def test_owned_jobs_are_listed_when_asked_for(client):
    owner = scheduler_pb2.Owner(kind="Study", id="s-1")
    job = client.submit(document(["true"], "owned"), owner=owner)
    job.wait(WAIT_S)
    assert not any(client.list(name_contains="owned"))
    assert [each.id for each in client.list(name_contains="owned", include_owned=True)] == [job.id]
    assert [each.id for each in client.list(owner=owner)] == [job.id]


def test_errors_have_a_class_a_reason_and_a_hint(client):
    with pytest.raises(errors.NotFound) as missing:
        client.job("no-such-job")
    assert missing.value.reason == "JobNotFound" and missing.value.hint
    failing = client.submit(document(["false"], "sdk-fails"))
    with pytest.raises(errors.JobFailed) as failed:
        failing.wait(WAIT_S)
    assert failed.value.exit_code == 1
    with pytest.raises(errors.InvalidSpec) as invalid:
        client.submit(document(["true"], "x", nodes=0, priority="high"))
    assert {problem.field for problem in invalid.value.problems} == {"spec.nodes", "spec.priority"}


def test_several_threads_share_a_client(client):
    def once(number):
        job = client.submit(document(["echo", str(number)]))
        job.wait(WAIT_S)
        return output(job)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(once, range(8))) == [[str(number)] for number in range(8)]


def test_a_running_job_is_described_with_what_it_uses(client, tmp_path):
    os.mkfifo(tmp_path / "gate")
    job = client.submit(document(["cat", str(tmp_path / "gate")], workersPerNode=1))

    running(job)

    def used():
        nodes = client.describe(job.id).nodes
        return nodes and nodes[0].workers and nodes[0].workers[0].usage.memory_bytes

    assert wait_until(used, "a sample of the worker's memory") < 64 * 2**20
    (tmp_path / "gate").write_text("")
    job.wait(WAIT_S)


def test_waiting_has_a_limit_and_the_job_goes_on(client, tmp_path):
    os.mkfifo(tmp_path / "gate")
    job = client.submit(document(["cat", str(tmp_path / "gate")]))
    with pytest.raises(asyncio.TimeoutError):
        job.wait(0.05)
    (tmp_path / "gate").write_text("")
    job.wait(WAIT_S)
