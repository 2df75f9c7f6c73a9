"""What the chart tells the hook, in `TRAINYARD_SETUP_*`."""

from __future__ import annotations

from pydantic import Field
from servicekit.settings import Settings as ServiceSettings


class Settings(ServiceSettings):
    """Frozen; unknown keys are refused. The name of a secret that somebody else provides is empty."""

    release: str = Field(min_length=1)
    """Name of the installation: the prefix of everything that is made."""
    chart_version: str = ""
    """The chart's appVersion: of that version the image has to be."""
    namespace: str = Field(min_length=1)
    """Where its services are."""
    jobs_namespace: str = Field(min_length=1)
    """Where its jobs run."""
    pod_security: str = "restricted"
    """Standard of pod security to which that namespace holds its pods, when it is made."""
    pool: str = "cluster"
    """The pool of the launcher: jobs' objects carry it as a label."""
    launcher: str = ""
    """Identity of the launcher, which jobs' objects carry as a label, too; the operator has the same."""
    endpoint: str = ""
    """host:port that its pods are given: by it those are known that were made before that label."""

    operator: bool = False
    """Whether there is an operator."""
    operator_namespaces: str = ""
    """Where it looks for resources, with commas between them; empty: everywhere."""

    token_secret: str = ""
    """Made when missing: the users' token."""
    scrape_token_secret: str = ""
    """Made when missing: the token that opens `/metrics` and nothing else."""
    operator_token_secret: str = ""
    """Made when missing: the operator's token."""
    attempt_key_secret: str = ""
    """Made when missing: the key pair that attempts' tokens are signed with."""
    redis_secret: str = ""
    """Made when missing: password and address of the Redis of this installation."""
    redis_host: str = ""
    """Its host name."""
    certificate_secret: str = ""
    """Made when missing, renewed near its end: the services' certificate."""
    authority_secret: str = ""
    """Made when missing: the authority that signs it."""
    hosts: str = ""
    """Names and addresses that the certificate has to hold, with commas between them."""
    certificate_days: int = Field(default=365, gt=0)
    """How long a certificate is valid; it is renewed when a third of that is left."""

    given_certificate_secret: str = ""
    """The services' certificate when somebody else makes it: its `ca.crt` is shown to jobs."""
    given_certificate_wait_s: float = Field(default=0, ge=0)
    """How long to wait for that secret."""
    authority_config_map: str = ""
    """Shows jobs and users the root certificate."""
    definitions: str = ""
    """Folder of custom resource definitions to bring up to date."""

    def names(self) -> list[str]:
        """Every name and address that the certificate has to hold."""
        return _split(self.hosts)

    def watched(self) -> list[str]:
        """Where the operator looks for resources; none for everywhere."""
        return _split(self.operator_namespaces)


def _split(words: str) -> list[str]:
    return [word.strip() for word in words.split(",") if word.strip()]
