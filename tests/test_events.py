"""Every event prints and parses back, and what is no event is none."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.events import KINDS, Committed, Died, Event, parse_line, to_line

_REALS = st.floats(allow_nan=False, allow_infinity=False)
_NUMBERS = st.integers(-(2**53), 2**53)
_BY_TYPE = {
    "int": _NUMBERS,
    "float": _REALS,
    "str": st.text(),
    "int | None": st.none() | _NUMBERS,
    "str | None": st.none() | st.text(),
    "int | str": _NUMBERS | st.text(),
    "tuple[int, ...]": st.lists(_NUMBERS).map(tuple),
    "tuple[tuple[int, ...] | None, ...]": st.lists(st.none() | st.lists(_NUMBERS).map(tuple)).map(
        tuple
    ),
    "dict[str, float]": st.dictionaries(st.text(), _REALS),
}


def any_event(kind: type[Event]) -> st.SearchStrategy[Event]:
    return st.builds(kind, **{each.name: _BY_TYPE[str(each.type)] for each in fields(kind)})


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@given(data=st.data())
def test_every_event_prints_and_parses_back(kind, data):
    event = data.draw(any_event(kind))
    line = to_line(event)
    assert line.count("\n") == 1
    assert parse_line(line) == event
    assert parse_line(line.encode()) == event


def test_a_line_has_its_facts_by_name():
    line = to_line(Committed(time=1.5, replica=2, position=1, iteration=3, bucket_epochs=(0,)))
    assert json.loads(line) == {
        "time": 1.5,
        "event": "committed",
        "replica": 2,
        "position": 1,
        "world_epoch": 0,
        "assignment": "",
        "microbatches": 0,
        "bucket_epochs": [0],
        "iteration": 3,
    }


@pytest.mark.parametrize(
    "line",
    ["", "3", '"text"', "[1]", "{}", '{"event": "unknown"}', '{"event": 7}', '{"event": "com'],
)
def test_what_is_no_event_is_none(line):
    assert parse_line(line) is None


def test_facts_of_a_newer_version_are_left_out_and_missing_ones_make_no_event():
    assert parse_line('{"event": "died", "reason": "x", "new": 1}') == Died(reason="x")
    assert parse_line('{"event": "died"}') is None


def test_the_page_names_every_event_and_every_fact(request):
    page = (request.config.rootpath / "docs" / "traces.md").read_text()
    rows = dict(line.strip("|").split("|", 1) for line in page.splitlines() if line[:3] == "| `")
    rows = {name.strip(" `"): text for name, text in rows.items()}
    for name, kind in KINDS.items():
        facts = {each.name for each in fields(kind)} - {each.name for each in fields(Event)}
        told = rows[name] + (rows["committed"] if name == "evaluated" else "")
        assert all(f"`{fact}`" in told for fact in facts), name
