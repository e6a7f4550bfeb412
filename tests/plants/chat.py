"""Plants of conversations: what of them is trained, how they are packed, what writes them on."""

from tests.plants.plant import Plant

CHAT = "tests/cpu/test_data_chat.py::"
ANSWERS = "tests/cpu/test_data_answers.py::"
MASKS = CHAT + "test_ids_and_masks_are_those_of_transformers"
SPEAKING = "tests/cpu/test_convert_chat.py::"
BACK = SPEAKING + "test_template_settings_and_end_tokens_come_back"

PLANTS = (
    Plant(
        "the first token of an answer is not trained",
        MASKS,
        "data/chats/conversations.py",
        "mask_N[first:end] = True",
        "mask_N[first + 1 : end] = True",
    ),
    Plant(
        "the header of an answer is trained with it",
        MASKS,
        "data/chats/answers.py",
        "prompt = self.render(number, prompt=True).text",
        "prompt = self.render(number).text",
    ),
    Plant(
        "the token that ends an answer is not trained",
        MASKS,
        "data/chats/conversations.py",
        "end = first + int(found[-1]) + 1 if len(found) else end",
        "end = first + int(found[-1]) if len(found) else end",
    ),
    Plant(
        "a call ends where a part of it is closed",
        "tests/pure/test_data_ends.py::test_a_call_may_end_with_a_token_of_its_own",
        "data/chats/answer_end.py",
        "[end, closing[-1]]",
        "[end, closing[0]]",
    ),
    Plant(
        "reasoning that is in no text is no loss",
        ANSWERS + "test_a_short_word_elsewhere_hides_no_loss",
        "data/chats/skeleton.py",
        'REQUIRED = ("text", "reasoning", "call", "schema")',
        'REQUIRED = ("text", "call", "schema")',
    ),
    Plant(
        "reasoning of an answer that is trained may be left out",
        ANSWERS + "test_each_answer_is_trained_in_the_text_before_it",
        "data/chats/answers.py",
        "in_history = part.message not in example.trained",
        "in_history = True",
    ),
    Plant(
        "an answer takes the place of the one before it",
        ANSWERS + "test_a_beginning_that_stays_is_trained_once",
        "data/chats/answers.py",
        "spans = earlier.rendered.spans + example.rendered.spans",
        "spans = example.rendered.spans",
    ),
    Plant(
        "null is always left out",
        ANSWERS + "test_null_stays_null_where_a_template_asks_for_it",
        "data/chats/messages.py",
        'if form.nulls == "null":',
        'if form.nulls == "none":',
    ),
    Plant(
        "the mask is shifted by one",
        CHAT + "test_every_conversation_is_in_an_epoch_once_and_whole",
        "data/loader.py",
        "np.append(piece.loss_mask_N[1:], False)",
        "np.append(piece.loss_mask_N[:-1], False)",
    ),
    Plant(
        "padding inside a pack takes the numbers of the next micro-batch's",
        CHAT + "test_every_conversation_is_in_an_epoch_once_and_whole",
        "data/loader.py",
        "inside = len(sequences) * self.seq",
        "inside = sum(lengths)",
    ),
    Plant(
        "a start token is invented",
        SPEAKING + "test_all_end_tokens_are_known_and_no_start_is_invented",
        "data/tokenizer.py",
        "        if start is not None:\n            self._set_start(start)\n",
        "        self._set_start(start or end)\n",
    ),
    Plant(
        "one end token of several is kept",
        BACK,
        "data/tokenizer_files.py",
        "    if end_id in several:\n        return ids\n",
        "    if end_id in several:\n        return end_id\n",
    ),
    Plant(
        "settings of generation are left behind",
        BACK,
        "data/tokenizer_files.py",
        "config = self.json(GENERATION_CONFIG) if GENERATION_CONFIG in self else self._ids()",
        "config = self._ids()",
    ),
    Plant(
        "the position of a row that goes on a text starts anew",
        "tests/cpu/test_model_generate.py::test_logits_are_those_of_whole_texts",
        "data/batch.py",
        "[len(text) - 1 for text in texts]",
        "[0 for text in texts]",
    ),
    Plant(
        "a short text that is left alone sees columns before its start",
        "tests/cpu/test_model_generate.py::test_logits_are_those_of_whole_texts",
        "layers/cache.py",
        "if min(lengths) < columns:",
        "if len(set(lengths)) > 1:",
    ),
    Plant(
        "experts of a row that are called one by one change places",
        "tests/cpu/test_model_generate.py::test_logits_are_those_of_whole_texts",
        "model/incremental.py",
        "F.linear(a_1F, w_out[expert])",
        "F.linear(a_1F, w_out[expert - 1])",
    ),
    Plant(
        "keys and values go to the text before",
        "tests/cpu/test_model_generate.py::test_logits_are_those_of_whole_texts",
        "layers/cache.py",
        "layer.select(previous)",
        "layer.select(previous[:1] * len(previous))",
    ),
    Plant(
        "a text stops at the token that ends documents alone",
        "tests/cpu/test_cli_chat.py::test_answers_are_those_of_transformers_and_stop_at_any_end",
        "training/text_generator.py",
        "stop_ids = {*self.tokenizer.end_ids}",
        "stop_ids = {*self.tokenizer.end_ids[:1]}",
    ),
    Plant(
        "keys and values of another prompt are taken for one's own",
        "tests/cpu/test_model_generate.py::test_a_cache_knows_another_prompt",
        "layers/cache.py",
        "indices = {tuple(text): i for i, text in enumerate(self._texts)}\n"
        "        previous = [indices.get(tuple(text[:-1])) for text in texts]",
        "indices = {len(text): i for i, text in enumerate(self._texts)}\n"
        "        previous = [indices.get(len(text[:-1])) for text in texts]",
    ),
    Plant(
        "keys and values are kept although all rows are computed anew",
        "tests/cpu/test_model_generate.py::test_a_window_that_is_full_goes_on_from_its_newest_half",
        "layers/cache.py",
        "            self._layers.clear()\n",
        "",
    ),
    Plant(
        "the end of a template's answers is taken from the folder alone",
        "tests/pure/test_data_ends.py::test_what_a_template_writes_after_its_end_is_no_label",
        "data/chats/conversations.py",
        "ends or tokenizer.end_ids)",
        "tokenizer.end_ids)",
    ),
    Plant(
        "a start token that is there already is added",
        "tests/pure/test_data_ends.py::test_no_token_around_a_text_is_written_twice",
        "data/tokenizer.py",
        "head = () if tuple(ids_N[: len(self.head)].tolist()) == self.head else self.head",
        "head = self.head",
    ),
    Plant(
        "offsets are trimmed",
        "tests/pure/test_data_ends.py::test_offsets_that_are_trimmed_cost_no_label",
        "data/tokenizer.py",
        "        inner.post_processor = None  # type: ignore[assignment]\n",
        "",
    ),
    Plant(
        "a prompt is encoded apart from its completion",
        "tests/pure/test_data_ends.py::test_a_pair_is_one_text_with_labels_from_its_prompt_on",
        "data/chats/conversations.py",
        "[prompt + completion for prompt, completion in pairs]",
        "[prompt + ' ' + completion for prompt, completion in pairs]",
    ),
    Plant(
        "tokens of the configuration are not added",
        "tests/cpu/test_tokenizer_folders.py::test_texts_have_the_ids_of_transformers",
        "data/folder/tokens.py",
        "listed = [by_id[number] for number in sorted(by_id)]",
        "listed = [by_id[number] for number in sorted(by_id)][:0]",
    ),
    Plant(
        "a class that brings its own words is not known",
        "tests/cpu/test_tokenizer_folders.py::test_texts_have_the_ids_of_transformers",
        "data/folder/classes.py",
        "    known = name in REBUILT or ",
        "    known = False and ",
    ),
    Plant(
        "an exported tokenizer adds no start",
        "tests/cpu/test_tokenizer_folders.py::test_a_stored_and_exported_folder_is_read_alike",
        "data/folder/tokens.py",
        "    assembled |= parts | ",
        '    assembled |= {"post_processor": None} | parts | ',
    ),
)
