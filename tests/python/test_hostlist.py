"""Slurm's notation for hosts and task counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horo.config.hosts import HOSTS_MAX, parse_counts, parse_host_list


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("x", ["x"]),
        ("a,b.example.org", ["a", "b.example.org"]),
        ("h[1-3,07-10],x", ["h1", "h2", "h3", "h07", "h08", "h09", "h10", "x"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[0-1]n[01-02]-ib", ["r0n01-ib", "r0n02-ib", "r1n01-ib", "r1n02-ib"]),
        ("[3,1]", ["3", "1"]),
        ("b,a[2,1]", ["b", "a2", "a1"]),
    ],
)
def test_a_list_names_its_hosts_in_order(text: str, hosts: list[str]) -> None:
    assert parse_host_list(text) == hosts


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,,b", "a,", "h[", "h]", "h[]", "h[1", "h1]", "h[3-1]", "h[a-b]", "h[1-]", "h[[1]]", "h[1-2-3]", "a b"],
)
def test_a_damaged_list_is_named_in_the_error(text: str) -> None:
    with pytest.raises(ValueError, match="host list") as raised:
        parse_host_list(text)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize("text", ["h[0-99999999999]", "h[0-999][0-999]", ",".join(["h[1-60000]"] * 2)])
def test_a_list_that_no_cluster_has_costs_no_memory(text: str) -> None:
    with pytest.raises(ValueError, match=str(HOSTS_MAX)):
        parse_host_list(text)


letters = st.text("abcxyz.-_", min_size=1, max_size=6)
spans = st.tuples(st.integers(0, 300), st.integers(0, 12), st.integers(1, 4))
brackets = st.lists(spans, min_size=1, max_size=3)


@given(st.lists(st.tuples(letters, brackets, letters | st.just("")), min_size=1, max_size=4))
def test_what_is_written_is_read(entries: list[tuple[str, list[tuple[int, int, int]], str]]) -> None:
    written, expected = [], []
    for before, ranges, after in entries:
        items = [f"{low:0{width}d}-{low + more:0{width}d}" for low, more, width in ranges]
        written.append(f"{before}[{','.join(items)}]{after}")
        for low, more, width in ranges:
            expected += [f"{before}{str(number).zfill(width)}{after}" for number in range(low, low + more + 1)]
    assert parse_host_list(",".join(written)) == expected


@given(st.text("h[]-,019x ", max_size=12) | st.text(max_size=12))
def test_any_text_is_hosts_or_a_sentence(text: str) -> None:
    try:
        hosts = parse_host_list(text)
    except ValueError as error:
        assert str(error)
    else:
        assert hosts
        assert all(hosts)


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 9)), min_size=1, max_size=9))
def test_counts_are_repeated_as_often_as_they_say(items: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{repeat})" if repeat > 1 else str(count) for count, repeat in items)
    assert parse_counts(text) == [count for count, repeat in items for _ in range(repeat)]


@pytest.mark.parametrize("text", ["", "x", "2(x", "2(x3", "-1", "2,,1", "2(3)", "1(x99999999)"])
def test_damaged_counts_are_named_in_the_error(text: str) -> None:
    with pytest.raises(ValueError, match="tasks") as raised:
        parse_counts(text)
    assert repr(text) in str(raised.value)
