"""Metrics over several processes, and rules for what is best. Any `torchmetrics.Metric` is a metric here."""

from trainkit.metrics.base import Metric
from trainkit.metrics.own import PerProcess, WholeSet
from trainkit.metrics.rules import Record, Rule, Term

__all__ = ["Metric", "PerProcess", "Record", "Rule", "Term", "WholeSet"]
