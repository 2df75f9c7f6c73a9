"""Jobs as pods of a real cluster: what they are made of, how they begin and end, what is left of them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

import pytest
from trainyard import errors
from trainyard.client import Client, JobHandle
from trainyard.errors import InvalidSpec

from tests.cluster.yards import ClusterYard, is_kept
from tests.conftest import wait_until
from tests.jobs import document, output, python, reasons

WAIT_S = 240

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture
def client(yard_on_cluster: ClusterYard) -> Iterator[Client]:
    with yard_on_cluster.client() as client:
        yield client
    yard_on_cluster.cancel_all()


def ended(job: JobHandle) -> str:
    """How a job ended."""
    status = job.wait(WAIT_S, check=False)
    return f"{status.reason}: {status.message}"


def events(job: JobHandle, reason: str) -> list[str]:
    return [event.message for event in job.events() if event.reason == reason]


FOREVER = python("import signal; print('here', flush=True); signal.pause()")


def begun(job: JobHandle) -> None:
    wait_until(lambda: "here" in output(job), f"{job.name} to print", WAIT_S)


def pods(yard: ClusterYard, job: JobHandle) -> list[dict]:
    return yard.get("pods", **{"job-id": job.id})


def test_a_job_runs_in_a_pod_as_nobody_special_and_leaves_nothing(yard_on_cluster: ClusterYard, client: Client) -> None:
    code = """
        import os
        print(os.getuid(), os.getcwd())
        print(*[name for name in os.environ if "TOKEN" in name or "ENDPOINT" in name])
    """
    job = client.submit(document(python(code)))
    assert ended(job).startswith("Completed")
    assert output(job) == ["1000 /trainyard/node/work", ""]
    yard_on_cluster.assert_nothing_left(job.id)


def test_a_failing_worker_is_named_with_its_exit_code_and_last_lines(client: Client) -> None:
    job = client.submit(document(python("import sys; print('no such file'); sys.exit(3)")))
    job.wait(WAIT_S, check=False)
    exit = job.status().exit
    assert (exit.reason, exit.exit_code, list(exit.last_lines)) == ("WorkerFailed", 3, ["no such file"])
    assert (exit.first_failing_rank, exit.node, exit.local_rank, exit.meaning) == (0, 0, 0, "exit code 3")
    assert 0 < exit.memory.peak_bytes <= exit.memory.limit_bytes
    assert (exit.memory.sampled, exit.memory.enforced, exit.memory.oom_kills) == (False, True, 0)


def kept(yard: ClusterYard, job: JobHandle, attempts: int) -> list[dict]:
    """The Jobs of failed attempts, once all of them are kept."""
    wait_until(lambda: sum(map(is_kept, yard.get("jobs", **{"job-id": job.id}))) == attempts, "failed attempts", WAIT_S)
    return yard.get("jobs", **{"job-id": job.id})


def test_kubectl_logs_shows_what_failed_attempts_printed_and_a_retry_does_not_wait_for_them(
    yard_on_cluster: ClusterYard, client: Client
) -> None:
    code = "import os; print('printed by', os.environ['TRAINYARD_ATTEMPT']); raise SystemExit(3)"
    job = client.submit(document(python(code), retries={"limit": 1, "backoff": "1ms"}))
    assert "WorkerFailed" in ended(job)
    found = kept(yard_on_cluster, job, attempts=2)
    assert [each["spec"]["ttlSecondsAfterFinished"] for each in found] == [600, 600]
    printed = [yard_on_cluster.kubectl("logs", f"job/{each['metadata']['name']}") for each in found]
    lines = [line for text in printed for line in text.splitlines() if line.startswith("printed")]
    assert sorted(lines) == ["printed by 1", "printed by 2"]


def test_what_is_kept_of_a_failed_attempt_goes_when_its_job_is_removed(
    yard_on_cluster: ClusterYard, client: Client
) -> None:
    job = client.submit(document(["false"], ttl="1ms"))

    def removed() -> bool:
        try:
            client.job(job.id)
        except errors.NotFound:
            return True
        return False

    wait_until(removed, "the job to be removed", WAIT_S)
    selector = f"--selector=trainyard.dev/job-id={job.id}"
    wait_until(lambda: not yard_on_cluster.kubectl("get", "jobs,pods", selector, "--output=name"), "its end", WAIT_S)


def test_nodes_find_each_other_and_kubectl_logs_shows_what_they_print(
    yard_on_cluster: ClusterYard, client: Client
) -> None:
    code = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        sum = torch.ones(1)
        dist.all_reduce(sum)
        print("sum", int(sum), "rank", dist.get_rank(), flush=True)
        dist.destroy_process_group()
        import signal; print("here", flush=True); signal.pause()
    """
    job = client.submit(document(python(code), runtime="torchrun", nodes=2))
    wait_until(lambda: output(job).count("here") == 2, "both nodes to print", WAIT_S)
    assert sorted(line for line in output(job) if line.startswith("sum")) == ["sum 2 rank 0", "sum 2 rank 1"]
    made = yard_on_cluster.get("jobs", **{"job-id": job.id}) + yard_on_cluster.get("services", **{"job-id": job.id})
    assert [each["kind"] for each in made] == ["Job", "Service"]
    for pod in pods(yard_on_cluster, job):
        name = pod["metadata"]["name"]
        wait_until(lambda name=name: "sum 2 rank" in yard_on_cluster.kubectl("logs", name), f"what {name} printed")
    job.cancel()
    assert job.wait(WAIT_S, check=False).reason == "Cancelled"
    yard_on_cluster.assert_nothing_left(job.id)


