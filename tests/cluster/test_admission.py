"""The API server refuses a TrainingJob that names Secrets which its author may not read, or that asks for what the
installation does not allow.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import pytest

from scripts.testbed.cluster import locks
from scripts.testbed.cluster.cluster import Cluster
from tests.cluster.release import rendered
from tests.cluster.resources import KIND, Resources, install, namespace
from tests.conftest import wait_until
from tests.jobs import document

POLICY, BINDING = "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"
READER, WRITER = "reader", "writer"
"""Users who may write TrainingJobs; `reader` may read the Secret `hub` as well."""
ALLOWED = {"priorityClasses": ["training-*", "batch.low"], "tolerations": ["team/*", "gpu"]}


class Yard(NamedTuple):
    """What an installation's policy covers.

    Attributes:
        resources: of the namespace that the operator watches.
        jobs: namespace in which pods would run.
        policy: name of the policy.
    """

    resources: Resources
    jobs: str
    policy: str

    def create(self, user: str, body: Mapping[str, Any], *options: str) -> str:
        """What kubectl says when a user creates a resource."""
        arguments = ("create", "--filename=-", f"--as={user}", *options)
        return self.resources.kubectl(*arguments, input=json.dumps(body), check=False)

    def patch(self, user: str, name: str, patch: Mapping[str, Any], *options: str) -> str:
        """What kubectl says when a user changes a resource."""
        options = (f"--as={user}", "--type=merge", f"--patch={json.dumps(patch)}", *options)
        return self.resources.kubectl("patch", KIND, name, *options, check=False)


@pytest.fixture(scope="module")
def yard(cluster: Cluster) -> Iterator[Yard]:
    """The policy of an installation; its operator does not run. Names of resources are the tests' own."""
    with locks.lasting(cluster.layout, _guarded(cluster)) as found:
        yield found


@contextmanager
def _guarded(cluster: Cluster) -> Iterator[Yard]:
    install(cluster)
    with ExitStack() as stack:
        watched, jobs = stack.enter_context(namespace(cluster)), stack.enter_context(namespace(cluster))
        policy = stack.enter_context(_policy(cluster, watched, jobs))
        found = Yard(Resources(cluster, watched), jobs, policy)
        _allow(cluster, watched, "write", "--verb=create,get,update,patch", f"--resource={KIND}", READER, WRITER)
        _allow(cluster, jobs, "hub", "--verb=get", "--resource=secrets", "--resource-name=hub", READER)
        asks = document(["true"], "asks", kubernetes={"priorityClass": "none"})
        wait_until(lambda: "denied" in found.create(WRITER, asks, "--dry-run=server"), "the policy to be known")
        yield found


@contextmanager
def _policy(cluster: Cluster, watched: str, jobs: str) -> Iterator[str]:
    """The policy that the chart makes, for one namespace; returns its name."""
    values = {
        "fullnameOverride": f"guard-{secrets.token_hex(4)}",
        "jobs": {"namespace": jobs, "allowed": ALLOWED},
        "operator": {"namespaces": [watched]},
    }
    made = [each for each in rendered(values) if each["kind"] in (POLICY, BINDING)]
    assert {each["kind"] for each in made} == {POLICY, BINDING}
    cluster.apply(*made)
    names = {each["kind"]: each["metadata"]["name"] for each in made}
    try:
        yield names[POLICY]
    finally:
        for kind in (BINDING, POLICY):
            cluster.kubectl("delete", kind, names[kind])


def _allow(cluster: Cluster, where: str, role: str, *rest: str) -> None:
    """Gives users a role in a namespace: options of `kubectl create role`, then names."""
    options = [each for each in rest if each.startswith("--")]
    cluster.kubectl("create", "role", role, f"--namespace={where}", *options)
    users = [f"--user={each}" for each in rest if not each.startswith("--")]
    cluster.kubectl("create", "rolebinding", role, f"--namespace={where}", f"--role={role}", *users)


def variable(secret: str) -> dict[str, Any]:
    return {"secrets": [{"name": "KEY", "from": {"secret": {"name": secret, "key": "token"}}}]}


def volume(secret: str) -> dict[str, Any]:
    return {"kubernetes": {"volumes": [{"name": "keys", "mountPath": "/keys", "secret": secret}]}}


def pull_secret(secret: str) -> dict[str, Any]:
    return {"kubernetes": {"pullSecrets": [secret]}}


WAYS = {"a variable": variable, "a volume": volume, "a pull secret": pull_secret}


def test_the_api_server_finds_nothing_wrong_with_the_expressions(yard: Yard, cluster: Cluster) -> None:
    def checked() -> dict[str, Any]:
        found = cluster.get(POLICY, yard.policy)
        seen = found.get("status", {}).get("observedGeneration") == found["metadata"]["generation"]
        return dict(found["status"]) if seen else {}

    wait_until(lambda: "typeChecking" in checked(), "the API server to check the types")
    assert checked()["typeChecking"] == {}


