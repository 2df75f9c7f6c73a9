"""What users see: finding, listing, watching, submitting twice, and errors that teach."""

import asyncio
from pathlib import Path

import grpc
import pytest
from servicekit.errors import PROBLEMS_KEY, reason_of
from trainyard_protos.v1 import common_pb2 as c
from trainyard_protos.v1 import scheduler_pb2 as s

from services.scheduler.tests.conftest import OpenYard
from services.scheduler.tests.yard import COMPLETED, Yard, document


async def refused(call: "grpc.aio.UnaryUnaryCall[object, object]") -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value


async def test_the_same_key_returns_the_same_job_whatever_the_document(yard: Yard) -> None:
    first = await yard.users.Submit(
        s.SubmitRequest(document=s.Document(text=document("one")), idempotency_key="nightly")
    )
    second = await yard.users.Submit(
        s.SubmitRequest(document=s.Document(text=document("two")), idempotency_key="nightly")
    )
    assert (first.created, second.created) == (True, False)
    assert first.job == second.job


async def test_a_key_used_at_the_same_time_makes_one_job(yard: Yard) -> None:
    jobs = await asyncio.gather(*(yard.submit(key="once") for _ in range(20)))
    assert len({job.id for job in jobs}) == 1


async def test_each_entry_of_a_batch_succeeds_or_fails_on_its_own(yard: Yard) -> None:
    texts = [document("a"), document("b", nodes=0), document("a"), document("c", code={"path": "."})]
    batch = [s.SubmitRequest(document=s.Document(text=text)) for text in texts]
    batch[2].idempotency_key = batch[0].idempotency_key = "same"
    results = (await yard.users.SubmitBatch(s.SubmitBatchRequest(requests=batch))).results
    assert [result.code for result in results] == [
        0,
        grpc.StatusCode.INVALID_ARGUMENT.value[0],
        0,
        grpc.StatusCode.FAILED_PRECONDITION.value[0],
    ]
    assert results[0].submitted.job.id == results[2].submitted.job.id
    assert results[1].problems.problems[0].field == "spec.nodes"
    assert results[3].reason == "CodeNotPacked" and results[3].hint


async def test_a_wrong_document_comes_back_with_every_problem_and_creates_nothing(yard: Yard) -> None:
    text = document(nodes=0, resourcs={"cpu": 1})
    error = await refused(yard.users.Submit(s.SubmitRequest(document=s.Document(text=text, filename="job.yaml"))))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    metadata = dict(error.trailing_metadata())
    problems = c.Problems.FromString(metadata[PROBLEMS_KEY]).problems
    assert {problem.field for problem in problems} == {"spec.nodes", "spec.resourcs"}
    assert {problem.file for problem in problems} == {"job.yaml"}
    assert not (await yard.users.ListJobs(s.ListJobsRequest())).jobs


async def test_code_that_is_a_folder_has_to_be_packed_first(yard: Yard) -> None:
    text = document(code={"path": "."})
    error = await refused(yard.users.Submit(s.SubmitRequest(document=s.Document(text=text))))
    assert reason_of(error) == "CodeNotPacked"
    packed = await yard.submit(text, packed_code="digits-code@3")
    assert '"artifact":"digits-code@3"' in packed.resolved
    assert '"path"' not in packed.resolved


async def test_what_is_longer_than_any_name_is_refused_before_it_is_looked_for(yard: Yard) -> None:
    longer = "x" * 100_000
    for call in (
        yard.users.GetJob(s.GetJobRequest(id=longer)),
        yard.users.ListJobs(s.ListJobsRequest(name_contains=longer)),
    ):
        assert reason_of(await refused(call)) == "TooLong"


async def test_event_numbers_beyond_any_are_refused(yard: Yard) -> None:
    error = await refused(yard.users.ListEvents(s.ListEventsRequest(after_seq=2**64 - 1)))
    assert reason_of(error) == "ValueOutOfRange"


async def test_a_job_is_found_by_id_prefix_name_number_and_age(yard: Yard) -> None:
    first, second = await yard.submit(document("alpha")), await yard.submit(document("beta"))
    unique = next(second.id[:n] for n in range(1, 36) if not first.id.startswith(second.id[:n]))
    for reference in (second.id, unique, "beta", "beta#1", "@last", "@-1"):
        assert (await yard.job(reference)).id == second.id
    assert (await yard.job("@-2")).id == first.id


async def test_a_name_selects_its_newest_job_and_a_number_an_earlier_one(yard: Yard) -> None:
    jobs = [await yard.submit(document("twin")) for _ in range(3)]
    await yard.submit(document("other"))
    assert [job.number for job in jobs] == [1, 2, 3]
    assert (await yard.job("twin")).id == jobs[2].id
    assert (await yard.job("twin#2")).id == jobs[1].id
    error = await refused(yard.users.GetJob(s.GetJobRequest(id="twin#4")))
    assert error.code() == grpc.StatusCode.NOT_FOUND
    assert "twin#3" in c.ErrorInfo.FromString(dict(error.trailing_metadata())["trainyard-error-bin"]).hint


