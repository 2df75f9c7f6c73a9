"""What an attempt's token is good for when it is used on another job: nothing but reading artifacts."""

import asyncio
from types import ModuleType

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from servicekit.auth import AttemptTokens
from servicekit.grants import Grants
from trainyard.channel import connect
from trainyard.home import read_endpoint
from trainyard_protos.v1 import admin_pb2, artifacts_pb2, launcher_pb2, metrics_pb2, scheduler_pb2, yard_pb2

from scripts.testbed.patience import PATIENCE_S
from tests.conftest import wait_until

CONTRACTS = (scheduler_pb2, launcher_pb2, metrics_pb2, artifacts_pb2, yard_pb2, admin_pb2)
ENDED_WHILE_WRITTEN_TO = "Internal error from Core"
ALLOWED = {
    "FindMissing",  # whether the workspace has bytes that the caller has itself
    "PutChunks",
    "GetChunks",
    "GetVersion",
    "ListArtifacts",
    "ListVersions",
    "ListFiles",
    "ReadFile",
    "GetLineage",
    "GetRetention",
    "Info",
}
"""Inputs of a job may come from any job of its workspace."""

SCRIPT = """
    import pathlib, time
    pathlib.Path("checkpoints").mkdir(exist_ok=True)
    pathlib.Path("checkpoints/step-1.txt").write_text("weights")
    time.sleep(600)
"""
SPEC = """
    command: [python, train.py]
    code: {path: .}
    checkpoints: {path: checkpoints, pattern: "step-{step}.txt"}
    gracePeriod: 1s
"""


def methods(contract: ModuleType) -> list[MethodDescriptor]:
    return [method for service in contract.DESCRIPTOR.services_by_name.values() for method in service.methods]


METHODS = [method for contract in CONTRACTS for method in methods(contract) if method.name not in ALLOWED]


def about(method: MethodDescriptor, job: str, attempt: str) -> Message:
    """A request that names another job wherever the method can name one."""
    request = message_factory.GetMessageClass(method.input_type)()
    values = {"job_id": job, "id": job, "job": job, "run_id": attempt, "attempt_id": attempt, "writer_id": "w"}
    values |= {"reference": f"checkpoints-{job}", "alias": "mine"}
    for name, value in values.items():
        if name in method.input_type.fields_by_name:
            setattr(request, name, value)
    producer = artifacts_pb2.Producer(job_id=job, attempt_id=attempt, fence=9)
    commit = artifacts_pb2.CommitRequest(name=f"checkpoints-{job}", kind="checkpoint", producer=producer)
    nested = {
        "OpenRun": metrics_pb2.OpenRunRequest(run=metrics_pb2.Run(id=attempt, job_id=job, fence=9)),
        "ListSeries": metrics_pb2.ListSeriesRequest(selector={"job_id": job}),
        "ReadLogs": metrics_pb2.ReadLogsRequest(job_id=job),
        "QuerySeries": metrics_pb2.QuerySeriesRequest(selector={"run_id": attempt}),
        "WatchSeries": metrics_pb2.WatchSeriesRequest(selector={"job_id": job}),
        "Session": launcher_pb2.AgentMessage(hello={"attempt_id": attempt, "fence": 1}),
        "Shell": launcher_pb2.ShellInput(open={"job_id": job}),
        "Commit": commit,
        "RecordUse": artifacts_pb2.RecordUseRequest(version_id=attempt, consumer=producer),
        "CommitPart": artifacts_pb2.CommitPartRequest(commit=commit, part=0, parts=2),
    }
    return nested.get(method.name, request)


async def status_of(channel: grpc.aio.Channel, method: MethodDescriptor, request: Message) -> grpc.StatusCode:
    answer = message_factory.GetMessageClass(method.output_type)
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    path = f"/{method.containing_service.full_name}/{method.name}"
    make = getattr(channel, kind)
    call = make(path, request_serializer=type(request).SerializeToString, response_deserializer=answer.FromString)

    async def once():
        yield request

    while True:
        sent = call(once() if method.client_streaming else request, timeout=PATIENCE_S)
        try:
            if method.server_streaming:
                async for _ in sent:
                    return grpc.StatusCode.OK
            else:
                await sent
        except grpc.aio.AioRpcError as error:
            if error.details() == ENDED_WHILE_WRITTEN_TO:
                continue  # this side's word: the answer came before the request had left, and is lost
            return error.code()
        return grpc.StatusCode.OK


@pytest.fixture
def victim(yard, job_file):
    """A running job with a stored checkpoint."""
    with yard.client() as client:
        job = client.submit(job_file(SCRIPT, SPEC))
        wait_until(lambda: list(client.versions(kind="checkpoint", job=job.id)), "a checkpoint")
        yield yard, job.id, job.status().attempt_id


def test_a_token_of_one_job_is_refused_by_every_method_that_is_asked_about_another(victim):
    yard, job, attempt = victim
    tokens = AttemptTokens.load_or_create(yard.folder)
    token, _ = tokens.mint("default", "another-job", "another-attempt", 9, 600, Grants())

    async def all_statuses():
        async with connect(read_endpoint(yard.folder).endpoint, token) as channel:
            return {
                method.full_name: await status_of(channel, method, about(method, job, attempt)) for method in METHODS
            }

    statuses = asyncio.run(all_statuses())
    assert {name: status for name, status in statuses.items() if status is not grpc.StatusCode.PERMISSION_DENIED} == {}
    assert len(statuses) > 30
