"""Real servers for the tests of every part."""

pytest_plugins = ["scripts.testbed.plugin", "scripts.testbed.cluster.plugin"]
