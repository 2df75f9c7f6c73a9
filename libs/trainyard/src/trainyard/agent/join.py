"""How the agent in a pod learns what to do: it shows who the pod is, and the launcher answers with the node's plan.

The identity is the pod's service-account token, short-lived and for this purpose alone; kubelet keeps its file fresh,
so each try reads it again. What the agent was told for itself is taken out of the environment: workers see none of it.
"""

from __future__ import annotations

import importlib
import os
import random
import signal
import sys
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

import grpc
from google.protobuf import json_format
from trainyard_protos.v1 import launcher_pb2
from trainyard_protos.v1.launcher_pb2_grpc import AgentServiceStub

from trainyard.agent.plan import Plan
from trainyard.channel import OPTIONS

CALL_TIMEOUT_S = 20.0
LAST_BACKOFF_S = 5.0
_DEFINITE = frozenset(
    {
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


class NotWanted(Exception):
    """The launcher has no use for this pod, or the pod was told to end before it had a plan."""


@dataclass(frozen=True, slots=True)
class Pod:
    """What the pod was told of itself."""

    endpoint: str
    ca_file: Path
    token_file: Path
    attempt_id: str
    node: int
    folder: str

    @classmethod
    def of(cls, environ: MutableMapping[str, str]) -> Pod:
        """Takes it out of the environment.

        Raises:
            KeyError: this is no pod of the yard's.
        """
        pod = cls(
            endpoint=environ["TRAINYARD_ENDPOINT"],
            ca_file=Path(environ["TRAINYARD_CA_FILE"]),
            token_file=Path(environ["TRAINYARD_TOKEN_FILE"]),
            attempt_id=environ["TRAINYARD_ATTEMPT_ID"],
            node=int(environ["JOB_COMPLETION_INDEX"]),
            folder=environ["TRAINYARD_NODE_FOLDER"],
        )
        for name in [name for name in environ if name.startswith("TRAINYARD_") or name == "JOB_COMPLETION_INDEX"]:
            del environ[name]
        return pod


def join(environ: MutableMapping[str, str]) -> tuple[str, Plan]:
    """The node's folder, made, and its plan. Waits for a launcher that is away.

    Raises:
        NotWanted: there is nothing to do here.
        KeyError: the environment does not say who this is.
    """
    pod = Pod.of(environ)
    Path(pod.folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    answer = _ask(pod)
    plan = Plan(json_format.MessageToDict(answer.plan, preserving_proto_field_name=True))
    plan.ca_file = str(pod.ca_file)
    plan.env.update(answer.secrets)
    _give_a_home(environ, pod.folder)
    return pod.folder, plan


def _ask(pod: Pod) -> launcher_pb2.JoinResponse:
    backoff = 0.1
    while True:
        try:
            return _call(pod)
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            if code in _DEFINITE:
                raise NotWanted(f"the launcher refused this pod: {details}") from error
            _say(f"no plan yet: {code.name}: {details}")
        if signal.sigpending() & {signal.SIGTERM, signal.SIGINT}:
            raise NotWanted("the pod was told to end before it had a plan")
        time.sleep(backoff * random.uniform(0.5, 1.5))
        backoff = min(backoff * 2, LAST_BACKOFF_S)


def _call(pod: Pod) -> launcher_pb2.JoinResponse:
    request = launcher_pb2.JoinRequest(
        attempt_id=pod.attempt_id, node=pod.node, service_account_token=pod.token_file.read_text()
    )
    credentials = grpc.ssl_channel_credentials(pod.ca_file.read_bytes())
    with grpc.secure_channel(pod.endpoint, credentials, options=OPTIONS) as channel:
        asked = AgentServiceStub(channel).Join.future(request, timeout=CALL_TIMEOUT_S)
        importlib.import_module("trainyard.agent.supervisor")  # the second stage, while the launcher answers
        answer: launcher_pb2.JoinResponse = asked.result()
    return answer


def _give_a_home(environ: MutableMapping[str, str], folder: str) -> None:
    """Programs keep caches in HOME; the user a pod runs as often has none that it may write to."""
    if not os.access(environ.get("HOME", ""), os.W_OK):
        environ["HOME"] = f"{folder}/home"
        Path(environ["HOME"]).mkdir(exist_ok=True)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
