"""Real servers for the tests of every part, and one way to draw examples."""

from hypothesis import settings

pytest_plugins = ["scripts.testbed.plugin", "scripts.testbed.cluster.plugin"]

# Tests never time anything, and two runs of the same tests see the same examples.
settings.register_profile("trainyard", deadline=None, derandomize=True)
settings.load_profile("trainyard")
