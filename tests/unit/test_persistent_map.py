"""A persistent map is a dictionary that is cheap to change a copy of."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.persistent_map import PersistentMap, count_where, replace_items

_steps = st.lists(
    st.dictionaries(st.integers(0, 400), st.integers(), min_size=1, max_size=4), max_size=60
)


def is_even(value: int) -> bool:
    return value % 2 == 0


@given(first=st.integers(0, 300), steps=_steps)
def test_it_has_the_entries_order_and_counts_of_a_dictionary(
    first: int, steps: list[dict[int, int]]
) -> None:
    plain = {number: number for number in range(first)}
    entries = replace_items(plain, {})
    for changes in steps:
        entries, plain = replace_items(entries, changes), {**plain, **changes}
        assert list(entries.items()) == list(plain.items())
        assert entries == plain
        assert len(entries) == len(plain)
        assert count_where(entries, is_even) == sum(map(is_even, plain.values()))


def test_an_earlier_copy_keeps_its_entries() -> None:
    before = PersistentMap(dict.fromkeys(range(1000), 0), {})
    after = before.replace_items({7: 1, 2000: 1})
    assert (before[7], after[7], after[2000]) == (0, 1, 1)
    assert 2000 not in before
    assert list(after)[-1] == 2000
    assert list(after.values())[7] == 1


def test_few_entries_are_a_dictionary() -> None:
    assert type(replace_items({1: 1}, {2: 2})) is dict
    assert type(replace_items(dict.fromkeys(range(1000), 0), {2: 2})) is PersistentMap


def test_it_is_encoded_like_a_dictionary() -> None:
    entries = PersistentMap({"a": 1, "b": 2}, {"b": 3})
    encoded_map = msgspec.json.encode(entries, enc_hook=PersistentMap.to_dict)
    assert encoded_map == msgspec.json.encode({"a": 1, "b": 3})
    assert repr(entries) == "{'a': 1, 'b': 3}"
