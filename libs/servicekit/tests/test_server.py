import asyncio
import gc
import sys
import time

import grpc
import jwt
import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from prometheus_client import CollectorRegistry
from servicekit import receptions, requests
from servicekit import server as servers
from servicekit.auth import (
    AttemptTokens,
    Authenticator,
    bearer_token,
    current_principal,
    require_user,
    require_workspace,
)
from servicekit.errors import ERROR_KEY, PROBLEMS_KEY, InvalidArgument, NotFound, reason_of
from servicekit.grants import Grants
from servicekit.health import Health
from servicekit.ids import new_id
from servicekit.limits import CallLimiter, Rate
from trainyard.channel import connect
from trainyard_protos.v1 import (
    common_pb2,
    launcher_pb2,
    launcher_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    yard_pb2,
    yard_pb2_grpc,
)

from scripts.testbed.patience import PATIENCE_S

HEALTH, JOIN = "/grpc.health.v1.Health/Check", "/trainyard.v1.AgentService/Join"


class Yard(yard_pb2_grpc.YardServiceServicer):
    def __init__(self):
        self.attached = 0  # messages of all streams

    async def Info(self, request, context):
        principal = current_principal()
        return yard_pb2.InfoResponse(version=principal.kind, home=principal.attempt_id)

    async def Shutdown(self, request, context):
        require_user()
        if request.timeout_s < 0:
            problem = common_pb2.Problem(message="x" * 1000)
            raise InvalidArgument("x" * 5_000_000, reason="TooLong", hint="y" * 5_000_000, problems=[problem] * 5000)
        if request.stop_jobs:
            raise NotFound("no such job", reason="JobNotFound", hint="yard jobs")
        return yard_pb2.ShutdownResponse(stopped_jobs=1 // int(request.timeout_s))

    async def Attach(self, request_iterator, context):
        async for request in request_iterator:
            require_workspace(request.workspace)
            self.attached += 1
            yield yard_pb2.AttachResponse()


class Scheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    def __init__(self):
        self.inside = 0
        self.entered = asyncio.Event()
        self.may_leave = asyncio.Event()
        self.may_leave.set()

    async def SubmitBatch(self, request, context):
        self.inside += 1
        self.entered.set()
        await self.may_leave.wait()
        self.inside -= 1
        if len(request.requests) == 29_999:
            raise InvalidArgument("29,999 jobs", reason="Unlucky")
        return scheduler_pb2.SubmitBatchResponse()

    async def GetJob(self, request, context):
        return scheduler_pb2.Job(id=request.id)


class Agents(launcher_pb2_grpc.AgentServiceServicer):
    async def Join(self, request, context):
        return launcher_pb2.JoinResponse()


@pytest.fixture
def tokens(tmp_path):
    return AttemptTokens.load_or_create(tmp_path)


@pytest.fixture
async def scheduler():
    return Scheduler()


@pytest.fixture
def servicer():
    return Yard()


@pytest.fixture
async def endpoint(monkeypatch, tmp_path, tokens, scheduler, servicer):
    monkeypatch.setattr(servers, "_LARGE_OF_ATTEMPT", 1)
    limiter = CallLimiter({"attempt": Rate(per_s=1e-6, burst=3)})
    server = servers.build(Authenticator(bearer_token(tmp_path), tokens), CollectorRegistry(), limiter=limiter)
    yard_pb2_grpc.add_YardServiceServicer_to_server(servicer, server)
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)
    launcher_pb2_grpc.add_AgentServiceServicer_to_server(Agents(), server)
    Health(["yard"], CollectorRegistry()).register(server)
    port = servers.listen(server, "127.0.0.1", 0)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


def yard(endpoint, token):
    return yard_pb2_grpc.YardServiceStub(connect(endpoint, token))


async def status_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_the_token_in_the_home_is_the_user(endpoint, tmp_path):
    assert (await yard(endpoint, bearer_token(tmp_path)).Info(yard_pb2.InfoRequest())).version == "user"


def test_the_operator_is_a_user_by_a_token_of_its_own(tokens):
    authenticator = Authenticator("the users' token", tokens, "the operator's token")
    found = {who: authenticator.authenticate(f"Bearer the {who} token") for who in ("users'", "operator's")}
    assert {who: (caller.kind, caller.operator) for who, caller in found.items()} == {
        "users'": ("user", False),
        "operator's": ("user", True),
    }
    with pytest.raises(ValueError, match="give the operator one of its own"):
        Authenticator("one", tokens, "one")


