"""The template of whoever runs the yard, merged into every pod, as `kubectl patch` merges by default.

Mappings merge by key; lists of things that have a name merge by that name; `null` removes a key, and an entry with
`$patch: delete` removes the entry of its name. All other lists are added to the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_NAMED_BY = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
}


def read_template(file: str) -> dict[str, Any]:
    """The pod template in a YAML file, with `metadata` and `spec`; "" for none.

    Raises:
        ValueError: it cannot be read, or is no template.
    """
    if not file:
        return {}
    import yaml

    try:
        found = yaml.safe_load(Path(file).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"kubernetes_pod_template {file}: {error}") from error
    if not isinstance(found, dict) or not found.keys() <= {"metadata", "spec"}:
        raise ValueError(f"kubernetes_pod_template {file}: expected a mapping with metadata and spec, as of a pod")
    return found


def merged(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `patch` merged in; neither is changed."""
    result = dict(base)
    for key, value in patch.items():
        known = result.get(key)
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            result[key] = merged(known if isinstance(known, Mapping) else {}, value)
        elif isinstance(value, list) and isinstance(known, list):
            result[key] = _merged_list(known, value, _NAMED_BY.get(key))
        else:
            result[key] = value
    return result


def _merged_list(base: Sequence[Any], patch: Sequence[Any], named_by: str | None) -> list[Any]:
    if named_by is None:
        return [*base, *patch]
    result = {each[named_by]: each for each in base}
    for each in patch:
        name = each[named_by]
        if each.get("$patch") == "delete":
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name, {}), each)
    return list(result.values())
