"""No edit of a certificate that changes what it says is accepted, and none makes the checker fail in another way.

300 examples here; ``make mutations`` runs 10,000 (``MUTATIONS=N`` in the environment).
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from certified import BASES, N, accepted, certificate_text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from entropic_ctl import certificates
from entropic_ctl.errors import BadInputError
from proofs import check

EXAMPLES = int(os.environ.get("MUTATIONS", "300"))
INFORMATIVE = ("hints", "provenance")
"""Parts that may differ in an accepted certificate: other hints that hold as well, and where it was made."""

examples = settings(
    max_examples=EXAMPLES,
    derandomize="MUTATIONS" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example, HealthCheck.data_too_large],
)
names = st.sampled_from(sorted(BASES))


def places(node: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value at any depth."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*prefix, key)
        yield from places(value, (*prefix, key))


def nested(depth: int) -> Any:
    """Return lists in lists."""
    node: Any = "1"
    for _ in range(depth):
        node = [node]
    return node


JUNK = st.one_of(
    st.sampled_from([None, True, False, 0, 1, -1, 1.0, 2, 0.0, -0.0, "", "0", "1", "1/0", "2/4", "-0", "0/1"]),
    st.sampled_from([[], {}, [[]], [None], {"": ""}, math.nan, math.inf, -math.inf, 10**400, 5e-324, "9" * 5000]),
    st.sampled_from(["proved", "refuted", "unknown", "not applicable", "gain-lag-0", "stateless", "١/٢", "１", "½"]),
    st.sampled_from([nested(8), nested(400), {"a": nested(80)}, "\ud800", "\x00", "1" * 61, "1/" + "9" * 59]),
    st.floats(),
    st.integers(),
    st.fractions(-100, 100).map(str),
    st.text(max_size=8),
)
DIGITS = str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")


def other_type(value: Any) -> list[Any]:
    """Return what another language, or a careless edit, would take for the same value."""
    if isinstance(value, bool) or value is None:
        return [int(bool(value)), str(value), [value]]
    if isinstance(value, int | float):
        same = [] if not -1e300 < value < 1e300 else [float(value), int(value)]
        return [str(value), bool(value), [value], *same]
    if isinstance(value, str):
        found: list[Any] = [[value], value + " ", value.upper(), value.translate(DIGITS), ascii(value)]
        try:
            number = Fraction(value)
        except (ValueError, ZeroDivisionError):
            return found
        twice = f"{2 * number.numerator}/{2 * number.denominator}"
        return [
            *found,
            twice,
            f"{value}e0",
            f"+{value}",
            f"0{value}",
            f"{value}/1",
            str(-number),
            str(1 / (number or 1)),
        ]
    return [str(value), [value], list(value)]


def nudged(value: Any) -> list[Any]:
    """Return neighbours of a value: one unit in the last place, one digit, one letter."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1, -value]
    if isinstance(value, float):
        return [math.nextafter(value, math.inf), math.nextafter(value, -math.inf), -value, 2 * value]
    if isinstance(value, str) and value:
        edits = [value[:-1], value[1:], value + "0", value[::-1]]
        if value[-1].isdigit():
            edits.append(value[:-1] + str((int(value[-1]) + 1) % 10))
        return edits
    if isinstance(value, list) and value:
        return [value[1:], value[::-1], value + value[-1:]]
    return [None]


@st.composite
def mutated(draw: st.DrawFn, name: str) -> Any:
    """Draw an edited certificate of a base: one to three edits at any depth."""
    document = json.loads(certificate_text(name))
    for _ in range(draw(st.integers(1, 3))):
        spots = list(places(document))
        if not spots:
            break
        # a place at random is nearly always deep inside the claims: every top part gets its share
        top = draw(st.sampled_from(sorted({str(spot[0]) for spot in spots})))
        path = draw(st.sampled_from([spot for spot in spots if str(spot[0]) == top]))
        holder = document
        for key in path[:-1]:
            holder = holder[key]
        value = holder[path[-1]]
        kind = draw(st.sampled_from(["junk", "nudge", "type", "delete", "add", "swap", "graft", "copy"]))
        if kind == "junk":
            holder[path[-1]] = copy.deepcopy(draw(JUNK))
        elif kind == "nudge":
            holder[path[-1]] = draw(st.sampled_from(nudged(value)))
        elif kind == "type":
            holder[path[-1]] = draw(st.sampled_from(other_type(value)))
        elif kind == "delete":
            del holder[path[-1]]
        elif kind == "add" and isinstance(holder, dict):
            holder[draw(st.text(max_size=5))] = copy.deepcopy(draw(JUNK))
        elif kind in ("add", "copy") and isinstance(holder, list):
            holder.insert(
                draw(st.integers(0, len(holder))), copy.deepcopy(value) if kind == "copy" else copy.deepcopy(draw(JUNK))
            )
        elif kind == "copy":
            holder[f"{path[-1]}_"] = copy.deepcopy(value)
        elif kind == "swap":  # the same place of another claim, or any value of the document
            other = draw(st.sampled_from([spot for spot in spots if spot[-1] == path[-1]]))
            source = document
            for key in other:
                source = source[key]
            holder[path[-1]] = copy.deepcopy(source)
        else:  # graft: the same place of another config's certificate
            donor = json.loads(certificate_text(draw(names)))
            for key in path:
                donor = donor[key] if isinstance(donor, dict) and key in donor else None
            holder[path[-1]] = donor
    return document


