"""Plants of conversations: what of them is trained, how they are packed, what writes them on."""

from tests.plants.plant import Plant

CHAT = "tests/cpu/test_data_chat.py::"
MASKS = CHAT + "test_b70_ids_and_masks_are_those_of_transformers"
SPEAKING = "tests/cpu/test_convert_chat.py::"
BACK = SPEAKING + "test_b72_template_settings_and_end_tokens_come_back"

PLANTS = (
    Plant(
        "b70",
        "the first token of an answer is not trained",
        MASKS,
        "data/conversations.py",
        "mask_N[first:end] = True",
        "mask_N[first + 1 : end] = True",
    ),
    Plant(
        "b70",
        "the header of an answer is trained with it",
        MASKS,
        "data/template.py",
        "before = self.render(messages[:number], tools, prompt=True, **options).text",
        "before = self.render(messages[:number], tools, **options).text",
    ),
    Plant(
        "b70",
        "the token that ends an answer is not trained",
        MASKS,
        "data/conversations.py",
        "end = first + int(ends[-1]) + 1 if len(ends) else end",
        "end = first + int(ends[-1]) if len(ends) else end",
    ),
    Plant(
        "b71",
        "the mask is shifted by one",
        CHAT + "test_b71_every_conversation_is_in_an_epoch_once_and_whole",
        "data/loader.py",
        "np.append(piece.loss_mask_N[1:], False)",
        "np.append(piece.loss_mask_N[:-1], False)",
    ),
    Plant(
        "b71",
        "padding inside a pack takes the numbers of the next micro-batch's",
        CHAT + "test_b71_every_conversation_is_in_an_epoch_once_and_whole",
        "data/loader.py",
        "inside = len(sequences) * self.seq",
        "inside = sum(lengths)",
    ),
    Plant(
        "b72",
        "a start token is invented",
        SPEAKING + "test_b72_all_end_tokens_are_known_and_no_start_is_invented",
        "data/tokenizer.py",
        'token_text(config.get("bos_token")) if start',
        'token_text(config.get("bos_token")) or end if start',
    ),
    Plant(
        "b72",
        "one end token of several is kept",
        BACK,
        "data/tokenizer_files.py",
        "    if end_id in several:\n        return ids\n",
        "    if end_id in several:\n        return end_id\n",
    ),
    Plant(
        "b72",
        "settings of generation are left behind",
        BACK,
        "data/tokenizer_files.py",
        "config = self.json(GENERATION_CONFIG) if GENERATION_CONFIG in self else self.json(CONFIG)",
        "config = self.json(CONFIG)",
    ),
    Plant(
        "b73",
        "the position of a row that goes on a text starts anew",
        "tests/cpu/test_model_generate.py::test_b73_logits_are_those_of_whole_texts",
        "data/batch.py",
        "[len(text) - 1 for text in texts]",
        "[0 for text in texts]",
    ),
    Plant(
        "b73",
        "a short text that is left alone sees columns before its start",
        "tests/cpu/test_model_generate.py::test_b73_logits_are_those_of_whole_texts",
        "layers/cache.py",
        "if min(lengths) < k_PGLd.shape[2]:",
        "if len(set(lengths)) > 1:",
    ),
    Plant(
        "b73",
        "experts of a row that are called one by one change places",
        "tests/cpu/test_model_generate.py::test_b73_logits_are_those_of_whole_texts",
        "model/incremental.py",
        "F.linear(a_1F, w_out[expert])",
        "F.linear(a_1F, w_out[expert - 1])",
    ),
    Plant(
        "b73",
        "keys and values go to the text before",
        "tests/cpu/test_model_generate.py::test_b73_logits_are_those_of_whole_texts",
        "layers/cache.py",
        "layer.select(previous)",
        "layer.select(previous[:1] * len(previous))",
    ),
    Plant(
        "b73",
        "a text stops at the token that ends documents alone",
        "tests/cpu/test_cli_chat.py::test_b73_answers_are_those_of_transformers_and_stop_at_any_end",
        "training/text_generator.py",
        '"stop_ids": self.tokenizer.end_ids',
        '"stop_ids": self.tokenizer.end_ids[:1]',
    ),
    Plant(
        "b73",
        "keys and values of another prompt are taken for one's own",
        "tests/cpu/test_model_generate.py::test_b73_a_cache_knows_another_prompt",
        "layers/cache.py",
        "indices = {tuple(text): i for i, text in enumerate(self._texts)}\n"
        "        previous = [indices.get(tuple(text[:-1])) for text in texts]",
        "indices = {len(text): i for i, text in enumerate(self._texts)}\n"
        "        previous = [indices.get(len(text[:-1])) for text in texts]",
    ),
    Plant(
        "b73",
        "keys and values are kept although all rows are computed anew",
        "tests/cpu/test_model_generate.py::test_b73_a_window_that_is_full_goes_on_from_its_newest_half",
        "layers/cache.py",
        "            self._layers.clear()\n",
        "",
    ),
)
