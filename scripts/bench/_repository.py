"""Importing it makes the repository's own packages, the testbed and what the tests of a cluster use, known here."""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY))
