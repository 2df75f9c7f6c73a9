"""The kinds of text and mapping that a spec's fields hold: each a type, what it allows in words, and its check.

The models and the JSON Schema come from these. What a regular expression cannot say is checked in code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from posixpath import normpath
from types import MappingProxyType
from typing import Annotated

from pydantic import AfterValidator, Field, PlainSerializer, StringConstraints, ValidationInfo, WithJsonSchema

from trainyard.credentials import has_credentials
from trainyard.spec import quantities
from trainyard.spec.checks import refuse

PATTERN_WORDS: dict[str, str] = {
    quantities.CPU_PATTERN: quantities.CPU_ALLOWED,
    quantities.MEMORY_PATTERN: quantities.MEMORY_ALLOWED,
    quantities.DURATION_PATTERN: quantities.DURATION_ALLOWED,
}
"""What the pattern of a schema means, in words."""


def _text(pattern: str, words: str, max_length: int) -> StringConstraints:
    PATTERN_WORDS[pattern] = words
    return StringConstraints(pattern=pattern, max_length=max_length)


# Names

Name = Annotated[
    str,
    _text(
        r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$",
        "lower-case letters, digits and '-', beginning and ending with a letter or digit, at most 63 characters",
        63,
    ),
]
ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
ENV_WORDS = "letters, digits and '_', not beginning with a digit"
EnvName = Annotated[str, _text(ENV_NAME, ENV_WORDS, 255)]
"""A variable that someone else sets; `Variable` is one of the user's."""
Undashed = Annotated[str, _text(r"^[^-\s]\S*$", "a text without spaces that does not begin with '-'", 2048)]
"""What is handed to a program as an argument and must not be taken for an option."""
CREDENTIALS_WORDS = (
    "the URL without user, password and query; give git what it asks for with spec.secrets, for instance as "
    "GIT_CONFIG_VALUE_0"
)
CREDENTIAL_REMEDY = (
    "spec.secrets with this name, whose values are never stored; spec.allowPlain: true if it is no secret"
)


def is_stored(info: ValidationInfo) -> bool:
    """Whether the document was accepted before: rules that came later do not hold for it."""
    return bool((info.context or {}).get("stored"))


def _check_url(url: str, info: ValidationInfo) -> str:
    if is_stored(info):
        return url
    if has_credentials(url):
        refuse("has credentials, which everyone who sees the job could read", allowed=CREDENTIALS_WORDS)
    return url


RepositoryUrl = Annotated[Undashed, AfterValidator(_check_url)]
_ARTIFACT = r"[a-z0-9][a-z0-9._-]*"  # as in artifacts.proto: what is accepted here, the store takes
_SELECTOR = r"[a-z][a-z0-9._-]*|[0-9]+"
ArtifactName = Annotated[
    str,
    _text(
        f"^{_ARTIFACT}$",
        "lower-case letters, digits, '.', '_' and '-', beginning with a letter or digit, at most 128 characters",
        128,
    ),
]
ArtifactReference = Annotated[
    str,
    _text(f"^{_ARTIFACT}(@({_SELECTOR}))?$", "an artifact: name, name@alias, name@3 or a version's id", 193),
]
MetricName = Annotated[str, _text(r"^[A-Za-z0-9_][A-Za-z0-9_./ -]*$", "a metric's name, such as val/accuracy", 256)]

# Names of Kubernetes

ObjectName = Annotated[
    str,
    _text(
        r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$",
        "a name of Kubernetes: lower-case letters, digits, '-' and '.', beginning and ending with a letter or digit",
        253,
    ),
]
SecretKey = Annotated[str, _text(r"^[A-Za-z0-9._-]+$", "letters, digits, '.', '_' and '-'", 253)]
_HOST = r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]+)?"
_COMPONENTS = r"[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
Image = Annotated[
    str,
    _text(
        rf"^({_HOST}/)?{_COMPONENTS}(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?(@sha256:[a-f0-9]{{64}})?$",
        "an image: name, name:tag, registry.example.com/team/name:tag or name@sha256:...",
        512,
    ),
]

# Labels: the rules of Kubernetes, so that they can become labels of pods.

_LABEL_VALUE = r"([A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?)?"
_LABEL_KEY = re.compile(rf"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?{_LABEL_VALUE[:-1]}")
LabelValue = Annotated[
    str,
    _text(f"^{_LABEL_VALUE}$", "letters, digits, '-', '_' and '.', at most 63 characters; quote numbers", 63),
]


def _check_label_key(key: str) -> str:
    prefix, _, name = key.rpartition("/")
    if not _LABEL_KEY.fullmatch(key) or len(name) > 63 or len(prefix) > 253:
        refuse("not a label's name", allowed="name or domain/name, such as team or example.com/team")
    return key


_RESERVED_KEY = re.compile(r"(.*\.)?(kubernetes\.io|k8s\.io|trainyard\.dev)/.*")
_ANNOTATIONS_MOST = 65_536  # characters together; Kubernetes takes 262,144 bytes of an object, with the yard's own


def is_reserved_key(key: str) -> bool:
    """Whether a label or annotation of this name means something to Kubernetes or the yard, on any object."""
    return _RESERVED_KEY.fullmatch(key) is not None


def _check_annotation_key(key: str) -> str:
    _check_label_key(key)
    if is_reserved_key(key):
        refuse(
            "annotations of Kubernetes and the yard (kubernetes.io/, k8s.io/, trainyard.dev/, their subdomains) are "
            "not a job's to set: whoever runs the yard sets them for all pods in its pod template",
            allowed="name or domain/name with another domain, such as example.com/team",
        )
    return key