async def test_an_attempt_token_is_that_attempt(endpoint, tokens):
    token, _ = tokens.mint("default", "job", "attempt-7", 3, ttl_s=60)
    response = await yard(endpoint, token).Info(yard_pb2.InfoRequest())
    assert (response.version, response.home) == ("attempt", "attempt-7")


@pytest.mark.parametrize("token", ["", "nonsense", "a.b.c"])
async def test_other_tokens_are_refused(endpoint, token):
    error = await status_of(yard(endpoint, token).Info(yard_pb2.InfoRequest()))
    assert error.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_an_expired_or_foreign_attempt_token_is_refused(endpoint, tokens, tmp_path_factory):
    expired, _ = tokens.mint("default", "job", "a", 1, ttl_s=-1)
    foreign, _ = AttemptTokens.load_or_create(tmp_path_factory.mktemp("other")).mint("default", "job", "a", 1, ttl_s=60)
    for token in (expired, foreign):
        error = await status_of(yard(endpoint, token).Info(yard_pb2.InfoRequest()))
        assert error.code() == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    "claims",
    [
        {"fence": []},
        {"fence": "1"},
        {"fence": True},
        {"fence": 2**31},
        {"fence": -1},
        {"ws": 1},
        {"exp": float("inf")},
        {"exp": []},
        {"art": []},
        {"art": {"w": "name", "r": []}},
        {"art": {"w": [], "r": [1]}},
    ],
)
async def test_a_signed_token_with_claims_of_another_type_is_refused(endpoint, tmp_path, claims):
    key = load_pem_private_key((tmp_path / "attempt.key").read_bytes(), password=None)
    right = {"iss": "trainyard", "sub": "a", "exp": time.time() + 60, "ws": "default", "job": "j", "fence": 1}
    error = await status_of(
        yard(endpoint, jwt.encode(right | claims, key, algorithm="EdDSA")).Info(yard_pb2.InfoRequest())
    )
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAUTHENTICATED, "BadAttemptToken")


def test_grants_come_back_from_a_token_which_stays_small(tokens):
    names = [f"{number:02}{'long-name.' * 12}" for number in range(64)]
    grants = Grants.of(write=["model", *names], read=["words", new_id()])
    token, _ = tokens.mint("default", "job", "a", 1, 60, grants)
    found = tokens.verify(token).grants
    assert found == grants
    assert found.may_write("model") and found.may_write(names[7]) and found.may_read("words")
    assert not found.may_write("words") and not found.may_write("model-2") and not found.may_write(f"{names[7]}x")
    assert len(token) < 4096
    assert tokens.verify(tokens.mint("default", "job", "a", 1, 60)[0]).grants is None


async def test_a_call_without_any_token_is_refused(endpoint):
    async with grpc.aio.insecure_channel(endpoint) as channel:
        error = await status_of(yard_pb2_grpc.YardServiceStub(channel).Info(yard_pb2.InfoRequest()))
    assert error.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_an_attempt_may_not_call_what_is_for_users(endpoint, tokens):
    token, _ = tokens.mint("default", "job", "a", 1, ttl_s=60)
    error = await status_of(yard(endpoint, token).Shutdown(yard_pb2.ShutdownRequest()))
    assert error.code() == grpc.StatusCode.PERMISSION_DENIED


async def test_errors_travel_with_reason_and_hint(endpoint, tmp_path):
    error = await status_of(yard(endpoint, bearer_token(tmp_path)).Shutdown(yard_pb2.ShutdownRequest(stop_jobs=True)))
    info = common_pb2.ErrorInfo.FromString(dict(error.trailing_metadata())[ERROR_KEY])
    assert (error.code(), info.reason, info.hint) == (grpc.StatusCode.NOT_FOUND, "JobNotFound", "yard jobs")


async def test_a_defect_becomes_an_internal_error_and_the_server_goes_on(endpoint, tmp_path):
    stub = yard(endpoint, bearer_token(tmp_path))
    error = await status_of(stub.Shutdown(yard_pb2.ShutdownRequest()))
    assert error.code() == grpc.StatusCode.INTERNAL
    assert "ZeroDivisionError" in error.details()
    assert (await stub.Info(yard_pb2.InfoRequest())).version == "user"


