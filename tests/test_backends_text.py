from __future__ import annotations

from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st
from tiny_model import byte_tokenizer

from backends.text import Detokenizer, StopStrings, TextStream

PIECES = {1: "The quick br", 2: "own", 3: " fox", 4: " foot", 5: "x"}


def words(ids: Sequence[int]) -> str:
    return "".join(PIECES[i] for i in ids)


def as_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def test_w2_stop_string_over_three_tokens_is_held_back() -> None:
    stream = TextStream(words, ["own fox"])
    assert [stream.push(t) for t in (1, 2, 3)] == ["The quick br", "", ""]
    assert stream.stopped
    assert stream.text == "The quick br"
    assert stream.finish() == ""


def test_w2_held_text_is_released_in_full() -> None:
    stream = TextStream(words, ["own fox"])
    assert [stream.push(t) for t in (1, 2, 4)] == ["The quick br", "", "own foot"]
    assert not stream.stopped
    tail = TextStream(words, ["own fox"])
    assert [tail.push(t) for t in (1, 2)] == ["The quick br", ""]
    assert tail.finish() == "own"


def test_earliest_stop_wins_and_later_tokens_are_ignored() -> None:
    stops = StopStrings(["fox", "own"])
    assert stops.push("brown fox") == ("br", True)
    stream = TextStream(words, ["own"])
    stream.push(2)
    assert stream.stopped
    assert stream.push(1) == ""
    assert stream.text == ""


def test_w5_character_split_over_tokens() -> None:
    detokenizer = Detokenizer(as_bytes)
    tokens = [0xF0, 0x9F, 0xA6, 0x99, *"e\u0301".encode()]
    deltas = [detokenizer.push(t) for t in tokens]
    assert deltas == ["", "", "", "\U0001f999", "e", "", "\u0301"]
    assert "".join(deltas) == as_bytes(tokens)


def test_w5_incomplete_tail_appears_once() -> None:
    stream = TextStream(as_bytes)
    assert [stream.push(t) for t in (0x61, 0xF0, 0x9F)] == ["a", "", ""]
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""
    assert stream.text == "a\ufffd"


def test_w5_stop_string_with_an_incomplete_character_before_it() -> None:
    stream = TextStream(as_bytes, ["ab"])
    deltas = [stream.push(t) for t in (0xF0, 0x9F, 0x61, 0x62)]
    assert deltas == ["", "", "\ufffd", ""]
    assert stream.stopped


@given(st.lists(st.integers(0, 255), max_size=40))
@example([0xEF, 0xBF, 0xBD])
@example([0xC3, 0xC3, 0xA9])
def test_deltas_equal_the_full_decode(tokens: list[int]) -> None:
    for decode in (as_bytes, byte_tokenizer_decode):
        detokenizer = Detokenizer(decode)
        shown = ""
        for token in tokens:
            shown += detokenizer.push(token)
            assert decode(tokens).startswith(shown)
        assert shown + detokenizer.flush() == decode(tokens)


TOKENIZER = byte_tokenizer()


def byte_tokenizer_decode(ids: Sequence[int]) -> str:
    return TOKENIZER.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def leading_space_dropped(ids: Sequence[int]) -> str:
    """Like sentencepiece tokenizers: the first space of a decoded text is not shown."""
    return "".join(f" {i}" for i in ids)[1:]


@given(st.lists(st.integers(0, 99), max_size=12))
def test_tokenizers_that_drop_a_leading_space(tokens: list[int]) -> None:
    detokenizer = Detokenizer(leading_space_dropped)
    assert "".join(map(detokenizer.push, tokens)) + detokenizer.flush() == leading_space_dropped(tokens)


def byte_fallback(ids: Sequence[int]) -> str:
    """Like Llama 2's tokenizer: a run of byte tokens is decoded as a whole, each byte U+FFFD if the run is broken."""
    try:
        return bytes(ids).decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(ids)


@given(st.lists(st.sampled_from([*"a\u00e9\U0001f999".encode(), 0xFF]), max_size=12))
@example([0xC3, 0xA9, 0xFF, 0x61])
def test_broken_bytes_take_back_no_character_that_is_out(tokens: list[int]) -> None:
    detokenizer, whole = Detokenizer(byte_fallback), byte_fallback(tokens)
    shown = "".join(map(detokenizer.push, tokens)) + detokenizer.flush()
    if "\ufffd" not in whole:
        assert shown == whole
    left = iter(tokens)
    assert all(byte in left for byte in shown.replace("\ufffd", "").encode())  # a subsequence: nothing is made up


def test_a_broken_byte_behind_a_whole_character_adds_one_mark() -> None:
    detokenizer = Detokenizer(byte_fallback)
    assert [detokenizer.push(t) for t in (0xC3, 0xA9, 0xFF)] == ["", "\u00e9", ""]
    assert detokenizer.flush() == "\ufffd"


@given(
    st.lists(st.text("ab", max_size=3), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_cut_where_a_search_of_the_whole_text_would(pieces: list[str], stop: list[str]) -> None:
    whole, matcher, shown, stopped = "".join(pieces), StopStrings(stop), "", False
    for piece in pieces:
        delta, stopped = matcher.push(piece)
        shown += delta
        if stopped:
            break
    if not stopped:
        shown += matcher.flush()
    met = [n for n in range(len(whole) + 1) if any(whole[:n].endswith(s) for s in stop)]
    assert stopped == bool(met)
    if not met:
        assert shown == whole
    else:
        assert whole.startswith(shown)
        assert any(whole[len(shown) :].startswith(s) for s in stop)
        assert not any(s in shown for s in stop)
