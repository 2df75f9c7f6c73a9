"""Waits until the threads of a gloo process group have released the tensors of its collectives.

gloo runs a collective on a worker thread, which first wakes the waiter and then releases the tensors. To release a
tensor that Python knows, torch takes the GIL. CPython 3.11 ends a thread that takes the GIL during the interpreter's
shutdown with `pthread_exit`, and torch does not survive that. A training process whose worker thread got no processor
between its last collective and the shutdown therefore aborted after a successful run, with exit code -6, the message
"terminate called without an active exception" and this stack (torch 2.15):

    abort, std::terminate, __gxx_personality_v0, _Unwind_ForcedUnwind, pthread_exit, PyEval_AcquireThread,
    c10::TensorImpl::decref_pyobject, c10d::ProcessGroupGloo::runLoop

`destroy_process_group` does not prevent it: it neither waits for the threads, nor ends them while something, like the
module that DDP or FSDP wrapped, refers to the group. See https://github.com/pytorch/pytorch/issues/190489.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist

_PAUSE_S, _LONGEST_S = 0.001, 2.0


def release_tensors() -> None:
    """Waits until no worker thread of any gloo group of this process holds a tensor.

    Call it directly before the groups are destroyed: no collective can follow, because the number of collectives that
    this function starts differs between processes. A thread still within a collective, because another process does
    not take part, is not waited for longer than 2 seconds per group.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        if "cpu" in {device.type for device in group._device_types}:
            backend = group._get_backend(torch.device("cpu"))
            if isinstance(backend, dist.ProcessGroupGloo):
                _release(backend)


def _release(backend: Any) -> None:
    """Starts collectives until each thread has run one: a thread starts the next collective only after it has released
    the tensors of the one before. A collective without elements involves no other process."""
    # Which thread released a probe. C code alone records it: a thread that runs Python code can lose the GIL before it
    # is done, and would have to take it again.
    released_by: defaultdict[object, int] = defaultdict(get_ident)
    probes: list[object] = []
    deadline = time.monotonic() + _LONGEST_S
    while len({*released_by.values()} - {get_ident()}) < backend.options._threads and time.monotonic() < deadline:
        for _ in range(backend.options._threads):
            tensor = torch.empty(0)
            probe = weakref.ref(tensor, released_by.__getitem__)
            hash(probe)  # it cannot be computed once the tensor is gone
            probes.append(probe)
            backend.allreduce([tensor])
            del tensor
        time.sleep(_PAUSE_S)
