"""What the end of an attempt means in plain words, and what usually causes it: the one table of this.

It states what the record of the end proves. What the record does not prove is named as possible, not as the cause.
"""

from __future__ import annotations

import re
import signal

from trainyard_protos.v1 import common_pb2

from trainyard.sizes import size

COMPLETED = "Completed"
_WORKER_FAILED = "WorkerFailed"
_OUT_OF_MEMORY = "OutOfMemory"
_SHELL_OFFSET = 128
"""A shell reports a child that a signal ended as 128 plus its number."""
_NEAR_LIMIT = 0.95
_CODE_OF_EXCEPTION = 1
"""With which Python ends after an exception that nothing caught; a program that logged one chooses its own code."""

_REASONS = {
    "Hung": "no worker reported progress within spec.hangTimeout; the logs hold the stacks of all ranks",
    "Stopped": "it was stopped from outside, not by a failure of its own",
    "DeadlineExceeded": "it was still running at spec.deadline; raise it, or continue from the last checkpoint",
    "AgentLost": "its agent ended without a record, for instance because the machine restarted or something killed it",
    "AgentSilent": "its agent sent nothing for too long: the machine may be overloaded or cut off",
    "StartFailed": "the command could not be started",
    "CodeUnavailable": "the code could not be fetched; check spec.code",
    "EnvironmentFailed": "the Python environment could not be installed; check spec.python.requirements",
    "InputUnavailable": "an input could not be fetched; check spec.inputs",
    "SecretUnavailable": "a secret could not be read; check spec.secrets",
    "OutputsNotStored": "the workers succeeded, but not all of what they made could be stored",
    "ImageUnavailable": "the image could not be pulled; check spec.image and pullSecrets",
    "VolumeUnavailable": "a volume could not be mounted; check spec.kubernetes.volumes",
    "Unschedulable": "the cluster found no machine for its pod",
    "PodsRefused": "the cluster refused to create its pods",
    "NotAllowed": "the job asks for something that this yard does not allow",
    "Evicted": "the cluster removed its pod",
    "NodeLost": "its machine disappeared from the cluster",
    "PodDeleted": "someone deleted its pod or its Job",
}
_SIGNALS = {
    "SIGTERM": "stopped from outside: something asked it to end",
    "SIGINT": "interrupted from outside, as by Ctrl-C",
    "SIGHUP": "its terminal or session ended",
    "SIGSEGV": "native code accessed invalid memory; often an extension built for another torch or CUDA",
    "SIGABRT": "native code aborted; the reason is usually in its last lines",
    "SIGBUS": "native code accessed memory that is not there; often /dev/shm is too small for DataLoader workers",
    "SIGILL": "it ran an instruction that this CPU lacks; a library was built for another CPU",
    "SIGFPE": "native code divided by zero",
    "SIGPIPE": "it wrote to a pipe or connection that the other side had closed",
    "SIGXCPU": "it used up its limit of CPU time",
    "SIGXFSZ": "it wrote a file beyond the limit of file size",
}
_CODES = {
    1: "the program ended with an error",
    2: "usage error: wrong arguments, or a script that does not exist",
    126: "the command was found but is not executable",
    127: "the command was not found",
}
_EXCEPTIONS = {
    "ModuleNotFoundError": "a Python module is not installed: add it to spec.python.requirements or to the image",
    "MemoryError": "Python could not get more memory",
    "KeyboardInterrupt": "interrupted from outside",
}
_CUDA_MEMORY = re.compile(r"CUDA out of memory|CUDA error: out of memory|HIP out of memory")


def meaning(exit: common_pb2.Exit) -> str:
    """For instance "exit code 1: Python raised ValueError: bad"; "" for success and when nothing is known."""
    if exit.reason in ("", COMPLETED):
        return ""
    if exit.reason == _OUT_OF_MEMORY:
        return _out_of_memory(exit)
    if exit.reason == _WORKER_FAILED:
        return "; ".join(filter(None, [_how(exit), _consequence(exit), _killed_below(exit)]))
    return _REASONS.get(exit.reason, "")


def was_killed(exit: common_pb2.Exit) -> bool:
    """Whether SIGKILL ended the worker, or a program that a shell ran for it."""
    code = exit.exit_code if exit.HasField("exit_code") else None
    return (exit.signal or _signal_of_shell(code)) == "SIGKILL"


