"""What the end of an attempt means, in plain words."""

from __future__ import annotations

import pytest
from trainyard.exit_meaning import meaning, memory_use
from trainyard_protos.v1 import common_pb2
from trainyard_protos.v1.common_pb2 import Exit, MemoryUse, Raised

FULL = MemoryUse(peak_bytes=2**29, limit_bytes=2**29, enforced=True)
MIB = 2**20


def worker(**fields: object) -> Exit:
    return Exit(reason="WorkerFailed", first_failing_rank=1, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (worker(exit_code=3), "exit code 3"),
        (worker(exit_code=1), "exit code 1: the program ended with an error"),
        (worker(exit_code=2), "exit code 2: usage error"),
        (worker(exit_code=126), "exit code 126: the command was found but is not executable"),
        (worker(exit_code=127), "exit code 127: the command was not found"),
        (worker(exit_code=134), "exit code 134 (SIGABRT): native code aborted"),
        (worker(exit_code=139), "exit code 139 (SIGSEGV): native code accessed invalid memory"),
        (worker(exit_code=143), "exit code 143 (SIGTERM): stopped from outside"),
        (worker(signal="SIGSEGV"), "SIGSEGV: native code accessed invalid memory"),
        (worker(signal="SIGBUS"), "/dev/shm is too small"),
        (worker(signal="SIGILL"), "an instruction that this CPU lacks"),
        (worker(signal="SIGUSR1"), "SIGUSR1: a signal ended it"),
        (
            worker(exit_code=1, exception=Raised(type="ValueError", message="bad")),
            "exit code 1: Python raised ValueError: bad",
        ),
        (
            worker(exit_code=1, exception=Raised(type="ModuleNotFoundError", message="No module named 'x'")),
            "add it to spec.python.requirements",
        ),
        (
            worker(exit_code=1, exception=Raised(type="torch.OutOfMemoryError", message="CUDA out of memory.")),
            "exit code 1: the GPU ran out of memory",
        ),
        (worker(exit_code=1, last_lines=["RuntimeError: CUDA error: out of memory"]), "the GPU ran out of memory"),
        (
            worker(exit_code=3, exception=Raised(type="ValueError", message="bad")),
            "exit code 3: its output ends with the traceback of ValueError: bad, which may be the cause",
        ),
        (worker(exit_code=1, lost_peer=True), "lost the connection to another worker"),
        (Exit(reason="DeadlineExceeded"), "spec.deadline"),
        (Exit(reason="Evicted"), "the cluster removed its pod"),
        (Exit(reason="ImageUnavailable"), "the image could not be pulled"),
    ],
)
def test_an_end_has_a_meaning(ended: common_pb2.Exit, words: str) -> None:
    assert words in meaning(ended)


@pytest.mark.parametrize("reason", ["", "Completed", "OfALaterVersion"])
def test_where_nothing_is_known_nothing_is_said(reason: str) -> None:
    assert meaning(Exit(reason=reason)) == ""


HANDLED = ["CUDA out of memory. The batch is halved.", "KeyError: 'labels'"]


def test_gpu_memory_in_the_output_of_a_worker_that_raised_something_else_is_a_possible_cause() -> None:
    raised = Raised(type="KeyError", message="'labels'")
    assert meaning(worker(exit_code=1, exception=raised, last_lines=HANDLED)) == (
        "exit code 1: Python raised KeyError: 'labels'; "
        "its last lines say that the GPU ran out of memory, which may be the cause"
    )


def test_gpu_memory_in_the_output_does_not_explain_a_sigkill() -> None:
    assert meaning(worker(signal="SIGKILL", last_lines=HANDLED)).startswith("SIGKILL: killed from outside")


def test_an_exception_that_tells_of_gpu_memory_is_the_cause() -> None:
    raised = Raised(type="RuntimeError", message="CUDA error: out of memory")
    assert "exit code 1: the GPU ran out of memory" in meaning(worker(exit_code=1, exception=raised))


def test_memory_is_the_cause_only_with_the_kernels_count_as_evidence() -> None:
    memory = MemoryUse(peak_bytes=2**29, limit_bytes=2**29, enforced=True, oom_kills=1)
    words = meaning(Exit(reason="OutOfMemory", signal="SIGKILL", memory=memory))
    assert "512.0 MiB of 512.0 MiB (oom_kill 1)" in words
    assert "raise spec.resources.memory" in words


def test_a_sigkill_without_evidence_names_the_memory_and_no_cause() -> None:
    assert meaning(worker(signal="SIGKILL")) == (
        "SIGKILL: killed from outside; its use of memory is not known, whether memory ran out is not known"
    )
    assert "at most 512.0 MiB of 512.0 MiB, out of memory is likely" in meaning(worker(signal="SIGKILL", memory=FULL))
    below = MemoryUse(peak_bytes=2**28, limit_bytes=2**29, enforced=True)
    assert "256.0 MiB of 512.0 MiB, whether memory ran out is not known" in meaning(
        worker(signal="SIGKILL", memory=below)
    )
    little = MemoryUse(peak_bytes=MIB, limit_bytes=2**29, enforced=True, oom_kills=0)
    assert "the kernel killed nothing for want of memory" in meaning(worker(exit_code=137, memory=little))


def test_a_process_that_the_kernel_killed_below_a_worker_is_named() -> None:
    memory = MemoryUse(peak_bytes=2**29, limit_bytes=2**29, enforced=True, oom_kills=1)
    words = meaning(worker(exit_code=1, exception=Raised(type="RuntimeError", message="DataLoader"), memory=memory))
    assert "the kernel killed a process of the node because it reached its memory limit" in words


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (MemoryUse(peak_bytes=MIB, limit_bytes=2 * MIB), "1.0 MiB of 2.0 MiB"),
        (MemoryUse(limit_bytes=2 * MIB), "an unknown amount of 2.0 MiB"),
        (MemoryUse(peak_bytes=MIB), "1.0 MiB, without a limit"),
        (MemoryUse(), ""),
    ],
)
def test_memory_is_shown_against_its_limit(memory: common_pb2.MemoryUse, words: str) -> None:
    assert memory_use(memory) == words
