"""The post-processor of a ``tokenizer.json``: the tokens that a tokenizer adds around each text.

It decides alone whether texts begin with a start token: ``transformers`` reads ``add_bos_token`` of
``tokenizer_config.json`` only if there is no ``tokenizer.json`` (release 5.24,
``tokenization_utils_base.py``).
"""

from collections.abc import Mapping
from typing import Any

Content = dict[str, Any]
"""The JSON object of a ``tokenizer.json``."""
Ids = tuple[int, ...]


def added_around(processor: Mapping[str, Any] | None) -> tuple[Ids, Ids]:
    """Return the token ids that a post-processor adds before and after a text.

    Raises:
        LookupError, TypeError: if the post-processor is malformed.
    """
    if processor is None:
        return (), ()
    before: Ids = ()
    after: Ids = ()
    kind = processor.get("type")
    if kind == "Sequence":
        for inner in processor["processors"]:
            inner_before, inner_after = added_around(inner)
            before = inner_before + before
            after = after + inner_after
    elif kind in ("BertProcessing", "RobertaProcessing"):
        before = (processor["cls"][1],)
        after = (processor["sep"][1],)
    elif kind == "TemplateProcessing":
        seen_text = False
        for piece in processor["single"]:
            if "Sequence" in piece:
                seen_text = True
                continue
            ids = tuple(processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"])
            if seen_text:
                after += ids
            else:
                before += ids
    return before, after


def around_texts(before: Mapping[str, int], after: Mapping[str, int]) -> Content | None:
    """Return a post-processor that adds tokens before and after a text, None if there are none.

    ``before`` and ``after`` have the ids of the tokens by their text, in order.
    """
    if not before and not after:
        return None

    def written(type_id: int, name: str) -> list[Content]:
        text = {"Sequence": {"id": name, "type_id": type_id}}
        return [*_pieces(before, type_id), text, *_pieces(after, type_id)]

    special = {
        token: {"id": token, "ids": [token_id], "tokens": [token]}
        for token, token_id in {**before, **after}.items()
    }
    return {
        "type": "TemplateProcessing",
        "single": written(0, "A"),
        "pair": [*written(0, "A"), *written(1, "B")],
        "special_tokens": special,
    }


def _pieces(tokens: Mapping[str, int], type_id: int) -> list[Content]:
    return [{"SpecialToken": {"id": token, "type_id": type_id}} for token in tokens]