async def test_a_name_cancels_the_only_job_of_that_name_that_has_not_ended(yard: Yard) -> None:
    jobs = [await yard.submit(document("twin")) for _ in range(3)]
    error = await refused(yard.users.CancelJob(s.CancelJobRequest(id="twin")))
    assert reason_of(error) == "AmbiguousJob"
    assert all(job.id in (error.details() or "") and f"twin#{job.number}" in error.details() for job in jobs)
    for reference in ("twin#2", "@last"):
        await yard.users.CancelJob(s.CancelJobRequest(id=reference))
    assert (await yard.users.CancelJob(s.CancelJobRequest(id="twin"))).id == jobs[0].id


async def test_a_prefix_of_several_ids_is_refused_with_the_ids(yard: Yard) -> None:
    jobs = [await yard.submit(document(name)) for name in ("alpha", "beta")]
    error = await refused(yard.users.GetJob(s.GetJobRequest(id=jobs[0].id[:6])))
    assert reason_of(error) == "AmbiguousJob"
    assert all(job.id in (error.details() or "") for job in jobs)


@pytest.mark.parametrize("reference", ["@first", "@-0", "@2", "digits#", "digits#0", "#1", "digits#x"])
async def test_what_is_no_reference_is_refused_with_the_forms_there_are(yard: Yard, reference: str) -> None:
    error = await refused(yard.users.GetJob(s.GetJobRequest(id=reference)))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "name#7" in c.ErrorInfo.FromString(dict(error.trailing_metadata())["trainyard-error-bin"]).hint


async def test_a_name_that_is_not_there_brings_the_nearest(yard: Yard) -> None:
    await yard.submit(document("digits"))
    error = await refused(yard.users.GetJob(s.GetJobRequest(id="digts")))
    assert error.code() == grpc.StatusCode.NOT_FOUND
    info = c.ErrorInfo.FromString(dict(error.trailing_metadata())["trainyard-error-bin"])
    assert "digits" in info.hint


@pytest.mark.parametrize("handle", ["", "%", "_", "@last", "@-2", "digits#1", "no'; --"])
async def test_nothing_is_found_where_nothing_is(yard: Yard, handle: str) -> None:
    error = await refused(yard.users.GetJob(s.GetJobRequest(id=handle)))
    assert error.code() == grpc.StatusCode.NOT_FOUND


async def test_another_workspace_is_not_found(yard: Yard) -> None:
    for call in (
        yard.users.ListJobs(s.ListJobsRequest(workspace="other")),
        yard.users.Submit(s.SubmitRequest(workspace="other", document=s.Document(text=document()))),
    ):
        assert (await refused(call)).code() == grpc.StatusCode.NOT_FOUND


async def test_a_list_comes_in_pages_newest_first_and_without_gaps(yard: Yard) -> None:
    batch = [s.SubmitRequest(document=s.Document(text=document(f"job-{i}"))) for i in range(25)]
    await yard.users.SubmitBatch(s.SubmitBatchRequest(requests=batch))
    names, token = [], ""
    while True:
        page = await yard.users.ListJobs(s.ListJobsRequest(page_size=10, page_token=token))
        names.extend(job.name for job in page.jobs)
        if not (token := page.next_page_token):
            break
        await yard.submit(document("newer"))  # what comes meanwhile does not move the pages
    assert names == [f"job-{i}" for i in reversed(range(25))]


async def test_a_list_is_filtered_by_state_name_queue_labels_and_owner(yard: Yard) -> None:
    await yard.submit(document("digits", labels={"team": "vision"}))
    await yard.submit(document("words", queue="night"))
    await yard.submit(document("trial"), owner=s.Owner(kind="Study", id="s1"))
    gone = await yard.submit(document("gone"))
    await yard.users.CancelJob(s.CancelJobRequest(id=gone.id))

    async def names(**fields: object) -> list[str]:
        page = await yard.users.ListJobs(s.ListJobsRequest(**fields))  # type: ignore[arg-type]
        return sorted(job.name for job in page.jobs)

    assert await names() == ["digits", "gone", "words"]
    assert await names(states=[s.JOB_STATE_QUEUED]) == ["digits", "words"]
    assert await names(name_contains="git") == ["digits"]
    assert await names(name_contains="%") == []
    assert await names(queue="night") == ["words"]
    assert await names(labels={"team": "vision"}) == ["digits"]
    assert await names(labels={"team": "Vision"}) == []
    assert await names(include_owned=True) == ["digits", "gone", "trial", "words"]
    assert await names(owner=s.Owner(kind="Study", id="s1")) == ["trial"]


