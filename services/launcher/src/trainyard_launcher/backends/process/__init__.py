"""Nodes as processes of this machine."""

from trainyard_launcher.backends.process.backend import ProcessBackend

__all__ = ["ProcessBackend"]
