import grpc
import pytest
from trainyard import errors
from trainyard.client import AsyncClient
from trainyard.client.attachment import Attachment
from trainyard_protos.v1 import common_pb2

from libs.trainyard.tests.client.scripted import Refusal, ScriptedYard

S = grpc.StatusCode


@pytest.mark.parametrize(
    ("status", "kind", "exit_code"),
    [
        (S.INVALID_ARGUMENT, errors.InvalidArgument, 2),
        (S.OUT_OF_RANGE, errors.InvalidArgument, 2),
        (S.NOT_FOUND, errors.NotFound, 3),
        (S.UNAVAILABLE, errors.NotRunning, 4),
        (S.DEADLINE_EXCEEDED, errors.NotRunning, 4),
        (S.UNAUTHENTICATED, errors.Refused, 5),
        (S.PERMISSION_DENIED, errors.Refused, 5),
        (S.ALREADY_EXISTS, errors.Conflict, 6),
        (S.FAILED_PRECONDITION, errors.Conflict, 6),
        (S.ABORTED, errors.Conflict, 6),
        (S.RESOURCE_EXHAUSTED, errors.Exhausted, 6),
        (S.INTERNAL, errors.Defect, 70),
        (S.DATA_LOSS, errors.Defect, 70),
        (S.UNIMPLEMENTED, errors.Defect, 70),
    ],
)
async def test_every_status_becomes_an_error_of_the_library(
    yard: ScriptedYard, status: grpc.StatusCode, kind: type[errors.YardError], exit_code: int
) -> None:
    yard.refusals["GetJob"] = [Refusal(status, "what is wrong", "SomeReason", "do this next")]
    async with AsyncClient() as client:
        with pytest.raises(errors.YardError) as caught:
            await client.get("x")
    error = caught.value
    assert type(error) is kind
    assert error.exit_code == exit_code
    assert (error.message, error.reason, error.hint) == ("what is wrong", "SomeReason", "do this next")
    assert error.fields == {"id": "x"}


async def test_a_refused_document_carries_all_its_problems(yard: ScriptedYard) -> None:
    problems = [
        common_pb2.Problem(file="job.yaml", line=7, field="spec.comand", message="unknown", suggestion="command"),
        common_pb2.Problem(file="job.yaml", line=9, field="spec.nodes", message="must be positive"),
    ]
    yard.refusals["Submit"] = [Refusal(S.INVALID_ARGUMENT, "2 problems", "InvalidSpec", problems=problems)]
    async with AsyncClient() as client:
        with pytest.raises(errors.InvalidSpec) as caught:
            await client.submit("kind: x\n")
    assert [(each.line, each.field) for each in caught.value.problems] == [(7, "spec.comand"), (9, "spec.nodes")]


async def test_a_yard_that_ends_is_not_running_also_for_who_has_just_attached(yard: ScriptedYard) -> None:
    yard.refusals["Attach"] = [Refusal(S.UNAVAILABLE, "this yard is going down", "YardEnding")]
    async with AsyncClient() as client:
        attachment = Attachment(client._connection.yard.Attach(), "default")
        for _ in range(2):
            with pytest.raises(errors.NotRunning):
                await attachment.hold()


@pytest.mark.parametrize("words", ["Internal error from Core", "Received RST_STREAM with error code 2"])
async def test_what_grpc_itself_says_of_a_call_that_broke_off_is_no_defect_of_the_yard(
    yard: ScriptedYard, words: str
) -> None:
    yard.refusals["GetJob"] = [Refusal(S.INTERNAL, words)]
    async with AsyncClient() as client:
        with pytest.raises(errors.NotRunning):
            await client.get("x")


async def test_a_wrong_token_is_refused(yard: ScriptedYard) -> None:
    async with AsyncClient(token="another") as client:
        with pytest.raises(errors.Refused):
            await client.get("x")
    assert yard.calls == []


def test_without_a_yard_the_error_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("TRAINYARD_HOME", f"{tmp_path}/none")
    with pytest.raises(errors.NotRunning, match="no yard is running") as caught:
        AsyncClient()
    assert "yard up" in caught.value.hint


def test_the_tree_of_errors_has_one_root_and_stable_exit_codes() -> None:
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)]
    assert all(issubclass(each, errors.YardError) for each in kinds)
    assert {each.exit_code for each in kinds} == {1, 2, 3, 4, 5, 6, 7, 70}
