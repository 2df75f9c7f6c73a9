"""What earlier builds left goes; what somebody needs stays."""

import time

import pytest

from scripts.testbed import buildah
from scripts.testbed.cluster import system

pytestmark = pytest.mark.skipif(bool(system.obstacle()), reason=system.obstacle() or "images can be built here")


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(buildah, "_folder", lambda: tmp_path)


def commit(tag, content):
    """Makes an image of one file; what had the tag before loses it."""
    with buildah.alone():
        container = buildah.run("from", "scratch").strip()
        buildah.run("config", f"--label=content={content}", container)
        buildah.run("commit", "--quiet", "--rm", container, tag)


def listed(kind):
    with buildah.alone():
        return buildah._listed(kind)


def tags():
    """Of every image; "" for one that has none."""
    return sorted(name.rpartition("/")[2] for each in listed("images") for name in each["names"] or [""])


def prune(before):
    buildah.prune(lambda repository, tag: repository.endswith("/services") and tag != "new", before)


def test_old_images_nameless_layers_and_containers_of_killed_builds_go(store):
    for tag, content in (("services:old", "a"), ("services:new", "b"), ("services:new", "c"), ("base:old", "d")):
        commit(f"localhost/test/{tag}", content)
    with buildah.alone():
        buildah.run("from", "localhost/test/services:old")
    assert tags() == ["", "base:old", "services:new", "services:old"]
    prune(before=time.time() - 3600)
    assert (tags(), listed("containers")) == (["", "base:old", "services:new", "services:old"], [])
    prune(before=time.time() + 1)
    assert tags() == ["base:old", "services:new"]


def test_an_image_that_a_test_looks_into_stays_until_it_has_looked(store):
    commit("localhost/test/services:old", "a")
    with buildah.container("localhost/test/services:old") as root:
        prune(before=time.time() + 1)
        assert tags() == ["services:old"]
        assert root.is_dir()
    assert listed("containers") == []
    prune(before=time.time() + 1)
    assert tags() == []