def memory_use(memory: common_pb2.MemoryUse) -> str:
    """For instance "512.0 MiB of 512.0 MiB"; "" when nothing is known."""
    peak = size(memory.peak_bytes) if memory.peak_bytes else "an unknown amount"
    if not memory.limit_bytes:
        return f"{peak}, without a limit" if memory.peak_bytes else ""
    return f"{peak} of {size(memory.limit_bytes)}"


def _out_of_memory(exit: common_pb2.Exit) -> str:
    kills = exit.memory.oom_kills
    evidence = f" (oom_kill {kills})" if exit.memory.HasField("oom_kills") and kills else ""
    use = f", {memory_use(exit.memory)}" if memory_use(exit.memory) else ""
    return (
        f"the kernel killed it because the node reached its memory limit{use}{evidence}: raise "
        "spec.resources.memory, or use less, for instance smaller batches or fewer DataLoader workers"
    )


def _how(exit: common_pb2.Exit) -> str:
    code = exit.exit_code if exit.HasField("exit_code") else None
    name = exit.signal or _signal_of_shell(code)
    ended = exit.signal or (f"exit code {code}" if code is not None else "")
    ended = f"{ended} ({name})" if name and not exit.signal else ended
    return ": ".join(filter(None, [ended, _why(exit, code, name)]))


def _why(exit: common_pb2.Exit, code: int | None, signal_name: str) -> str:
    raised = ": ".join(filter(None, [exit.exception.type, exit.exception.message]))
    if _gpu_memory(exit, signal_name):
        advice = "the GPU ran out of memory: use smaller batches, or shard the model over more GPUs"
        return f"{advice} ({raised})" if raised else advice
    if signal_name == "SIGKILL":
        return _killed(exit)
    if signal_name:
        return _SIGNALS.get(signal_name, "a signal ended it")
    if raised and code not in (None, _CODE_OF_EXCEPTION):
        return f"its output ends with the traceback of {raised}, which may be the cause"
    if raised:
        hint = _EXCEPTIONS.get(exit.exception.type.rpartition(".")[2], "")
        return "; ".join(
            filter(None, [f"Python raised {raised}{f': {hint}' if hint else ''}", _gpu_memory_before(exit)])
        )
    return _CODES.get(code, "") if code is not None else ""


def _gpu_memory(exit: common_pb2.Exit, signal_name: str) -> bool:
    """Whether GPU memory is the cause, by the exception. Where none is known, by the last lines, except for SIGKILL."""
    if exit.exception.type:
        told = _CUDA_MEMORY.search(exit.exception.message) is not None
        return told or exit.exception.type.endswith("OutOfMemoryError")
    return signal_name != "SIGKILL" and _gpu_memory_in_lines(exit)


def _gpu_memory_before(exit: common_pb2.Exit) -> str:
    """Lines about GPU memory before another exception: the program may have handled that, or failed because of it."""
    return (
        "its last lines say that the GPU ran out of memory, which may be the cause"
        if _gpu_memory_in_lines(exit)
        else ""
    )


def _gpu_memory_in_lines(exit: common_pb2.Exit) -> bool:
    return any(map(_CUDA_MEMORY.search, exit.last_lines))


def _killed(exit: common_pb2.Exit) -> str:
    """A SIGKILL that the kernel's count of kills does not explain."""
    memory = exit.memory
    use = f"memory was at most {memory_use(memory)}" if memory_use(memory) else "its use of memory is not known"
    if memory.HasField("oom_kills"):
        return f"killed from outside; {use}, and the kernel killed nothing for want of memory"
    near = memory.limit_bytes and memory.peak_bytes >= _NEAR_LIMIT * memory.limit_bytes
    possible = "out of memory is likely" if near else "whether memory ran out is not known"
    return f"killed from outside; {use}, {possible}"


def _consequence(exit: common_pb2.Exit) -> str:
    return "it lost the connection to another worker, whose own failure was not seen" if exit.lost_peer else ""


def _killed_below(exit: common_pb2.Exit) -> str:
    """A process that the worker had started, for instance of a DataLoader, was killed, and the worker ended by it."""
    kills = exit.memory.oom_kills
    if not kills:
        return ""
    processes = "a process" if kills == 1 else f"{kills} processes"
    use = memory_use(exit.memory)
    return f"the kernel killed {processes} of the node because it reached its memory limit, {use} (oom_kill {kills})"


def _signal_of_shell(code: int | None) -> str:
    try:
        return signal.Signals((code or 0) - _SHELL_OFFSET).name
    except ValueError:
        return ""