def test_a_deleted_pod_is_told_and_the_job_is_tried_again_for_free(
    yard_on_cluster: ClusterYard, client: Client
) -> None:
    job = client.submit(document(FOREVER, nodes=2, gracePeriod="1s"))
    begun(job)
    [first, *_] = pods(yard_on_cluster, job)
    yard_on_cluster.kubectl("delete", "pod", first["metadata"]["name"], "--wait=false")
    wait_until(lambda: job.status().attempt == 2, "a second attempt", WAIT_S)
    assert reasons(job)[0] == "PodDeleted"
    assert job.status().free_retries_used == 1


def test_a_deleted_job_object_is_told_as_well(yard_on_cluster: ClusterYard, client: Client) -> None:
    job = client.submit(document(FOREVER, gracePeriod="1s"))
    begun(job)
    yard_on_cluster.kubectl("delete", "jobs", f"--selector=trainyard.dev/job-id={job.id}", "--wait=false")
    wait_until(lambda: job.status().attempt == 2, "a second attempt", WAIT_S)
    assert reasons(job)[0] == "PodDeleted"


def test_an_image_that_is_not_there_is_told_with_its_name(client: Client) -> None:
    wanted = {"image": "localhost/none/such:1", "kubernetes": {"pullPolicy": "Never"}}
    job = client.submit(document(["true"], **wanted))
    why = ended(job)
    assert why.startswith("ImageUnavailable")
    assert "localhost/none/such:1" in why
    assert events(job, "ImageUnavailable")


def test_a_job_that_no_node_takes_is_told_which_label_it_is_and_makes_no_pod(
    yard_on_cluster: ClusterYard, client: Client
) -> None:
    job = client.submit(document(["true"], kubernetes={"nodeSelector": {"gpu": "a100"}}))
    assert job.status().pending.never_fits
    shown = yard_on_cluster.yard("explain", job.id).stdout
    assert "no machine has gpu=a100. Change spec.kubernetes.nodeSelector" in " ".join(shown.split())
    assert yard_on_cluster.get("jobs", **{"job-id": job.id}) == []
    job.cancel()
    assert job.wait(WAIT_S, check=False).reason == "Cancelled"


def of_secret(name: str, key: str = "api-key") -> list[dict[str, object]]:
    return [{"name": "KEY", "from": {"secret": {"name": name, "key": key}}}]


