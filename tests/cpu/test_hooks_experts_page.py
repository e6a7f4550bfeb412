"""The page of experts: what it says is what the router did."""

import base64

import numpy as np
import pytest

from moefold.training.hooks.experts import LayerRouting, preferred_tokens, render_experts
from tests.pure.test_training_history import Page


def routing(ids: list[list[int]], weights: list[list[float]], experts: int = 3) -> LayerRouting:
    """A layer's routing as arrays."""
    return LayerRouting("1", experts, np.array(ids), np.array(weights))


def bytes_of(text: str, dtype: str = "u1") -> list[int]:
    """Unpack what the page unpacks."""
    return np.frombuffer(base64.b64decode(text), dtype).tolist()


def test_the_page_holds_choices_heaviest_first() -> None:
    """Weights are shares of each token's sum, in 255ths."""
    layer = routing([[0, 2], [1, 0], [2, 1]], [[0.25, 0.75], [0.4, 0.1], [0.3, 0.3]])
    text = render_experts("<demo>", "a & b", ["x", " y", "</script>\n"], [layer], shown=3)
    found = Page(text)
    assert found.fetched == [] and "http" not in text
    assert found.data["tokens"] == ["x", " y", "</script>\n"]
    (stored,) = found.data["layers"]
    assert bytes_of(stored["ids"]) == [2, 0, 1, 0, 2, 1]
    assert bytes_of(stored["weights"]) == [191, 64, 204, 51, 128, 128]
    assert stored["load"] == [round(2 / 6, 5)] * 3
    assert stored["experts"] == 3 and stored["top_k"] == 2
    assert "a &amp; b" in text and "Experts of &lt;demo&gt;" in text


def test_loads_count_all_tokens_and_the_text_shows_some() -> None:
    """Statistics want more text than anybody reads."""
    layer = routing([[0], [1], [1], [1]], [[1.0]] * 4)
    (stored,) = Page(render_experts("d", "", list("abcd"), [layer], shown=2)).data["layers"]
    assert bytes_of(stored["ids"]) == [0, 1] and stored["load"] == [0.25, 0.75, 0.0]


def test_dropped_choices_weigh_nothing() -> None:
    """They count in no load and are never first."""
    layer = routing([[2, 0], [-1, 1]], [[0.6, 0.4], [0.9, 0.1]])
    (stored,) = Page(render_experts("d", "", ["a", "b"], [layer], shown=2)).data["layers"]
    assert bytes_of(stored["ids"]) == [2, 0, 1, 0]
    assert bytes_of(stored["weights"]) == [153, 102, 255, 0]
    assert stored["load"] == pytest.approx([1 / 3] * 3, abs=1e-5)


def test_many_experts_take_two_bytes() -> None:
    """Expert 300 stays 300."""
    layer = routing([[300]], [[1.0]], experts=400)
    (stored,) = Page(render_experts("d", "", ["a"], [layer], shown=1)).data["layers"]
    assert stored["wide"] and bytes_of(stored["ids"], "<u2") == [300]


def test_preferred_tokens_are_frequent_here_and_rare_elsewhere() -> None:
    """``the`` is everywhere, ``def`` is expert 0's, a token seen once is nobody's."""
    texts = ["the", "def", "the", "def", "the", "once", "the", "if", "if"]
    experts = [0, 0, 1, 0, 0, 0, 1, 1, 1]
    layer = routing([[e] for e in experts], [[1.0]] * 9, experts=2)
    assert preferred_tokens(layer, texts) == [["def"], ["if"]]