def _check_annotations(annotations: Mapping[str, str]) -> Mapping[str, str]:
    length = sum(len(key) + len(value) for key, value in annotations.items())
    if length > _ANNOTATIONS_MOST:
        refuse(f"annotations have {length:,} characters together", allowed=f"at most {_ANNOTATIONS_MOST:,}")
    return annotations


TaintKey = Annotated[str, AfterValidator(_check_label_key), WithJsonSchema({"type": "string", "maxLength": 317})]


def check_variable(name: str) -> str:
    """The name of an environment variable that is the user's to set."""
    if not re.fullmatch(ENV_NAME[1:-1], name) or len(name) > 255:
        suggestion = re.sub(r"[^A-Za-z0-9_]+", "_", name)
        suggestion = suggestion if re.fullmatch(ENV_NAME[1:-1], suggestion) else ""
        refuse("not a name for an environment variable", allowed=ENV_WORDS, suggestion=suggestion)
    if name.startswith("TRAINYARD_"):
        refuse("variables that begin with TRAINYARD_ are set by the yard", allowed="another name")
    return name


Variable = Annotated[str, AfterValidator(check_variable), WithJsonSchema({"type": "string", "pattern": ENV_NAME})]
# Keys are checked by code alone: a structural schema has no word for them.
_Key = Annotated[str, WithJsonSchema({"type": "string"})]
_frozen = (AfterValidator(MappingProxyType), PlainSerializer(dict))
Labels = Annotated[
    Mapping[Annotated[_Key, AfterValidator(_check_label_key)], LabelValue], Field(max_length=64), *_frozen
]
Annotations = Annotated[
    Mapping[Annotated[_Key, AfterValidator(_check_annotation_key)], str],
    Field(max_length=64),
    AfterValidator(_check_annotations),
    *_frozen,
]
Env = Annotated[Mapping[Annotated[_Key, AfterValidator(check_variable)], str], Field(max_length=1000), *_frozen]

# Paths


def _check_relative(path: str) -> str:
    parts = path.split("/")
    if path.startswith("/") or ".." in parts:
        steps = "/".join(part for part in parts if part not in ("", "..", "."))
        refuse("has to stay inside the job's folder", allowed=_RELATIVE_WORDS, suggestion=steps)
    if len(path) > 1024 or not re.fullmatch(RELATIVE[1:-1], path):
        refuse("not a path", allowed=_RELATIVE_WORDS, suggestion=re.sub(r"[/\\\\]+", "/", path))
    return path


_RELATIVE_WORDS = "a relative path without '..'"
RELATIVE = r"^[^/\\]+(/[^/\\]+)*/?$"
PATTERN_WORDS[RELATIVE] = _RELATIVE_WORDS
RelativePath = Annotated[
    str,
    AfterValidator(_check_relative),
    WithJsonSchema({"type": "string", "pattern": RELATIVE, "maxLength": 1024}),
]

_MOUNT_WORDS = "an absolute path without '..' and ':'"
MOUNT = r"^/[^:]*$"
PATTERN_WORDS[MOUNT] = _MOUNT_WORDS
RESERVED_MOUNTS = ("/opt/trainyard", "/trainyard", "/dev/shm")


def _check_mount(path: str) -> str:
    if len(path) > 1024 or not re.fullmatch(MOUNT[1:-1], path) or ".." in path.split("/"):
        refuse("not a path for a volume", allowed=_MOUNT_WORDS)
    return path


def _check_mount_place(path: str) -> str:
    """Not over what the yard itself mounts."""
    clean = normpath(path)
    if clean.strip("/") == "":
        refuse("hides the whole image", allowed="a folder below /")
    if any(f"{clean}/".startswith(f"{taken}/") for taken in RESERVED_MOUNTS):
        allowed = "spec.kubernetes.sharedMemory for its size" if clean.startswith("/dev/shm") else "another path"
        refuse("the yard mounts this itself", allowed=allowed)
    return path


_mount_schema = WithJsonSchema({"type": "string", "pattern": MOUNT, "maxLength": 1024})
HostPath = Annotated[str, AfterValidator(_check_mount), _mount_schema]
MountPath = Annotated[str, AfterValidator(_check_mount), AfterValidator(_check_mount_place), _mount_schema]

# Expressions


def _check_log_pattern(pattern: str) -> str:
    import re2  # here, because few documents have one and it costs a shared library

    options = re2.Options()
    options.log_errors = False
    try:
        re2.compile(pattern, options)
    except re2.error as error:
        detail = error.args[0].decode() if isinstance(error.args[0], bytes) else str(error.args[0])
        refuse(f"not a regular expression of RE2: {detail}", allowed="RE2 syntax: no look-around, no back references")
    return pattern


LogPattern = Annotated[str, AfterValidator(_check_log_pattern), StringConstraints(min_length=1, max_length=1000)]


def _check_step_pattern(pattern: str) -> str:
    if pattern.count("{step}") != 1:
        stem, dot, ending = pattern.rpartition(".")
        suggestion = "" if "{" in pattern else (f"{stem}-{{step}}.{ending}" if dot else f"{pattern}-{{step}}")
        refuse(
            "has to contain {step} exactly once", allowed="a file name such as step-{step}.pt", suggestion=suggestion
        )
    if "/" in pattern:
        refuse("names an entry of checkpoints.path, not a path", allowed="a file name such as step-{step}.pt")
    return pattern


StepPattern = Annotated[str, AfterValidator(_check_step_pattern), StringConstraints(min_length=1, max_length=255)]