@pytest.mark.parametrize("way", WAYS)
def test_a_secret_can_be_named_by_who_may_get_it_alone(yard: Yard, way: str) -> None:
    job = document(["true"], f"one-{list(WAYS).index(way)}", **WAYS[way]("hub"))
    said = yard.create(WRITER, job)
    assert f"the spec names the Secret 'hub', which user 'writer' may not get in the namespace {yard.jobs}" in said
    assert f"kubectl create role get-hub --namespace={yard.jobs} --verb=get --resource=secrets" in said
    assert "created" in yard.create(READER, job)
    assert "the Secret 'other'" in yard.create(READER, document(["true"], "two", **WAYS[way]("other")))


def test_who_changes_a_spec_must_be_allowed_to_get_its_secrets_as_well(yard: Yard) -> None:
    yard.create(READER, document(["true"], "shared", **variable("hub")))
    assert "may not get" in yard.patch(WRITER, "shared", {"spec": {"command": ["printenv", "KEY"]}})
    assert "may not get" in yard.patch(READER, "shared", {"spec": variable("other")})
    assert "patched" in yard.patch(READER, "shared", {"spec": {"command": ["printenv", "KEY"]}})


def test_who_may_not_get_a_secret_may_still_change_all_but_the_spec(yard: Yard, cluster: Cluster) -> None:
    yard.create(READER, document(["true"], "held", **variable("hub")))
    for metadata in ({"labels": {"a": "b"}}, {"finalizers": ["example.com/x"]}, {"finalizers": None}):
        assert "patched" in yard.patch(WRITER, "held", {"metadata": metadata})
    _allow(cluster, yard.resources.namespace, "status", "--verb=get,patch", f"--resource={KIND}/status", WRITER)
    assert "patched" in yard.patch(WRITER, "held", {"status": {"phase": "Running"}}, "--subresource=status")


def test_each_of_the_secrets_is_checked_and_too_many_are_refused(yard: Yard, cluster: Cluster) -> None:
    def names(count: int) -> dict[str, Any]:
        """A job that names so many Secrets, and `hub` twice."""
        job = {"name": f"V{count}", "from": {"secret": {"name": "hub", "key": "k"}}}
        wanted = [{"name": f"V{i}", "from": {"secret": {"name": f"s-{i}", "key": "k"}}} for i in range(count)]
        return document(["true"], "many", secrets=[job, *wanted, job | {"name": "AGAIN"}])

    _allow(cluster, yard.jobs, "some", "--verb=get", "--resource=secrets", *_names(18), READER)
    assert "the Secret 's-18'" in yard.create(READER, names(19))
    assert "more than 20 different Secrets" in yard.create(READER, names(20))
    _allow(cluster, yard.jobs, "each", "--verb=get", "--resource=secrets", READER)
    most = names(62)
    most["spec"]["kubernetes"] = {
        "volumes": [{"name": f"v-{i}", "mountPath": f"/keys/{i}", "secret": f"v-{i}"} for i in range(32)],
        "pullSecrets": [f"p-{i}" for i in range(16)],
    }
    assert "created" in yard.create(READER, most)


def _names(count: int) -> list[str]:
    return [f"--resource-name=s-{i}" for i in range(count)]


REFUSED = {
    "a class": ({"priorityClass": "system"}, "spec.kubernetes.priorityClass: 'system'", "training-*, batch.low"),
    "a dot is a dot": ({"priorityClass": "batchxlow"}, "spec.kubernetes.priorityClass: 'batchxlow'", "batch.low"),
    "a key": ({"tolerations": [{"key": "gpu"}, {"key": "gpus"}]}, "spec.kubernetes.tolerations: 'gpus'", "team/*, gpu"),
    "every taint": ({"tolerations": [{"operator": "Exists"}]}, "tolerations: every taint", "jobs.allowed.tolerations"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_installation_does_not_allow_is_refused(yard: Yard, case: str) -> None:
    wishes, *words = REFUSED[case]
    said = yard.create(WRITER, document(["true"], "wishes", kubernetes=wishes))
    for word in words:
        assert word in said


def test_what_the_installation_allows_is_taken(yard: Yard) -> None:
    allowed = {
        "priorityClass": "training-low",
        "tolerations": [{"key": "gpu"}, {"key": "team/a", "operator": "Exists"}],
    }
    assert "created" in yard.create(WRITER, document(["true"], "allowed", kubernetes=allowed))


def test_resources_of_namespaces_that_the_operator_does_not_watch_are_left_alone(yard: Yard, cluster: Cluster) -> None:
    elsewhere = Resources(cluster, yard.jobs)
    _allow(cluster, yard.jobs, "write", "--verb=create,get", f"--resource={KIND}", WRITER)
    body = json.dumps(document(["true"], "elsewhere", **variable("hub")))
    assert "created" in elsewhere.kubectl("create", "--filename=-", f"--as={WRITER}", input=body)


def test_every_namespace_is_covered_when_the_operator_watches_all() -> None:
    (policy,) = [each for each in rendered({}) if each["kind"] == POLICY]
    assert policy["metadata"]["name"] == "platform-yard-trainyard-trainingjobs"
    assert "namespaceSelector" not in policy["spec"]["matchConstraints"]


def test_the_policy_can_be_left_out() -> None:
    made = rendered({"operator": {"admissionPolicy": {"enabled": False}}})
    assert not [each for each in made if each["kind"] in (POLICY, BINDING)]
