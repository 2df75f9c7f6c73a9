"""Optimizers, schedules and parameter groups by name."""

from trainkit.optim.building import Group, optimizer, parameter_groups, schedule

__all__ = ["Group", "optimizer", "parameter_groups", "schedule"]
