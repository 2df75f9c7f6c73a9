"""What the agent measures of its workers."""

import os

from trainyard.agent.gpu import Gpus
from trainyard.agent.sampler import Sampler, Target, points_of


def test_a_worker_with_a_device_that_cannot_be_read_is_measured_all_the_same():
    usage = Sampler([Target(0, os.getpid(), gpus=(0,))], Gpus(())).sample()[0]
    assert [name for name, _ in points_of(usage)] == ["system/cpu", "system/memory_bytes"]
    assert usage.memory_bytes > 0
