"""What nobody gives a program on purpose, and somebody does: strategies of damaged files."""

import json
from typing import Any

from hypothesis import strategies as st

CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
PARTS: tuple[Any, ...] = (
    CHARSMAP,
    {"type": "Sequence", "normalizers": [CHARSMAP]},
    {"type": "Replace", "pattern": {"String": ""}, "content": "xx"},
    {"type": "Prepend", "prepend": ""},
    {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
    {"type": "FixedLength", "length": 0},
    {"type": "Strip", "content": "a", "start": 5, "stop": 7},
    {"type": "WordLevel", "vocab": {}, "unk_token": "x"},
    {"type": "Unigram", "unk_id": 9, "vocab": [["a", 0]]},
    {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "z", "max_input_chars_per_word": 1},
)
"""Parts of a tokenizer.json that the library refuses, or takes and panics over."""

plain = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 2**24, 2**31, 2**32 - 1, 2**63, 1e300, "", "x", "\udc00", "<0xZZ>"]),
    st.just([]),
    st.just({}),
)


@st.composite
def changed(draw: st.DrawFn, text: str) -> bytes:
    """Draw a JSON object with some of its values replaced, taken away or moved."""
    content = json.loads(text)
    for _ in range(draw(st.integers(1, 3))):
        inside: Any = content
        key = draw(st.sampled_from(sorted(content))) if content else "model"
        while isinstance(inside.get(key), dict) and inside[key] and draw(st.booleans()):
            inside = inside[key]
            key = draw(st.sampled_from(sorted(inside)[:20]))
        if draw(st.integers(0, 4)):
            inside[key] = draw(plain)
        else:
            inside.pop(key, None)
    return json.dumps(content).encode()


def cut(text: str) -> st.SearchStrategy[bytes]:
    """Return what is left of a text that was cut short, or had some of its bytes changed."""
    data = text.encode()
    short = st.integers(0, len(data)).map(lambda n: data[:n])
    spoilt = st.tuples(st.integers(0, len(data) - 1), st.binary(min_size=1, max_size=4)).map(
        lambda at: data[: at[0]] + at[1] + data[at[0] + len(at[1]) :]
    )
    return short | spoilt


odd = st.sampled_from([b"", b"\0" * 9, b"[" * 200_000, b'"text"', b"\xff\xfe", b"[1]", b"{}"])
"""Files of no use to anyone: empty, zeros, nested without end, of another kind or encoding."""


def tokenizers(text: str) -> st.SearchStrategy[bytes]:
    """Return damaged and hostile forms of a tokenizer.json."""
    content = json.loads(text)
    slots = st.sampled_from(["normalizer", "pre_tokenizer", "decoder", "model"])
    placed = st.builds(
        lambda slot, part: json.dumps({**content, slot: part}).encode(),
        slots,
        st.sampled_from(PARTS),
    )
    return placed | changed(text) | cut(text) | odd
