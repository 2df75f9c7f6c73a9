"""What the chart makes of values, and what it says about wrong ones. Needs helm, no cluster."""

from __future__ import annotations

import fnmatch
import functools
import ipaddress
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from servicekit.ownership import LAUNCHER, identity_label

from scripts.testbed.proxy import ROUTES
from tests.cluster.release import CHART, HelmFailed, helm, rendered, template

SMALL: dict[str, Any] = {}
LARGE: dict[str, Any] = {
    "database": {"kind": "postgresql", "existingSecret": "databases", "caSecret": "postgres-ca"},
    "scheduler": {"replicas": 2},
    "redis": {"enabled": False, "existingSecret": "broker", "caSecret": "redis-ca"},
    "s3": {"bucket": "artifacts", "endpoint": "https://s3.example", "existingSecret": "s3", "caSecret": "s3-ca"},
    "jobs": {
        "namespace": "jobs",
        "podTemplate": {"spec": {"priorityClassName": "training"}},
        "machineKinds": [
            {
                "name": "a100",
                "max": 8,
                "resources": {"cpu": 95, "memory": "1100Gi", "nvidia.com/gpu": 8},
                "labels": {"cloud.google.com/gke-nodepool": "a100"},
                "taints": [{"key": "team", "value": "vision"}],
                "provisionTimeout": "20m",
            }
        ],
    },
    "operator": {"namespaces": ["team-a", "team-b"]},
    "tls": {"certManager": {"enabled": True, "issuerRef": {"name": "company"}}, "extraHosts": ["yard.example"]},
    "monitoring": {"serviceMonitors": {"enabled": True}},
}
DEVELOPMENT: dict[str, Any] = {"development": True, "storage": {"kind": "emptyDir"}, "gateway": {"replicas": 1}}
INSTALLATIONS = {"small": SMALL, "large": LARGE, "development": DEVELOPMENT}


@pytest.fixture(params=INSTALLATIONS)
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return made(request.param)


@functools.cache
def made(installation: str) -> list[dict[str, Any]]:
    """The objects of one of the installations."""
    return rendered(INSTALLATIONS[installation])


