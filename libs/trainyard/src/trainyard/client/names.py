"""Names that the agent, this library and the command line agree on."""

from __future__ import annotations

SYSTEM_PREFIX = "system/"
"""Series that the agent samples; all others are the script's own."""
DIFF_FILE = "diff.patch"
"""The one file of the artifact that has the diff of a job's code; `git apply` takes it."""
