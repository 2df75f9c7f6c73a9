"""What looks like credentials: files by name, private keys also by content; variables by name; parts of URLs.

The standard library alone. What is found is left out of packed code and of recorded diffs: a job gets credentials as
`spec.secrets`, which are never stored.
"""

from __future__ import annotations

import re
import stat
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

_NAMES = (
    *(".env", ".envrc", ".netrc", "_netrc", ".pgpass", ".pypirc", ".git-credentials", ".htpasswd", ".vault-token"),
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk"),
    *("*.ppk", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx"),
    *("kaggle.json", "application_default_credentials.json", "kubeconfig"),
)
_FOLDERS = frozenset((".ssh", ".gnupg", ".aws", ".azure", ".kube"))
_PATHS = (".docker/config.json", ".config/gcloud/*", ".config/gh/hosts.yml", ".cache/huggingface/token")
_EXAMPLES = frozenset(("example", "sample", "template", "tmpl", "dist", "defaults"))
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY( BLOCK)?-----")
# In these a key may follow certificates, or be a field. In other files only a key at the beginning counts, so that
# a program that names the marker stays code.
_BUNDLES = frozenset((".pem", ".key", ".crt", ".cer", ".p8", ".json"))
_BUNDLE_BYTES = 64 * 1024
_BEGINNING_BYTES = 128

CREDENTIAL_VARIABLE = r"(?i)(_TOKEN|_KEY|_SECRET)$|PASSWORD"
"""Names of variables that usually hold a credential, as a pattern of RE2 as well."""
_CREDENTIAL_VARIABLE = re.compile(CREDENTIAL_VARIABLE)

PASSWORD_IN_URL = (
    r"^([^/@]*:)?/*[^/@]*:[^/@]*@|://[^/]*(:|%3[Aa])[^/]*@"
    r"|^([^/@\[]*:/*|/+)[^/@\[]*:[0-9]*[^0-9/@][^@]*@"  # a password with a slash: what follows the colon is no port
)
"""A password in the URL of a repository, as a pattern of RE2 as well: in any scheme, in `user:password@host` without
one, and after too few or too many slashes, because a URL that git cannot use is shown like any other."""
USER_OR_QUERY_IN_URL = r"(^/|^[^/@]*:)/+[^/]*@|^[^/@]*:/+[^?]*[?]"
"""What may be a token, except in the URLs of `URL_OF_A_USER`; a pattern of RE2 as well."""
URL_OF_A_USER = r"^(ssh|git\+ssh|ssh\+git)://|^file:///"
"""URLs whose user is no secret: ssh takes no password from them. And paths; a pattern of RE2 as well."""


def has_credentials(url: str) -> bool:
    """Whether the URL of a repository holds what may be a credential: a password, or outside of ssh a user or query."""
    return re.search(PASSWORD_IN_URL, url) is not None or (
        re.search(USER_OR_QUERY_IN_URL, url) is not None and re.search(URL_OF_A_USER, url) is None
    )


def named_like_a_credential(variable: str) -> bool:
    """Whether a variable's name is one of those that usually hold a credential."""
    return _CREDENTIAL_VARIABLE.search(variable) is not None


def named_like_credentials(path: PurePath) -> bool:
    """Whether a path, relative to a folder of code, names a file that usually holds credentials.

    `.env.NAME` is one unless it ends like an example, such as `.env.example`.
    """
    name = path.name.lower()
    if name.startswith(".env."):
        return name.rpartition(".")[2] not in _EXAMPLES
    return (
        any(fnmatchcase(name, pattern) for pattern in _NAMES)
        or not _FOLDERS.isdisjoint(path.parts[:-1])
        or any(
            fnmatchcase(path.as_posix(), pattern) or fnmatchcase(path.as_posix(), f"*/{pattern}") for pattern in _PATHS
        )
    )


def looks_like_credentials(root: Path, path: PurePath) -> bool:
    """Whether the file `path` below `root` is named like credentials, or holds a private key."""
    return named_like_credentials(path) or _holds_private_key(root / path)


def _holds_private_key(file: Path) -> bool:
    bundle = file.suffix.lower() in _BUNDLES
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            return False
        with file.open("rb") as content:
            beginning = content.read(_BUNDLE_BYTES if bundle else _BEGINNING_BYTES)
    except OSError:
        return False  # whoever packs it says why it cannot be read
    if bundle:
        return _PRIVATE_KEY.search(beginning) is not None
    return _PRIVATE_KEY.match(beginning.removeprefix(b"\xef\xbb\xbf").lstrip()) is not None
