"""The documents that describe work for a yard: `load` reads one, `TrainingJob` is what it says.

>>> job = load(
...     "{apiVersion: trainyard.dev/v1alpha1, kind: TrainingJob, metadata: {name: hello}, spec: {command: [echo, hi]}}"
... )
>>> job.spec.nodes
1
"""

from trainyard.spec.cluster import EmptyDir, Kubernetes, Toleration, Volume
from trainyard.spec.fields import is_reserved_key
from trainyard.spec.loading import MAX_BYTES, load
from trainyard.spec.model import (
    API_VERSION,
    KIND,
    Best,
    Checkpoints,
    Code,
    GitSource,
    Input,
    Keep,
    Metadata,
    Output,
    Python,
    Resources,
    Retries,
    RetryRule,
    Secret,
    SecretKeyReference,
    SecretSource,
    Spec,
    TrainingJob,
)
from trainyard.spec.problems import Problem, SpecError

__all__ = [
    "API_VERSION",
    "KIND",
    "MAX_BYTES",
    "Best",
    "Checkpoints",
    "Code",
    "EmptyDir",
    "GitSource",
    "Input",
    "Keep",
    "Kubernetes",
    "Metadata",
    "Output",
    "Problem",
    "Python",
    "Resources",
    "Retries",
    "RetryRule",
    "Secret",
    "SecretKeyReference",
    "SecretSource",
    "Spec",
    "SpecError",
    "Toleration",
    "TrainingJob",
    "Volume",
    "is_reserved_key",
    "load",
]