@pytest.mark.parametrize("request_", [{"page_token": "!"}, {"page_token": "é"}, {"page_size": -1}])
async def test_a_page_that_was_never_given_is_refused(yard: Yard, request_: dict[str, object]) -> None:
    error = await refused(yard.users.ListJobs(s.ListJobsRequest(**request_)))  # type: ignore[arg-type]
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_bounds_are_refused_with_what_is_allowed(tmp_path: Path, open_scheduler: OpenYard) -> None:
    async with open_scheduler(tmp_path, max_queued_jobs=2, max_batch=3, max_document_bytes=2000) as yard:
        entry = s.SubmitRequest(document=s.Document(text=document()))
        large = s.SubmitRequest(document=s.Document(text=document(env={"X": "x" * 2000})))
        assert reason_of(await refused(yard.users.Submit(large))) == "DocumentTooLarge"
        batch = yard.users.SubmitBatch(s.SubmitBatchRequest(requests=[entry] * 4))
        assert reason_of(await refused(batch)) == "BatchTooLarge"
        await yard.submit()
        await yard.submit()
        full = await refused(yard.users.Submit(entry))
        assert (full.code(), reason_of(full)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QueueFull")


async def test_a_watch_from_any_cursor_sees_every_event_once(yard: Yard) -> None:
    await yard.register()
    job = await yard.submit()

    async def collect(after_seq: int) -> list[int]:
        seen: list[int] = []
        async for event in yard.watch(job.id, after_seq):
            seen.append(event.seq)
            if event.type == "Succeeded":
                return seen
        raise AssertionError("a watch never ends by itself")

    early = asyncio.create_task(collect(0))
    await yard.ended(job.id, COMPLETED)
    everything = [event.seq for event in await yard.events(job.id)]
    assert await early == everything
    for place, seq in enumerate(everything[:-1]):
        assert await collect(seq) == everything[place + 1 :]


async def test_a_watch_from_now_begins_after_what_was(yard: Yard) -> None:
    old = await yard.submit(document("old"))
    stream = yard.users.Watch(s.WatchRequest(from_now=True))
    reading = asyncio.ensure_future(stream.read())
    while not yard.scheduler._hub._watchers:  # until the call is there
        await asyncio.sleep(0)
    new = await yard.submit(document("new"))
    event = await reading
    assert event.object_id == new.id != old.id
    stream.cancel()


async def test_a_reader_that_does_not_read_holds_nobody_up(yard: Yard) -> None:
    stream = yard.users.Watch(s.WatchRequest())
    text = document(env={"FILL": "x" * 50})
    for _ in range(5):
        batch = [s.SubmitRequest(document=s.Document(text=text)) for _ in range(1000)]
        await yard.users.SubmitBatch(s.SubmitBatchRequest(requests=batch))
    seen = [(await stream.read()).seq for _ in range(5000)]
    assert seen == sorted(set(seen))
    stream.cancel()


async def test_explain_joins_the_reason_the_numbers_and_what_helps(yard: Yard) -> None:
    await yard.register(cpu=4)
    job = await yard.submit(document("big", nodes=2, resources={"cpu": 8, "memory": "1Gi"}))
    explanation = await yard.users.ExplainJob(s.ExplainJobRequest(id="big"))
    assert (explanation.wanted.cpu, explanation.total.cpu, explanation.free.cpu) == (16, 4, 4)
    assert "NeverFits" in explanation.summary
    assert any(command.startswith(f"yard cancel {job.id}") for command in explanation.next)


async def test_explain_tells_that_no_launcher_has_taken_a_job_yet(yard: Yard) -> None:
    await yard.register(cpu=1)
    job = await yard.admitted((await yard.submit(document("new"))).id)
    request = s.ExplainJobRequest(id="new")
    assert "has not taken it yet" in (await yard.users.ExplainJob(request)).summary
    await yard.claim(job)
    assert "has not taken it yet" not in (await yard.users.ExplainJob(request)).summary


async def test_explain_tells_the_reason_of_a_failure_once(yard: Yard) -> None:
    await yard.register(cpu=1)
    job = await yard.started((await yard.submit(document("broken"))).id)
    await yard.ended(job.id, c.Exit(reason="WorkerFailed", exit_code=1))
    summary = (await yard.users.ExplainJob(s.ExplainJobRequest(id="broken"))).summary
    assert summary.count("WorkerFailed") == 1


async def test_explain_tells_why_a_retry_was_needed(yard: Yard) -> None:
    await yard.register(cpu=1)
    job = await yard.started((await yard.submit(document("moved"))).id)
    await yard.ended(job.id, c.Exit(reason="Evicted", message="machine m-1 was drained"))
    await yard.started(job.id)
    summary = (await yard.users.ExplainJob(s.ExplainJobRequest(id="moved"))).summary
    assert "moved is running, attempt 2" in summary
    assert "The attempt before ended: Evicted: machine m-1 was drained" in summary


async def test_metrics_count_jobs_by_state(yard: Yard) -> None:
    await yard.register(cpu=1)
    await yard.started((await yard.submit()).id)
    await yard.submit()

    def jobs(state: str) -> float | None:
        return yard.registry.get_sample_value("trainyard_jobs", {"state": state})

    assert (jobs("running"), jobs("queued"), jobs("failed")) == (1, 1, 0)
    assert yard.registry.get_sample_value("trainyard_admission_seconds_count") == 1