def refused_or_harmless(name: str, read: Any) -> None:
    """Check what ``read`` returns: refused as bad input, or accepted and saying what it said."""
    try:
        document = copy.deepcopy(read())
        found = check.check(document, BASES[name], N)
    except BadInputError as error:
        assert str(error)  # noqa: PT017
        assert "\n" not in str(error)  # noqa: PT017
        return
    assert repr(found) == repr(accepted(name))
    original = json.loads(certificate_text(name))
    assert sorted(document) == sorted(original)
    for key, value in original.items():
        if key not in INFORMATIVE:
            assert ordered(document[key]) == ordered(value), key


def ordered(node: Any) -> str:
    """Return a value with its types, keys sorted."""
    return json.dumps(node, sort_keys=True)


@examples
@given(data=st.data())
def test_no_edit_that_changes_the_meaning_is_accepted(data: st.DataObject) -> None:
    name = data.draw(names)
    document = data.draw(mutated(name))
    refused_or_harmless(name, lambda: document)


@examples
@given(data=st.data())
def test_no_edit_of_the_text_is_accepted(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """By hand in an editor, by a broken transfer: any byte cut, changed, added or doubled."""
    name = data.draw(names)
    raw = bytearray(certificate_text(name), "utf-8")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(len(raw) - 1, 0)))
        kind = data.draw(st.sampled_from(["byte", "insert", "delete", "double", "cut", "digit"]))
        length = data.draw(st.integers(1, 200))
        if kind == "digit":
            at = next((i for i in range(at, len(raw)) if chr(raw[i]).isdigit()), at)
        if kind in ("byte", "digit") and at < len(raw):
            raw[at] = data.draw(st.sampled_from(b'0123456789-+.e/"{}[],:\\ xN\x00\xff'))
        elif kind == "insert":
            raw[at:at] = bytes([data.draw(st.integers(0, 255))])
        elif kind == "delete":
            del raw[at : at + length]
        elif kind == "double":
            raw[at:at] = raw[at : at + length]
        elif kind == "cut":
            del raw[at:]
    path = tmp_path_factory.getbasetemp() / "edited.json"
    path.write_bytes(raw)
    refused_or_harmless(name, lambda: certificates.read_certificate(path))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    raw = certificate_text("at target").encode()
    assert raw.isascii()
    end = len(raw.rstrip())
    for at in {*range(200), *range(200, end, 97), *range(end - 200, end)}:
        path.write_bytes(raw[:at])
        with pytest.raises(BadInputError, match=r"cut\.json"):
            certificates.read_certificate(path)


def test_the_certificate_of_another_config_is_refused() -> None:
    for name in BASES:
        for other in BASES:
            if name != other:
                with pytest.raises(BadInputError, match=r"^certificate: about\."):
                    check.check(json.loads(certificate_text(name)), BASES[other], N)


def test_the_property_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checker that compared nothing would be caught."""
    document = json.loads(certificate_text("unknown"))
    document["claims"][1]["status"] = "proved"
    with pytest.raises(BadInputError, match=r"claims\[1\] \(gain-lag-1\)\.status: not what the proof gives"):
        check.check(document, BASES["unknown"], N)
    accepted("unknown")
    monkeypatch.setattr(check, "_differs", lambda *_: None)
    with pytest.raises(AssertionError, match="claims"):
        refused_or_harmless("unknown", lambda: document)


@pytest.mark.parametrize("depth", [3, 64, 5000, 100_000])
@pytest.mark.parametrize("path", [("about",), ("hints", "log_odds"), ("claims",), ("kind",), ("provenance", "tools")])
def test_nesting_at_any_depth_is_refused(depth: int, path: tuple[str, ...], tmp_path: Path) -> None:
    refuse_nested(depth, path, tmp_path)


@pytest.mark.parametrize("path", [("hints", "log_odds"), ("claims",)])
def test_nesting_at_the_parsers_limit_is_refused(path: tuple[str, ...], tmp_path: Path) -> None:
    """What the parser just takes may be too deep for whoever shows it in an error: a few depths around 950."""
    for depth in range(900, 1000):
        refuse_nested(depth, path, tmp_path)


def refuse_nested(depth: int, path: tuple[str, ...], tmp_path: Path) -> None:
    """Put lists in lists and objects in objects at a place of a certificate's file; it must be refused."""
    document = json.loads(certificate_text("at target"))
    holder = document
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = "HERE"
    file = tmp_path / "deep.json"
    for text in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        file.write_text(json.dumps(document).replace('"HERE"', text))
        with pytest.raises(BadInputError):
            check.check(certificates.read_certificate(file), BASES["at target"], N)