def pods(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each pod that the objects lead to: its owner's kind and name, and its spec."""
    for each in objects:
        spec = each["spec"] if each["kind"] == "Pod" else each.get("spec", {}).get("template", {}).get("spec")
        if spec is not None and "containers" in spec:
            yield f"{each['kind']}/{each['metadata']['name']}", spec


def named(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    return next(each for each in objects if each["kind"] == kind and each["metadata"]["name"] == name)


def test_helm_finds_nothing_to_complain_about() -> None:
    assert "0 chart(s) failed" in helm("lint", str(CHART), "--strict")


def test_no_secret_is_rendered(objects: list[dict[str, Any]]) -> None:
    assert [each for each in objects if each["kind"] == "Secret"] == []


def test_rendering_twice_gives_the_same() -> None:
    values = yaml.safe_dump(LARGE)
    assert template(values) == template(values)


def test_every_pod_is_unprivileged(objects: list[dict[str, Any]]) -> None:
    for owner, spec in pods(objects):
        assert spec["securityContext"]["runAsNonRoot"] is True, owner
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, owner
        assert spec["enableServiceLinks"] is False, owner
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False, owner
            assert security["capabilities"] == {"drop": ["ALL"]}, owner


def test_only_development_may_write_to_the_image() -> None:
    for installation in INSTALLATIONS:
        for owner, spec in pods(made(installation)):
            found = {each["securityContext"]["readOnlyRootFilesystem"] for each in spec["containers"]}
            assert found == {installation != "development"}, owner


def test_every_container_says_what_it_needs(objects: list[dict[str, Any]]) -> None:
    for owner, spec in pods(objects):
        for container in spec["containers"]:
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), owner
            assert "memory" in container["resources"]["limits"], owner


def test_everything_that_goes_on_is_probed(objects: list[dict[str, Any]]) -> None:
    for owner, spec in pods(objects):
        if owner.startswith(("Deployment", "StatefulSet")):
            for container in spec["containers"]:
                assert "readinessProbe" in container, owner
                assert "livenessProbe" in container, owner


def test_only_who_talks_to_the_cluster_gets_a_token_of_it(objects: list[dict[str, Any]]) -> None:
    given = {owner.rpartition("/")[2] for owner, spec in pods(objects) if spec["automountServiceAccountToken"]}
    kinds = {name.removeprefix("yard-trainyard-") for name in given}
    assert kinds <= {"launcher", "operator", "namespace", "setup", "publish", "remove"}


def test_installations_of_one_identity_cannot_both_be_there() -> None:
    """They would have the same cluster role, which helm lets nobody take over."""
    both = [
        helm("template", "yard", str(CHART), f"--namespace={namespace}", f"--set=fullnameOverride={name}")
        for namespace, name in (("a", "b-c"), ("a-b", "c"))
    ]
    for each in both:
        for service in ("LAUNCHER", "OPERATOR"):
            assert f"name: TRAINYARD_{service}_IDENTITY\n              value: a-b-c\n" in each
        roles = {found["metadata"]["name"] for found in yaml.safe_load_all(each) if found["kind"] == "ClusterRole"}
        assert "a-b-c-launcher" in roles


def test_no_role_allows_everything(objects: list[dict[str, Any]]) -> None:
    for role in objects:
        for rule in role.get("rules", ()) if role["kind"] in ("Role", "ClusterRole") else ():
            assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"], role["metadata"]["name"]
            if "secrets" in rule["resources"] and rule["verbs"] != ["create"]:
                if role["metadata"]["name"].endswith("-launcher") and rule["verbs"] == ["get"]:
                    continue  # of jobs, whose names are not known
                assert rule["resourceNames"], role["metadata"]["name"]


def test_the_launcher_may_do_what_the_guide_says_and_no_more() -> None:
    objects = made("small")
    roles = [each for each in objects if each["kind"] in ("Role", "ClusterRole")]
    ours = [each for each in roles if each["metadata"]["name"].endswith("-launcher")]

    def allowed(namespace: str) -> dict[str, set[str]]:
        rules = [rule for role in ours if role["metadata"].get("namespace", "") == namespace for rule in role["rules"]]
        return {resource: set(rule["verbs"]) for rule in rules for resource in rule["resources"]}

    assert {role["metadata"].get("namespace", "") for role in ours} == {"platform-jobs", "kube-node-lease", ""}
    assert allowed("platform-jobs") == {
        "jobs": {"create", "get", "list", "watch", "patch", "delete"},
        "pods": {"get", "list", "watch", "patch", "delete"},
        "pods/log": {"get"},
        "pods/exec": {"create", "get"},
        "services": {"create", "list", "watch"},
        "networkpolicies": {"create", "list", "watch"},
        "events": {"list", "watch"},
        "secrets": {"get"},
    }
    assert allowed("kube-node-lease") == {"leases": {"get"}}
    assert allowed("") == {"nodes": {"list", "watch"}, "pods": {"list", "watch"}, "tokenreviews": {"create"}}


def environ(objects: list[dict[str, Any]], service: str) -> dict[str, str]:
    """The variables of a service, as far as they are said."""
    container = named(objects, "StatefulSet", f"yard-trainyard-{service}")["spec"]["template"]["spec"]["containers"][0]
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


@pytest.mark.parametrize(("jobs", "wanted"), [({}, "auto"), ({"agentVolume": "copy"}, "copy")])
def test_how_the_agent_gets_into_pods_may_be_said(jobs: dict[str, Any], wanted: str) -> None:
    found = environ(rendered({"jobs": jobs}), "launcher")
    assert found["TRAINYARD_LAUNCHER_KUBERNETES_AGENT_VOLUME"] == wanted


@pytest.mark.parametrize(("jobs", "wanted"), [({}, "600"), ({"keepFailedSeconds": 2_000_000}, "2000000")])
def test_how_long_failed_attempts_are_kept_for_kubectl_may_be_said(jobs: dict[str, Any], wanted: str) -> None:
    found = environ(rendered({"jobs": jobs}), "launcher")
    assert found["TRAINYARD_LAUNCHER_KUBERNETES_KEEP_FAILED_S"] == wanted


def test_jobs_may_ask_for_no_priority_class_and_tolerate_no_taint_unless_the_values_allow_it() -> None:
    prefix = "TRAINYARD_LAUNCHER_KUBERNETES_ALLOWED"

    def allowed(objects: list[dict[str, Any]]) -> list[str]:
        found = environ(objects, "launcher")
        return [found[f"{prefix}_PRIORITY_CLASSES"], found[f"{prefix}_TOLERATIONS"]]

    assert allowed(made("small")) == ["", ""]
    values = {"priorityClasses": ["low", "training-*"], "tolerations": ["team"]}
    assert allowed(rendered({"jobs": {"allowed": values}})) == ["low,training-*", "team"]


def test_jobs_run_in_a_namespace_of_their_own_where_nothing_of_the_yard_is_kept() -> None:
    objects = made("small")
    assert environ(objects, "launcher")["TRAINYARD_LAUNCHER_KUBERNETES_NAMESPACE"] == "platform-jobs"
    there = {each["kind"] for each in objects if each["metadata"].get("namespace") == "platform-jobs"}
    assert there == {"ServiceAccount", "Role", "RoleBinding", "NetworkPolicy"}


def test_the_namespace_of_jobs_is_made_before_anything_in_it() -> None:
    hooks = [each for each in made("small") if "pre-install" in str(each["metadata"].get("annotations"))]

    def weight(hook: dict[str, Any]) -> int:
        return int(hook["metadata"]["annotations"]["helm.sh/hook-weight"])

    made_at = weight(named(hooks, "Job", "yard-trainyard-namespace"))
    assert weight(named(hooks, "ClusterRoleBinding", "platform-yard-trainyard-namespace")) < made_at
    inside = [each for each in hooks if each["metadata"].get("namespace") == "platform-jobs"]
    assert inside
    assert all(weight(each) > made_at for each in inside)


@pytest.mark.parametrize("jobs", [{"createNamespace": False}, {"namespace": "platform"}])
def test_nobody_may_make_a_namespace_when_none_is_to_be_made(jobs: dict[str, Any]) -> None:
    for role in rendered({"jobs": jobs}):
        for rule in role.get("rules", ()) if role["kind"] in ("Role", "ClusterRole") else ():
            assert "namespaces" not in rule["resources"], role["metadata"]["name"]


def own_names(objects: list[dict[str, Any]]) -> set[str]:
    """Accounts, claims and secrets that an installation has or uses."""
    accounts = {each["metadata"]["name"] for each in objects if each["kind"] == "ServiceAccount"}
    found = accounts - {"yard-trainyard-job"}
    for _, spec in pods(objects):
        found |= {each["secret"]["secretName"] for each in spec["volumes"] if "secret" in each}
        variables = [variable for container in spec["containers"] for variable in container.get("env", ())]
        found |= {each["valueFrom"]["secretKeyRef"]["name"] for each in variables if "valueFrom" in each}
    for each in objects:
        for claim in each.get("spec", {}).get("volumeClaimTemplates", ()):
            found.add(f"{claim['metadata']['name']}-{each['metadata']['name']}-0")
    return found


def test_the_launcher_knows_every_secret_claim_and_account_that_no_job_may_name(objects: list[dict[str, Any]]) -> None:
    reserved = environ(objects, "launcher")["TRAINYARD_LAUNCHER_KUBERNETES_RESERVED_NAMES"].split(",")
    own = own_names(objects)
    assert len(own) > 10
    assert {name for name in own if not any(fnmatch.fnmatchcase(name, each) for each in reserved)} == set()


def reaches(policy: dict[str, Any], address: str, port: int) -> bool:
    """Whether the policy's rules let its pods reach an address outside of the cluster, as Kubernetes reads them."""
    if "Egress" not in policy["policyTypes"]:
        return True
    target = ipaddress.ip_address(address)

    def within(block: dict[str, Any]) -> bool:
        excepted = [ipaddress.ip_network(each) for each in block.get("except", ())]
        assert all(each.version == ipaddress.ip_network(block["cidr"]).version for each in excepted)
        return target in ipaddress.ip_network(block["cidr"]) and not any(target in each for each in excepted)

    return any(
        ("ports" not in rule or port in {each["port"] for each in rule["ports"]})
        and ("to" not in rule or any(within(peer["ipBlock"]) for peer in rule["to"] if "ipBlock" in peer))
        for rule in policy["egress"]
    )


def test_no_pod_reaches_a_pod_of_a_job_which_reaches_all_other_pods() -> None:
    closed = named(made("small"), "NetworkPolicy", "yard-trainyard-jobs")
    assert closed["metadata"]["namespace"] == "platform-jobs"
    spec = closed["spec"]
    assert spec["podSelector"] == {"matchLabels": {LAUNCHER: "platform-yard-trainyard"}}
    assert (spec["policyTypes"], spec["ingress"]) == (["Ingress", "Egress"], [])
    [rule] = spec["egress"]
    assert "ports" not in rule and {"namespaceSelector": {}} in rule["to"]
    assert environ(made("small"), "launcher")["TRAINYARD_LAUNCHER_KUBERNETES_NETWORK_POLICIES"] == "true"


METADATA = ["169.254.169.254", "fd00:ec2::254"]


@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("address", METADATA)
def test_jobs_do_not_reach_the_metadata_service_of_the_cloud(address: str, restricted: bool) -> None:
    objects = rendered({"networkPolicies": {"jobs": {"restrictEgress": restricted}}})
    spec = named(objects, "NetworkPolicy", "yard-trainyard-jobs")["spec"]
    assert not any(reaches(spec, address, port) for port in (53, 80, 443))


@pytest.mark.parametrize("address", ["93.184.216.34", "2001:db8::1", "169.254.20.10"])
def test_jobs_reach_every_other_address_unless_egress_is_restricted(address: str) -> None:
    assert reaches(named(made("small"), "NetworkPolicy", "yard-trainyard-jobs")["spec"], address, 443)
    objects = rendered({"networkPolicies": {"jobs": {"restrictEgress": True}}})
    spec = named(objects, "NetworkPolicy", "yard-trainyard-jobs")["spec"]
    assert reaches(spec, address, 53) and not reaches(spec, address, 443)


@pytest.mark.parametrize("address", METADATA)
def test_who_needs_the_metadata_service_may_allow_it(address: str) -> None:
    objects = rendered({"networkPolicies": {"jobs": {"blockedAddresses": []}}})
    assert reaches(named(objects, "NetworkPolicy", "yard-trainyard-jobs")["spec"], address, 80)


def test_what_pods_of_jobs_reach_can_be_restricted_to_the_yard_each_other_and_a_list() -> None:
    bucket = {"to": [{"ipBlock": {"cidr": "10.1.2.0/24"}}], "ports": [{"port": 443}]}
    objects = rendered({"networkPolicies": {"jobs": {"restrictEgress": True, "egress": [bucket]}}})
    spec = named(objects, "NetworkPolicy", "yard-trainyard-jobs")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    names, yard, others, listed = spec["egress"]
    assert {each["port"] for each in names["ports"]} == {53}
    gateway = named(objects, "Deployment", "yard-trainyard-gateway")["spec"]["template"]
    [to] = yard["to"]
    assert to["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "platform"}
    assert to["podSelector"]["matchLabels"].items() <= gateway["metadata"]["labels"].items()
    [port] = yard["ports"]
    assert port["port"] in {each["containerPort"] for each in gateway["spec"]["containers"][0]["ports"]}
    assert others == {"to": [{"podSelector": {"matchLabels": {LAUNCHER: "platform-yard-trainyard"}}}]}
    assert listed == bucket


PLACEMENT: dict[str, Any] = {
    "nodeSelector": {"pool": "system"},
    "tolerations": [{"key": "system", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
}


def test_every_pod_of_the_installation_can_be_placed_and_has_the_priority_class() -> None:
    components = ("scheduler", "launcher", "metrics", "artifacts", "operator", "gateway", "redis", "setup")
    issued = {"tls": {"certManager": {"enabled": True, "issuerRef": {"name": "company"}}}}
    values = issued | {"priorityClassName": "platform"} | dict.fromkeys(components, PLACEMENT)
    found = dict(pods(rendered(values)))
    assert {f"Job/yard-trainyard-{hook}" for hook in ("namespace", "setup", "publish", "remove")} <= found.keys()
    for owner, spec in found.items():
        assert {key: spec.get(key) for key in PLACEMENT} == PLACEMENT, owner
        assert spec.get("priorityClassName") == "platform", owner


def test_who_may_edit_a_namespace_may_edit_its_training_jobs_and_who_may_view_it_may_view_them() -> None:
    """By aggregation: Kubernetes adds the rules of labelled roles to its own."""

    def allowed(role: str) -> dict[str, set[str]]:
        label = f"rbac.authorization.k8s.io/aggregate-to-{role}"
        found: dict[str, set[str]] = {}
        for each in made("small"):
            if each["kind"] == "ClusterRole" and each["metadata"]["labels"].get(label) == "true":
                for rule in each["rules"]:
                    assert rule["apiGroups"] == ["trainyard.dev"]
                    for resource in rule["resources"]:
                        found.setdefault(resource, set()).update(rule["verbs"])
        return found

    read = {"get", "list", "watch"}
    assert allowed("view") == {"trainingjobs": read, "trainingjobs/status": {"get"}}
    change = {"create", "update", "patch", "delete", "deletecollection"}
    assert allowed("edit") == {"trainingjobs": read | change, "trainingjobs/status": {"get"}}
    assert allowed("admin") == allowed("edit")


@pytest.mark.parametrize("fullname", ["yard", "y" * 40])
def test_the_chart_and_the_launcher_write_an_identity_as_the_same_label(fullname: str) -> None:
    namespace = "platform-" + "n" * 40
    printed = helm("template", "yard", str(CHART), f"--namespace={namespace}", f"--set=fullnameOverride={fullname}")
    objects = [each for each in yaml.safe_load_all(printed) if each]
    closed = named(objects, "NetworkPolicy", f"{fullname}-jobs")["spec"]
    assert closed["podSelector"]["matchLabels"] == {LAUNCHER: identity_label(f"{namespace}-{fullname}")}


def test_every_pod_has_a_budget_and_a_policy() -> None:
    objects = made("small")
    budgets = {each["metadata"]["name"] for each in objects if each["kind"] == "PodDisruptionBudget"}
    running = {each["metadata"]["name"] for each in objects if each["kind"] in ("Deployment", "StatefulSet")}
    assert budgets == running
    closed = named(objects, "NetworkPolicy", "yard-trainyard-closed")["spec"]
    labels = closed["podSelector"]["matchLabels"]
    for each in objects:
        if each["kind"] in ("Deployment", "StatefulSet"):
            assert labels.items() <= each["spec"]["template"]["metadata"]["labels"].items()


def test_the_gateway_knows_every_service_of_the_yard() -> None:
    nginx = named(made("small"), "ConfigMap", "yard-trainyard-gateway")["data"]["nginx.conf"]
    for service, routes in ROUTES.items():
        for route in routes:
            location = nginx.partition(f"location /{route}/ {{")[2].partition("}")[0]
            assert f"grpc_pass grpcs://{service};" in location, route
    assert nginx.count("location /trainyard.v1.") == sum(map(len, ROUTES.values()))


def test_each_of_several_schedulers_has_an_address() -> None:
    objects = made("large")
    nginx = named(objects, "ConfigMap", "yard-trainyard-gateway")["data"]["nginx.conf"]
    for number in range(2):
        assert f"server yard-trainyard-scheduler-{number}.platform.svc:7443" in nginx
        service = named(objects, "Service", f"yard-trainyard-scheduler-{number}")["spec"]
        assert service["selector"]["statefulset.kubernetes.io/pod-name"] == f"yard-trainyard-scheduler-{number}"


def test_the_large_installation_keeps_nothing_of_its_own_but_metrics_records() -> None:
    objects = made("large")
    for name in ("scheduler", "metrics", "artifacts"):
        container = named(objects, "StatefulSet", f"yard-trainyard-{name}")["spec"]["template"]["spec"]["containers"][0]
        environ = {each["name"]: each for each in container["env"]}
        secret = environ["TRAINYARD_SERVICE_DATABASE_URL"]["valueFrom"]["secretKeyRef"]
        assert secret == {"name": "databases", "key": name}
    volumes = {each["metadata"]["name"] for each in objects if each.get("spec", {}).get("volumeClaimTemplates")}
    assert volumes == {"yard-trainyard-metrics"}
    assert "yard-trainyard-redis" not in {each["metadata"]["name"] for each in objects}


def test_dashboards_and_rules_are_there_for_who_looks() -> None:
    objects = made("large")
    shown = [each for each in objects if each["metadata"].get("labels", {}).get("grafana_dashboard")]
    assert len(shown) == len(list((CHART / "dashboards").glob("*.json"))) > 0
    rules = named(objects, "PrometheusRule", "yard-trainyard-trainyard")["spec"]["groups"]
    assert rules
    alerts = named(objects, "ConfigMap", "yard-trainyard-alerts")["data"]
    assert alerts == {path.name: path.read_text() for path in (CHART / "alerts").glob("*.yaml")}


def test_prometheus_is_given_a_token_that_opens_the_metrics_of_every_service_and_not_that_of_users() -> None:
    objects = made("large")
    monitor = named(objects, "ServiceMonitor", "yard-trainyard")["spec"]
    [endpoint] = monitor["endpoints"]
    secret = endpoint["authorization"]["credentials"]
    assert secret == {"name": "yard-trainyard-scrape-token", "key": "token"}
    for service in ("scheduler", "launcher", "metrics", "artifacts"):
        spec = named(objects, "StatefulSet", f"yard-trainyard-{service}")["spec"]["template"]["spec"]
        [volume] = [each for each in spec["volumes"] if each.get("secret", {}).get("secretName") == secret["name"]]
        mounts = {each["name"]: each["mountPath"] for each in spec["containers"][0]["volumeMounts"]}
        file = environ(objects, service)["TRAINYARD_SERVICE_METRICS_TOKEN_FILE"]
        assert file == f"{mounts[volume['name']]}/token"
    setup = named(objects, "Job", "yard-trainyard-setup")["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "TRAINYARD_SETUP_SCRAPE_TOKEN_SECRET", "value": secret["name"]} in setup["env"]


def test_the_operator_shows_a_token_of_its_own_and_vouches_only_with_the_policy() -> None:
    objects = made("small")
    secret = "yard-trainyard-operator-token"
    for service in ("scheduler", "launcher", "metrics"):
        spec = named(objects, "StatefulSet", f"yard-trainyard-{service}")["spec"]["template"]["spec"]
        [volume] = [each for each in spec["volumes"] if each.get("secret", {}).get("secretName") == secret]
        mounts = {each["name"]: each["mountPath"] for each in spec["containers"][0]["volumeMounts"]}
        file = environ(objects, service)["TRAINYARD_SERVICE_OPERATOR_TOKEN_FILE"]
        assert file == f"{mounts[volume['name']]}/token"
    spec = named(objects, "Deployment", "yard-trainyard-operator")["spec"]["template"]["spec"]
    held = {each["secret"]["secretName"] for each in spec["volumes"] if "secret" in each}
    assert secret in held and "yard-trainyard-token" not in held
    setup = named(objects, "Job", "yard-trainyard-setup")["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "TRAINYARD_SETUP_OPERATOR_TOKEN_SECRET", "value": secret} in setup["env"]
    for enabled in (True, False):
        objects = rendered({"operator": {"admissionPolicy": {"enabled": enabled}}})
        spec = named(objects, "Deployment", "yard-trainyard-operator")["spec"]["template"]["spec"]
        vouches = {"name": "TRAINYARD_OPERATOR_SECRETS_CHECKED", "value": str(enabled).lower()}
        assert vouches in spec["containers"][0]["env"]


NUMBERS: dict[str, Any] = LARGE | {
    "nameOverride": "1",
    "priorityClassName": "2",
    "token": {"existingSecret": "3"},
    "attemptKey": {"existingSecret": "4"},
    "tls": {"existingSecret": "5"},
    "database": {"kind": "postgresql", "existingSecret": "6", "caSecret": "7"},
    "redis": {"enabled": False, "existingSecret": "8", "caSecret": "9"},
    "s3": {"bucket": "10", "existingSecret": "11", "caSecret": "12"},
    "jobs": {"namespace": "007", "pool": "13", "serviceAccount": {"name": "14"}},
    "operator": {"namespaces": ["15", "no"]},
    "storage": {"className": "16"},
}
"""Names that YAML would read as numbers, or as false."""
_MAPPINGS_OF_TEXT = frozenset({"labels", "annotations", "matchLabels", "data"})
_TEXTS = frozenset({"name", "namespace", "value", "key", "secretName", "priorityClassName", "storageClassName"})


def no_texts(found: Any, path: str = "") -> Iterator[str]:
    """Where a text should be and something else is."""
    if isinstance(found, list):
        for number, each in enumerate(found):
            yield from no_texts(each, f"{path}[{number}]")
    elif isinstance(found, dict):
        wanted = found.keys() if path.rpartition(".")[2] in _MAPPINGS_OF_TEXT else found.keys() & _TEXTS
        yield from (f"{path}.{name}: {found[name]!r}" for name in wanted if not isinstance(found[name], str))
        for name, each in found.items():
            yield from no_texts(each, f"{path}.{name}")


def test_names_stay_text_whatever_yaml_would_make_of_them() -> None:
    objects = rendered(NUMBERS)
    objects = [each for each in objects if each["kind"] != "CustomResourceDefinition"]
    assert [*no_texts(objects)] == []
    assert "007" in {each["metadata"].get("namespace") for each in objects}


def test_numbers_are_written_as_services_read_them() -> None:
    env = {"TRAINYARD_METRICS_A": 1073741824, "TRAINYARD_METRICS_B": 0.25, "TRAINYARD_METRICS_C": True}
    objects = rendered({"metrics": {"env": env}, "image": {"tag": 20301231}})
    said = environ(objects, "metrics")
    assert [said[name] for name in env] == ["1073741824", "0.25", "true"]
    images = {container["image"] for _, spec in pods(objects) for container in spec["containers"]}
    assert images == {"trainyard/services:20301231"}


def test_a_certificate_may_be_for_every_host_of_a_domain() -> None:
    hosts = ["*.lab.example", "yard.example", "2001:db8::1", "10.0.0.7"]
    tls = {"certManager": {"enabled": True, "issuerRef": {"name": "company"}}, "extraHosts": hosts}
    certificate = named(rendered({"tls": tls}), "Certificate", "yard-trainyard")["spec"]
    assert certificate["dnsNames"][-2:] == hosts[:2]
    assert certificate["ipAddresses"][-2:] == hosts[2:]


def test_what_is_empty_in_a_file_of_values_is_as_by_default() -> None:
    empty = {"operator": {"namespaces": None}, "podSecurityContext": None, "metrics": {"podAnnotations": None}}
    assert rendered(empty) == made("small")


WRONG = {
    "/metrics/replicas": {"metrics": {"replicas": 2}},
    "/database/kind": {"database": {"kind": "mysql"}},
    "'clas' not allowed": {"storage": {"clas": "fast"}},
    "/s3/endpoint": {"s3": {"bucket": "b", "endpoint": "s3.example"}},
    "/image/pullPolicy": {"image": {"pullPolicy": "Sometimes"}},
    "scheduler.replicas: is 3": {"scheduler": {"replicas": 3}},
    "database.existingSecret: needed": {"database": {"kind": "postgresql"}},
    "redis.existingSecret: needed": {"redis": {"enabled": False}},
    "jobs.podSecurity: is restricted": {"jobs": {"hostPaths": True}},
    "storage.hostPath: needed": {"storage": {"kind": "hostPath"}},
    "tls.certManager.issuerRef: needed": {"tls": {"certManager": {"enabled": True}}},
    "/gateway/limits/idleTimeout": {"gateway": {"limits": {"idleTimeout": "soon"}}},
    "gateway.limits.calls: 5 replicas could open 40960": {"gateway": {"replicas": 5}},
    "tls.existingSecret: cert-manager makes": {
        "tls": {"existingSecret": "mine", "certManager": {"enabled": True, "issuerRef": {"name": "x"}}}
    },
    "s3.bucket: needed": {"s3": {"existingSecret": "keys"}},
    "/jobs/agentVolume": {"jobs": {"agentVolume": "mount"}},
    "/jobs/podSecurity": {"jobs": {"podSecurity": "strict"}},
    "/jobs/namespace": {"jobs": {"namespace": "j" * 64}},
    "/fullnameOverride": {"fullnameOverride": "My.Yard"},
    "/nameOverride": {"nameOverride": "My Yard"},
    "/tls/extraHosts/0": {"tls": {"extraHosts": ["https://yard.example"]}},
    "/networkPolicies/jobs": {"networkPolicies": {"jobs": {"egres": []}}},
    "/networkPolicies/jobs/blockedAddresses/0": {
        "networkPolicies": {"jobs": {"blockedAddresses": ["169.254.169.254"]}}
    },
}


@pytest.mark.parametrize("said", WRONG)
def test_a_wrong_value_is_named(said: str) -> None:
    with pytest.raises(HelmFailed, match=said):
        rendered(WRONG[said])


def test_all_values_that_need_each_other_are_named_at_once() -> None:
    with pytest.raises(HelmFailed) as refused:
        rendered({"scheduler": {"replicas": 2}, "redis": {"enabled": False}})
    assert "scheduler.replicas" in str(refused.value) and "redis.existingSecret" in str(refused.value)
