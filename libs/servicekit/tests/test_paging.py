import pytest
from hypothesis import given
from hypothesis import strategies as st
from servicekit.errors import InvalidArgument
from servicekit.paging import decode_token, encode_token, page_size


@pytest.mark.parametrize(("wanted", "given_size"), [(0, 100), (1, 1), (1000, 1000), (1001, 1000)])
def test_a_page_has_as_many_entries_as_were_asked_for_up_to_a_bound(wanted, given_size):
    assert page_size(wanted, default=100, most=1000) == given_size


def test_a_negative_size_is_refused_with_what_is_allowed():
    with pytest.raises(InvalidArgument, match=r"page_size is -1; allowed: 0 \(the default, 100\) to 1000"):
        page_size(-1, default=100, most=1000)


@given(st.text())
def test_a_token_is_turned_back_into_what_it_was_made_of(last):
    assert decode_token(encode_token(last)) == last


@pytest.mark.parametrize("token", ["é", "a", "!!!!", "_w=="])
def test_a_token_that_was_never_given_is_refused(token):
    with pytest.raises(InvalidArgument, match="not one this service gave"):
        decode_token(token)
