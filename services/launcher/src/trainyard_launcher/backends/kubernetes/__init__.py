"""Nodes as pods of a Kubernetes cluster."""

from trainyard_launcher.backends.kubernetes.backend import KubernetesBackend

__all__ = ["KubernetesBackend"]