async def test_streams_know_their_caller_and_fail_with_a_status(endpoint, tokens):
    token, _ = tokens.mint("default", "job", "a", 1, ttl_s=60)
    stream = yard(endpoint, token).Attach()
    await stream.write(yard_pb2.AttachRequest(workspace="default"))
    assert await stream.read() == yard_pb2.AttachResponse()
    await stream.write(yard_pb2.AttachRequest(workspace="other"))
    error = await status_of(stream.read())
    assert error.code() == grpc.StatusCode.PERMISSION_DENIED


def later(monkeypatch, by_s):
    """This process, and with it the server, finds that so much time has passed."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + by_s)


async def test_a_token_that_was_good_is_refused_once_it_has_expired(endpoint, tokens, monkeypatch):
    token, _ = tokens.mint("default", "job", "a", 1, ttl_s=30)
    stub = yard(endpoint, token)
    await stub.Info(yard_pb2.InfoRequest())
    later(monkeypatch, 30)
    error = await status_of(stub.Info(yard_pb2.InfoRequest()))
    assert error.code() == grpc.StatusCode.UNAUTHENTICATED
    assert common_pb2.ErrorInfo.FromString(dict(error.trailing_metadata())[ERROR_KEY]).reason == "TokenExpired"


async def test_a_stream_takes_no_message_after_its_token_has_expired(endpoint, tokens, servicer, monkeypatch):
    token, _ = tokens.mint("default", "job", "a", 1, ttl_s=30)
    stream = yard(endpoint, token).Attach()
    await stream.write(yard_pb2.AttachRequest(workspace="default"))
    assert await stream.read() == yard_pb2.AttachResponse()
    later(monkeypatch, 30)
    await stream.write(yard_pb2.AttachRequest(workspace="default"))
    error = await status_of(stream.read())
    assert error.code() == grpc.StatusCode.UNAUTHENTICATED
    assert servicer.attached == 1


async def test_an_error_that_quotes_too_much_is_shortened(endpoint, tmp_path):
    error = await status_of(yard(endpoint, bearer_token(tmp_path)).Shutdown(yard_pb2.ShutdownRequest(timeout_s=-1)))
    metadata = dict(error.trailing_metadata())
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith("xxx") and error.details().endswith("…")
    assert common_pb2.ErrorInfo.FromString(metadata[ERROR_KEY]).reason == "TooLong"
    assert 0 < len(common_pb2.Problems.FromString(metadata[PROBLEMS_KEY]).problems) < 5000


def unsigned(tokens, **header):
    token, _ = tokens.mint("default", "job", "a", 1, ttl_s=60)
    claims = jwt.decode(token, options={"verify_signature": False})
    return jwt.encode(claims, header.pop("key", None), **header)


async def test_a_token_that_somebody_else_signed_or_nobody_is_refused(endpoint, tokens, tmp_path):
    public = tokens._public_key.public_bytes_raw()
    signed, _ = tokens.mint("default", "job", "a", 1, ttl_s=60)
    head, body, signature = signed.split(".")
    other, _ = tokens.mint("default", "other-job", "a", 1, ttl_s=60)
    forged = [
        unsigned(tokens, algorithm="none"),
        unsigned(tokens, key=public.hex(), algorithm="HS256"),  # the public key taken for a secret
        f"{head}.{other.split('.')[1]}.{signature}",
        f"{head}.{body}.",
    ]
    for token in forged:
        error = await status_of(yard(endpoint, token).Info(yard_pb2.InfoRequest()))
        assert error.code() == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("scheme", ["Basic", "", "Token", "bearer  "])
async def test_the_token_in_another_scheme_is_refused(endpoint, tmp_path, scheme):
    async with grpc.aio.insecure_channel(endpoint) as channel:
        stub = yard_pb2_grpc.YardServiceStub(channel)
        metadata = [("authorization", f"{scheme} {bearer_token(tmp_path)}")]
        error = await status_of(stub.Info(yard_pb2.InfoRequest(), metadata=metadata))
    assert error.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_a_caller_that_calls_too_often_is_told_when_to_call_again(endpoint, tokens, tmp_path):
    busy, other = (yard(endpoint, tokens.mint("default", "job", name, 1, ttl_s=60)[0]) for name in ("busy", "other"))
    for _ in range(3):
        await busy.Info(yard_pb2.InfoRequest())
    error = await status_of(busy.Info(yard_pb2.InfoRequest()))
    info = common_pb2.ErrorInfo.FromString(dict(error.trailing_metadata())[ERROR_KEY])
    assert (error.code(), info.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TooManyCalls")
    assert float(info.fields["retry_after_s"]) > 0
    for stub in (other, yard(endpoint, bearer_token(tmp_path))):
        await stub.Info(yard_pb2.InfoRequest())


def test_secrets_are_readable_by_their_owner_alone(tmp_path):
    bearer_token(tmp_path), AttemptTokens.load_or_create(tmp_path)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == {
        "token": "0o600",
        "attempt.key": "0o600",
        "attempt.pub": "0o600",
    }


@pytest.mark.parametrize("content", ["", "\n", "x"])
def test_a_file_that_holds_no_token_is_no_token(tmp_path, content):
    (tmp_path / "token").write_text(content)
    with pytest.raises(ValueError, match="holds no token"):
        bearer_token(tmp_path)


async def test_a_port_that_is_taken_is_named(endpoint, tokens):
    server = servers.build(Authenticator("t", tokens), CollectorRegistry())
    with pytest.raises(RuntimeError, match=f"cannot listen on {endpoint}: is the port taken"):
        servers.listen(server, "127.0.0.1", int(endpoint.rpartition(":")[2]))


async def test_listening_beyond_loopback_without_tls_is_refused(tokens):
    server = servers.build(Authenticator("t", tokens), CollectorRegistry())
    with pytest.raises(ValueError, match="without TLS"):
        servers.listen(server, "0.0.0.0", 0)


def test_connecting_beyond_loopback_without_a_root_certificate_is_refused():
    with pytest.raises(ValueError, match="root certificate"):
        connect("192.0.2.1:443", "token")


async def test_a_caller_without_a_token_is_refused_before_any_message_is_received(endpoint):
    async with grpc.aio.insecure_channel(endpoint) as channel:
        unary = channel.stream_unary("/trainyard.v1.YardService/Info")()  # of which it sends no message
        error = await status_of(unary)
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAUTHENTICATED, "NoToken")


async def test_a_request_of_millions_of_empty_messages_is_refused_before_it_is_parsed(endpoint, tokens):
    token, _ = tokens.mint("default", "job", "a", 1, ttl_s=60)
    bomb = connect(endpoint, token).unary_unary("/trainyard.v1.SchedulerService/SubmitBatch")
    error = await status_of(bomb(b"\x0a\x00" * 4_000_000))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "TooManyFields")


async def test_a_message_within_a_stream_is_counted_too(endpoint, tmp_path):
    stream = connect(endpoint, bearer_token(tmp_path)).stream_stream("/trainyard.v1.YardService/Attach")()
    await stream.write(b"\x0a\x00" * 5_000)
    assert reason_of(await status_of(stream.read())) == "TooManyFields"


SUBMIT_BATCH = "/trainyard.v1.SchedulerService/SubmitBatch"


@pytest.fixture
def little_memory(monkeypatch):
    """There is room for one request of 30,000 fields at a time."""
    monkeypatch.setattr(requests, "_FIELDS_IN_MEMORY", 50_000)


async def test_large_requests_wait_until_others_have_left_the_memory(little_memory, endpoint, tmp_path, scheduler):
    channel = connect(endpoint, bearer_token(tmp_path))
    scheduler.may_leave.clear()
    calls = [channel.unary_unary(SUBMIT_BATCH)(b"\x0a\x00" * 30_000) for _ in range(4)]
    await scheduler.entered.wait()
    for _ in range(50):  # small ones pass
        await yard(endpoint, bearer_token(tmp_path)).Info(yard_pb2.InfoRequest())
    assert scheduler.inside == 1
    scheduler.may_leave.set()
    await asyncio.gather(*calls)


async def test_a_large_request_that_fails_or_breaks_off_leaves_the_memory(little_memory, endpoint, tmp_path, scheduler):
    submit = connect(endpoint, bearer_token(tmp_path)).unary_unary(SUBMIT_BATCH)
    assert reason_of(await status_of(submit(b"\x0a\x00" * 29_999))) == "Unlucky"
    assert reason_of(await status_of(submit(b"\x0a\x00" * 60_000))) == "TooManyFields"
    scheduler.entered.clear()
    scheduler.may_leave.clear()
    left = submit(b"\x0a\x00" * 30_000)
    await scheduler.entered.wait()
    left.cancel()
    scheduler.may_leave.set()
    await submit(b"\x0a\x00" * 30_000)


@pytest.fixture
def received(monkeypatch):
    """The encoded requests that the server has received."""
    messages, read = [], requests.RequestReader.read

    async def noting(self, raw, share):
        messages.append(raw)
        return await read(self, raw, share)

    monkeypatch.setattr(requests.RequestReader, "read", noting)
    gc.disable()
    yield messages
    gc.enable()


@pytest.mark.parametrize("method", ["/grpc.health.v1.Health/Check", SUBMIT_BATCH, "/trainyard.v1.YardService/Attach"])
async def test_a_refused_request_is_freed_with_its_call(received, endpoint, tmp_path, method):
    channel = connect(endpoint, bearer_token(tmp_path))
    error = await status_of(channel.stream_unary(method)(iter([b"\x0a\x00" * 60_000])))
    assert reason_of(error) in ("RequestTooLarge", "TooManyFields")
    for _ in range(10):  # the server learns that the call has ended
        await yard(endpoint, bearer_token(tmp_path)).Info(yard_pb2.InfoRequest())
    (message,) = (raw for raw in received if len(raw) == 120_000)
    assert sys.getrefcount(message) == 3  # the list's, this function's and the argument's


async def test_an_attempt_sends_few_large_requests_at_a_time(monkeypatch, endpoint, tokens):
    entered, take = asyncio.Event(), servers._Turns.take

    async def noting(self, attempt_id):
        await take(self, attempt_id)
        entered.set()

    monkeypatch.setattr(servers._Turns, "take", noting)
    one, other = (connect(endpoint, tokens.mint("default", "job", name, 1, ttl_s=60)[0]) for name in ("a", "b"))
    silent = one.stream_unary(SUBMIT_BATCH)()  # its message does not come
    await asyncio.wait_for(entered.wait(), PATIENCE_S)
    waits = asyncio.ensure_future(one.unary_unary(SUBMIT_BATCH)(b""))
    await other.unary_unary(SUBMIT_BATCH)(b"")
    await scheduler_pb2_grpc.SchedulerServiceStub(one).GetJob(scheduler_pb2.GetJobRequest())
    await scheduler_pb2_grpc.SchedulerServiceStub(other).GetJob(scheduler_pb2.GetJobRequest())
    assert not waits.done()
    silent.cancel()
    await asyncio.wait_for(waits, PATIENCE_S)


async def test_each_method_bounds_the_size_of_its_requests(endpoint, tmp_path):
    stub = scheduler_pb2_grpc.SchedulerServiceStub(connect(endpoint, bearer_token(tmp_path)))
    error = await status_of(stub.GetJob(scheduler_pb2.GetJobRequest(id="x" * 300_000)))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "RequestTooLarge")
    document = scheduler_pb2.Document(text="x" * 1_000_000)
    batch = scheduler_pb2.SubmitBatchRequest(requests=[scheduler_pb2.SubmitRequest(document=document)] * 5)
    await stub.SubmitBatch(batch)


@pytest.mark.parametrize("method", [HEALTH, "/grpc.health.v1.Health/Watch", JOIN])
async def test_calls_that_send_no_request_keep_no_other_waiting(monkeypatch, endpoint, method):
    """Of callers without a token, who may be anybody."""
    monkeypatch.setattr(receptions, "_TIMEOUT_S", 100 * PATIENCE_S)
    async with grpc.aio.insecure_channel(endpoint) as strangers, grpc.aio.insecure_channel(endpoint) as probe:
        silent = [strangers.stream_unary(method)() for _ in range(100)]
        ended = asyncio.wait([asyncio.ensure_future(each.code()) for each in silent], return_when="FIRST_COMPLETED")
        await asyncio.wait_for(ended, PATIENCE_S)  # so many that they make room for each other
        assert [each.done() for each in silent].count(True) < len(silent)
        for called in (HEALTH, JOIN):
            await asyncio.wait_for(probe.unary_unary(called)(b""), PATIENCE_S)


@pytest.fixture
def arrivals(monkeypatch):
    """Counts the calls that want a place to send their request; those that have one may keep it."""
    arrived, take_place = asyncio.Semaphore(0), receptions.Receptions._take_place

    async def noting(self):
        arrived.release()
        await take_place(self)

    monkeypatch.setattr(receptions.Receptions, "_take_place", noting)
    monkeypatch.setattr(receptions, "_TIMEOUT_S", 100 * PATIENCE_S)
    monkeypatch.setattr(receptions, "_TIMEOUT_WHILE_OTHERS_WAIT_S", 100 * PATIENCE_S)
    return arrived


async def open_silent(channel, method, arrivals, number):
    calls = []
    for _ in range(number):
        calls.append(channel.stream_unary(method)())
        await asyncio.wait_for(arrivals.acquire(), PATIENCE_S)
    return calls


async def test_a_place_to_send_a_request_goes_to_the_newest_call(endpoint, arrivals):
    async with grpc.aio.insecure_channel(endpoint) as channel:
        silent = await open_silent(channel, HEALTH, arrivals, receptions._AT_ONCE + 1)
        probe = asyncio.ensure_future(channel.unary_unary(HEALTH)(b""))
        await asyncio.wait_for(arrivals.acquire(), PATIENCE_S)
        silent[0].cancel()
        await asyncio.wait_for(probe, PATIENCE_S)


@pytest.mark.parametrize(("silent", "other"), [(HEALTH, JOIN), (JOIN, HEALTH)])
async def test_calls_of_one_service_take_no_place_of_another(endpoint, arrivals, silent, other):
    async with grpc.aio.insecure_channel(endpoint) as channel:
        calls = await open_silent(channel, silent, arrivals, receptions._AT_ONCE)
        await asyncio.wait_for(channel.unary_unary(other)(b""), PATIENCE_S)
        assert not any(call.done() for call in calls)


async def test_the_oldest_of_too_many_calls_that_wait_to_send_a_request_ends(monkeypatch, endpoint, arrivals):
    monkeypatch.setattr(receptions, "_MAX_WAITING", 10)
    async with grpc.aio.insecure_channel(endpoint) as strangers:
        silent = await open_silent(strangers, HEALTH, arrivals, receptions._AT_ONCE + 11)
        codes = [asyncio.ensure_future(each.code()) for each in silent]
        (ended,), others = await asyncio.wait(codes, return_when="FIRST_COMPLETED", timeout=PATIENCE_S)
        assert (ended.result(), len(others)) == (grpc.StatusCode.DEADLINE_EXCEEDED, len(silent) - 1)
        for each in others:
            each.cancel()


async def test_bytes_that_are_no_message_are_the_callers_error(endpoint, tmp_path):
    call = connect(endpoint, bearer_token(tmp_path)).unary_unary("/trainyard.v1.YardService/Info")
    assert reason_of(await status_of(call(b"\xff" * 10))) == "MalformedRequest"


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_a_compressed_request_is_refused_without_a_line_in_the_log(endpoint, tmp_path, algorithm, capfd):
    async with grpc.aio.insecure_channel(endpoint, compression=algorithm) as channel:
        metadata = [("authorization", f"Bearer {bearer_token(tmp_path)}")]
        call = channel.unary_unary("/trainyard.v1.SchedulerService/SubmitBatch")
        error = await status_of(call(b"\x0a\x00" * 5000, metadata=metadata))
    assert (error.code(), "is disabled" in error.details()) == (grpc.StatusCode.UNIMPLEMENTED, True)
    assert capfd.readouterr().err == ""


async def test_calls_that_end_before_they_are_refused_flood_no_log(endpoint, caplog):
    async with grpc.aio.insecure_channel(endpoint, compression=grpc.Compression.Gzip) as channel:
        for method in ("/trainyard.v1.SchedulerService/SubmitBatch", "/trainyard.v1.YardService/Attach") * 10:
            error = await status_of(channel.stream_unary(method)(iter([b"\x0a\x00" * 5000])))
            assert error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED)
    assert {record.name for record in caplog.records} <= {"servicekit.refusals"}
    assert len(caplog.records) <= 2


@pytest.mark.parametrize("reason", ["BadToken", "UserOnly"])
async def test_refused_tokens_are_counted_and_flood_no_log(tmp_path, tokens, caplog, reason):
    """Both those that are not valid and those that are good for less."""
    registry = CollectorRegistry()
    server = servers.build(Authenticator(bearer_token(tmp_path), tokens), registry)
    yard_pb2_grpc.add_YardServiceServicer_to_server(Yard(), server)
    endpoint = f"127.0.0.1:{servers.listen(server, '127.0.0.1', 0)}"
    await server.start()
    token = "nonsense" if reason == "BadToken" else tokens.mint("default", "job", "attempt", 1, ttl_s=60)[0]
    for _ in range(50):
        assert reason_of(await status_of(yard(endpoint, token).Shutdown(yard_pb2.ShutdownRequest()))) == reason
    await server.stop(None)
    labels = {"method": "/trainyard.v1.YardService/Shutdown", "reason": reason}
    assert registry.get_sample_value("trainyard_refused_tokens_total", labels) == 50
    (line,) = (record for record in caplog.records if record.name == "servicekit.refusals")
    assert (line.peer, line.method, line.reason) == ("ipv4:127.0.0.1", labels["method"], labels["reason"])
