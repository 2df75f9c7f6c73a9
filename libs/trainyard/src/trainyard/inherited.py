"""Which variables of a yard's environment reach the workers that it starts on its machine.

What a person's shell holds is that person's: a job gets what programs need to run at all, and what is declared. The
standard library alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from trainyard.credentials import named_like_a_credential

ALWAYS = (
    *("PATH", "HOME", "USER", "LANG", "LC_*", "TZ", "TMPDIR", "LD_LIBRARY_PATH"),
    *("VIRTUAL_ENV", "CONDA_*", "CUDA_*", "NVIDIA_*"),
    *("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"),
    *("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE", "PIP_CERT"),
    *("GIT_SSL_CAINFO", "GIT_SSL_CAPATH", "NIX_SSL_CERT_FILE", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"),
)
"""Names and globs of what every worker inherits, unless it is named like a credential."""
VARIABLE = "TRAINYARD_LAUNCHER_INHERIT_ENVIRONMENT"
"""The launcher's setting that declares more."""


def patterns(setting: str) -> tuple[str, ...]:
    """The names and globs of the setting, which separates them by commas."""
    return tuple(filter(None, (part.strip() for part in setting.split(","))))


def inherited(environ: Mapping[str, str], declared: Sequence[str]) -> dict[str, str]:
    """The variables that a worker inherits.

    Args:
        declared: names and globs beside `ALWAYS`; also of variables that are named like credentials.
    """
    return {
        name: value
        for name, value in environ.items()
        if _matches(name, declared) or (_matches(name, ALWAYS) and not named_like_a_credential(name))
    }


def withheld_credentials(environ: Mapping[str, str], declared: Sequence[str]) -> list[str]:
    """The names of variables that look like credentials and that no worker inherits, sorted."""
    own = inherited(environ, declared)
    return sorted(
        name
        for name in environ
        if named_like_a_credential(name) and name not in own and not name.startswith("TRAINYARD_")
    )


def _matches(name: str, globs: Iterable[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)
