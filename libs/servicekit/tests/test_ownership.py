import pytest
from hypothesis import given
from hypothesis import strategies as st
from servicekit.ownership import LAUNCHER, identity_label, owned_by


def test_an_identity_that_can_be_a_label_is_one():
    assert identity_label("platform-yard") == "platform-yard"


@pytest.mark.parametrize("identity", ["a" * 63 + "b", "a b", "-a", "."])
def test_one_that_cannot_be_gets_a_label_that_can(identity):
    label = identity_label(identity)
    assert 0 < len(label) <= 63
    assert label[0].isalnum() and label[-1].isalnum()


@given(st.text("ab-_ .", min_size=1, max_size=80), st.text("ab-_ .", min_size=1, max_size=80))
def test_two_identities_never_have_the_same_label(one, other):
    assert (identity_label(one) == identity_label(other)) == (one == other)


def test_the_label_decides_and_without_one_the_endpoint_of_the_pods():
    pod = {"containers": [{"name": "worker", "env": [{"name": "TRAINYARD_ENDPOINT", "value": "yard:443"}]}]}
    before = {"metadata": {}, "spec": {"template": {"spec": pod}}}
    assert owned_by(before, "here", "yard:443")
    assert owned_by({"metadata": {"labels": None}, "spec": pod}, "here", "yard:443")
    assert not owned_by(before, "here", "other:443")
    labelled = before | {"metadata": {"labels": {LAUNCHER: "there"}}}
    assert owned_by(labelled, "there", "moved:443")
    assert not owned_by(labelled, "here", "yard:443")
