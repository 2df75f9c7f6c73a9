"""Hyperparameter search. Needs the extra `search`."""

from trainkit.search.jobs import Jobs
from trainkit.search.local import Pruning, in_process
from trainkit.search.space import Choice, Space, Uniform
from trainkit.search.study import Pruned, Runner, Search, SearchResult, Task, TrialResult

__all__ = [
    "Choice",
    "Jobs",
    "Pruned",
    "Pruning",
    "Runner",
    "Search",
    "SearchResult",
    "Space",
    "Task",
    "TrialResult",
    "Uniform",
    "in_process",
]