@pytest.fixture
def wandb(yard_on_cluster: ClusterYard) -> Iterator[str]:
    """A Secret that every user of the yard may have."""
    name = f"wandb-{secrets.token_hex(4)}"
    yard_on_cluster.kubectl("create", "secret", "generic", name, "--from-literal=api-key=s3cret")
    yard_on_cluster.kubectl("label", "secret", name, USABLE)
    yield name
    yard_on_cluster.kubectl("delete", "secret", name)


USABLE = "trainyard.dev/usable=true"


def test_a_key_that_a_secret_does_not_have_is_told_by_name(wandb: str, client: Client) -> None:
    job = client.submit(document(["true"], secrets=of_secret(wandb, "nowhere")))
    wait_until(lambda: events(job, "VolumeUnavailable"), "a remark", WAIT_S)
    assert "nowhere" in events(job, "VolumeUnavailable")[0]


def test_a_secret_of_the_cluster_reaches_the_workers(wandb: str, client: Client) -> None:
    code = python("import os; print(os.environ['KEY'][::-1])")
    job = client.submit(document(code, secrets=of_secret(wandb)))
    assert ended(job).startswith("Completed")
    assert output(job) == ["terc3s"]


def test_a_label_that_goes_while_pods_wait_keeps_the_secret_from_the_workers(
    wandb: str, yard_on_cluster: ClusterYard, client: Client
) -> None:
    job = client.submit(document(python("print('here')"), secrets=of_secret(wandb, "later")))
    wait_until(lambda: events(job, "VolumeUnavailable"), "a remark", WAIT_S)
    yard_on_cluster.kubectl("label", "secret", wandb, "trainyard.dev/usable-")
    yard_on_cluster.kubectl("patch", "secret", wandb, '--patch={"stringData":{"later":"s3cret"}}')
    assert "without the label trainyard.dev/usable" in ended(job)
    assert output(job) == []


@pytest.mark.parametrize("way", ["a variable", "a volume", "a pull secret"])
def test_a_job_that_is_submitted_gets_no_secret_without_a_label(
    wandb: str, yard_on_cluster: ClusterYard, client: Client, way: str
) -> None:
    yard_on_cluster.kubectl("label", "secret", wandb, "trainyard.dev/usable-")
    fields, field = {
        "a variable": ({"secrets": of_secret(wandb)}, "spec.secrets[0].from.secret"),
        "a volume": (
            {"kubernetes": {"volumes": [{"name": "v", "mountPath": "/v", "secret": wandb}]}},
            "spec.kubernetes.volumes[0].secret",
        ),
        "a pull secret": ({"kubernetes": {"pullSecrets": [wandb]}}, "spec.kubernetes.pullSecrets[0]"),
    }[way]
    job = client.submit(document(["true"], retries={"limit": 3}, **fields))
    said = ended(job)
    assert said.startswith("SecretUnavailable")
    assert f"{field}: jobs that are submitted to the yard get no Secret without the label trainyard.dev/usable" in said
    assert f"kubectl label secret {wandb} --namespace={yard_on_cluster.namespace} {USABLE}" in said
    assert yard_on_cluster.get("jobs", **{"job-id": job.id}) == []


def test_the_label_is_looked_at_for_each_attempt(wandb: str, yard_on_cluster: ClusterYard, client: Client) -> None:
    job = client.submit(document(["false"], secrets=of_secret(wandb)))
    assert ended(job).startswith("WorkerFailed")
    yard_on_cluster.kubectl("delete", "secret", wandb)
    job.retry()
    assert f"there is no Secret '{wandb}' in namespace {yard_on_cluster.namespace}" in ended(job)
    yard_on_cluster.kubectl("create", "secret", "generic", wandb, "--from-literal=api-key=other")
    job.retry()
    assert "without the label trainyard.dev/usable" in ended(job)


def test_a_priority_class_that_is_not_allowed_is_refused_when_it_is_submitted(client: Client) -> None:
    with pytest.raises(InvalidSpec) as refused:
        client.submit(document(["true"], kubernetes={"priorityClass": "system-node-critical"}))
    assert "spec.kubernetes.priorityClass: 'system-node-critical' is not allowed" in str(refused.value)
    assert "jobs.allowed.priorityClasses of the chart" in str(refused.value)


