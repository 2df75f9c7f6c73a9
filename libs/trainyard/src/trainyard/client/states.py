"""States of a job in the words users see."""

from __future__ import annotations

from trainyard_protos.v1 import scheduler_pb2 as pb

from trainyard.errors import InvalidArgument

_PREFIX = "JOB_STATE_"
ENDED = frozenset({pb.JOB_STATE_SUCCEEDED, pb.JOB_STATE_FAILED, pb.JOB_STATE_CANCELLED})
NAMES: dict[pb.JobState.ValueType, str] = {
    state: pb.JobState.Name(state).removeprefix(_PREFIX).lower()
    for state in pb.JobState.values()
    if state != pb.JOB_STATE_UNSPECIFIED
}


def name(state: pb.JobState.ValueType) -> str:
    """The state in lower case, for instance "running"."""
    return NAMES.get(state, "unknown")


def parse(text: str) -> pb.JobState.ValueType:
    """The state of that name.

    Raises:
        InvalidArgument: there is no such state.
    """
    for state, word in NAMES.items():
        if word == text.lower():
            return state
    raise InvalidArgument(f"'{text}' is not a state of a job", hint=f"one of {', '.join(NAMES.values())}")
