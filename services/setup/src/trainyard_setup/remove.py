"""After a removal: what the installation made goes, and what it keeps is named. Data is only ever removed by people."""

from __future__ import annotations

from trainyard_setup.cluster import Cluster
from trainyard_setup.settings import Settings


def remove(settings: Settings, cluster: Cluster) -> str:
    """Removes jobs, secrets and config maps of the installation; returns what to tell about the rest."""
    jobs = cluster.jobs(settings.jobs_namespace, settings.pool, settings.launcher, settings.endpoint)
    cluster.delete_jobs(settings.jobs_namespace, jobs)
    cluster.delete_jobs(settings.namespace, cluster.failed_hooks(settings.namespace, settings.release))
    if settings.operator:
        cluster.release_resources(settings.launcher, settings.watched())
    made = [
        settings.token_secret,
        settings.scrape_token_secret,
        settings.operator_token_secret,
        settings.attempt_key_secret,
        settings.redis_secret,
        settings.certificate_secret,
        settings.authority_secret,
    ]
    for namespace in {settings.namespace, settings.jobs_namespace}:
        secrets = [name for name in made if name and namespace == settings.namespace]
        cluster.delete_made(namespace, secrets, [name for name in [settings.authority_config_map] if name])
    return _kept(settings, cluster.claims(settings.namespace))


def _kept(settings: Settings, claims: list[str]) -> str:
    lines = [
        "Kept: TrainingJob resources and their definition. To remove them with every TrainingJob of the cluster:",
        "  kubectl delete crd trainingjobs.trainyard.dev",
    ]
    if settings.jobs_namespace != settings.namespace:
        lines += [
            "Kept: the namespace of jobs, with what people put there. To remove it with everything in it:",
            f"  kubectl delete namespace {settings.jobs_namespace}",
        ]
    if claims:
        lines = [
            f"Kept: the data of the yard, in {len(claims)} volumes. A new installation of this name takes",
            "them up again; to remove them:",
            f"  kubectl delete persistentvolumeclaim --namespace {settings.namespace} {' '.join(claims)}",
            *lines,
        ]
    return "\n".join(lines)