def test_a_worker_that_uses_too_much_memory_is_told_so(client: Client) -> None:
    code = "hog = [bytearray(1 << 24) for _ in range(1 << 10)]"
    job = client.submit(document(python(code), resources={"cpu": "500m", "memory": "64Mi"}))
    why = ended(job)
    assert why.startswith("OutOfMemory")
    assert "memory" in why
    exit = job.status().exit
    assert exit.meaning.startswith("the kernel killed it because the node reached its memory limit")
    assert exit.memory.enforced
    assert 0 < exit.memory.peak_bytes <= exit.memory.limit_bytes
    assert exit.memory.limit_bytes >= 64 * 2**20


def test_a_pod_the_quota_forbids_is_told_with_the_quotas_words(own_yard: ClusterYard) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "small"},
        "spec": {"hard": {"pods": "0"}},
    }
    own_yard.kubectl("apply", "--filename=-", input=json.dumps(quota))
    with own_yard.client() as client:
        job = client.submit(document(["true"]))
        wait_until(lambda: events(job, "PodsRefused"), "a remark", WAIT_S)
        assert "exceeded quota: small" in events(job, "PodsRefused")[0]
        job.cancel()
        assert job.wait(WAIT_S, check=False).reason == "Cancelled"


def test_a_token_of_another_pod_gets_no_plan(yard_on_cluster: ClusterYard, client: Client) -> None:
    """A pod of anybody's in the namespace has a token as well: it is not that of the node's pod."""
    job = client.submit(document(FOREVER))
    begun(job)
    attempt_id = job.status().attempt_id
    stranger = yard_on_cluster.kubectl("create", "token", "default", "--audience=trainyard", "--duration=10m").strip()
    for token, why in ((stranger, "not bound to a pod"), ("nonsense", "no service-account token")):
        assert why in yard_on_cluster.join(attempt_id, 0, token)


def test_a_shell_has_the_folder_and_environment_of_the_worker(yard_on_cluster: ClusterYard, client: Client) -> None:
    job = client.submit(document(FOREVER, env={"COLOUR": "blue"}))
    begun(job)
    shown = yard_on_cluster.yard("shell", job.id, "--", "sh", "-c", "echo $COLOUR; pwd; exit 7")
    assert shown.stdout.split() == ["blue", "/trainyard/node/work"], shown.stderr
    assert shown.returncode == 7
    fed = yard_on_cluster.yard("shell", job.id, "--", "cat", input="through\n")
    assert (fed.stdout, fed.returncode) == ("through\n", 0)


def test_stacks_of_all_ranks_come_out_of_the_pods(yard_on_cluster: ClusterYard, client: Client) -> None:
    job = client.submit(document(FOREVER, nodes=2))
    begun(job)
    # An agent prints before it is connected: until then its rank has an error.
    wait_until(lambda: all("<module>" in each.text for each in client.stacks(job.id)), "stacks of all ranks", WAIT_S)
    assert [each.rank for each in client.stacks(job.id)] == [0, 1]


def test_every_wish_of_a_job_is_taken_by_the_api_server(yard_on_cluster: ClusterYard, client: Client) -> None:
    yard_on_cluster.kubectl("create", "configmap", "settings", "--from-literal=rate=0.1")
    wishes = {
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "volumes": [
            {"name": "settings", "mountPath": "/settings", "configMap": "settings"},
            {"name": "scratch", "mountPath": "/scratch", "emptyDir": {"sizeLimit": "1Gi"}},
        ],
        "sharedMemory": "96Mi",
        "topology": "spread",
        "runAsUser": 4242,
    }
    code = """
        import os
        print(os.getuid(), open("/settings/rate").read(), os.statvfs("/dev/shm").f_blocks * 4096 >> 20)
        open("/scratch/file", "w").write("mine")
    """
    job = client.submit(document(python(code), kubernetes=wishes))
    assert ended(job).startswith("Completed"), output(job)
    assert output(job) == ["4242 0.1 96"]
