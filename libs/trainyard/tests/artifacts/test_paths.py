"""Trees that pass the rules stay inside of themselves, on a real file system."""

import sys
from subprocess import run

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainyard.artifacts import ArtifactError, manifest
from trainyard_protos.v1 import artifacts_pb2 as pb

parts = st.sampled_from(["a", "b", "c", "..", ".", "", "x"])
paths = st.lists(parts, min_size=1, max_size=5).map("/".join)
entries = st.dictionaries(paths, st.one_of(st.none(), paths, paths.map("/{}".format)), max_size=6)


@settings(max_examples=300, deadline=None)
@given(entries=entries)
def test_no_accepted_tree_leads_outside(tmp_path_factory, entries):
    files = [pb.File(path=path, symlink=target or "") for path, target in entries.items()]
    try:
        tree = manifest.make(files)
    except ArtifactError:
        return
    root = tmp_path_factory.mktemp("tree") / "inside"
    root.mkdir()
    for file in tree.files:
        path = root / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(file.symlink) if file.symlink else path.touch()
    for file in tree.files:
        try:
            resolved = (root / file.path).resolve(strict=False)
        except (OSError, RuntimeError):  # a link to itself
            continue
        assert resolved.is_relative_to(root.resolve())


@pytest.mark.parametrize(
    ("path", "target"), [("link", "file"), ("a/link", "../file"), ("a/b/link", "../../c/d"), ("link", "not/there")]
)
def test_links_inside_of_the_tree_are_allowed(path, target):
    manifest.make([pb.File(path=path, symlink=target)])


def test_a_climb_behind_a_name_is_refused_because_the_name_may_be_a_link():
    with pytest.raises(ArtifactError):
        manifest.make([pb.File(path="a/b/d", symlink="../../top"), pb.File(path="a/b/l", symlink="d/../../x")])


def test_the_digest_does_not_depend_on_the_order_files_were_named_in():
    files = [pb.File(path=name, mode=0o644) for name in "bca"]
    digests = {manifest.digest(manifest.encode(manifest.make(order))) for order in (files, files[::-1])}
    assert len(digests) == 1


def test_nothing_heavy_is_imported():
    code = "import sys, trainyard.artifacts; print(*sys.modules)"
    loaded = set(run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())
    assert not loaded & {"pydantic", "typer", "rich", "ruamel", "blake3", "pyfastcdc", "pathspec", "numpy"}
