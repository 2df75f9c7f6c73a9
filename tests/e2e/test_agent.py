"""What an agent costs while its workers work."""

import psutil

from tests.conftest import wait_until
from tests.jobs import WAIT_S, document, running

MIB = 2**20


def test_an_agent_stays_under_40_mebibytes(shared_yard, client):
    job = client.submit(document(["sleep", "600"], workersPerNode=2, gracePeriod="1s"))

    running(job)

    def sampled():
        nodes = client.describe(job.id).nodes
        return nodes and all(worker.usage.memory_bytes for worker in nodes[0].workers)

    wait_until(sampled, "the agent to have everything going")
    wait_until(lambda: job.metrics("system/*"), "the agent's first shipment")
    [agent] = [each for each in shared_yard.agents() if job.status().attempt_id in " ".join(each.cmdline())]
    assert psutil.Process(agent.pid).memory_info().rss <= 40 * MIB
    job.cancel()
    job.wait(WAIT_S, check=False)
