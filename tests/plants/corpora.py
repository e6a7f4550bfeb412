"""Plants of corpora: what a file is, where it ends, which files belong to a set."""

from tests.plants.plant import Plant

CORPORA = "tests/pure/test_data_corpora.py::"
FOREIGN_TOKENIZERS = "tests/pure/test_data_foreign_tokenizers.py::"
CUT = CORPORA + "test_a_compressed_file_that_is_cut_off_is_refused"
PLAIN = CORPORA + "test_compressed_lines_are_those_of_the_plain_file"
FOREIGN = CORPORA + "test_other_kinds_of_files_are_never_text"
PARTS = "tests/pure/test_data_cuts.py::test_parts_have_the_ids_of_the_whole"
STAY_WHOLE = "tests/pure/test_data_cuts.py::test_texts_of_other_tokenizers_stay_whole"
SAVED = CORPORA + "test_a_saved_folder_is_the_files_of_its_state"

PLANTS = (
    Plant(
        "a compressed file that is cut off ends like one that is whole",
        CUT,
        "data/corpora/streams.py",
        'raise EOFError("it is cut off within its compressed data")',
        "return False",
    ),
    Plant(
        "what follows the first compressed stream of a file is lost",
        PLAIN,
        "data/corpora/streams.py",
        "self._decoder = self._start()\n            elif",
        "return False\n            elif",
    ),
    Plant(
        "a tar is text",
        FOREIGN,
        "data/corpora/streams.py",
        "return _TAR_KIND if _begins_tar(head) else None",
        "return None",
    ),
    Plant(
        "what is inside a compressed file is not looked at",
        FOREIGN,
        "data/corpora/streams.py",
        "head = stream.peek(_HEAD)[:_HEAD]",
        "head = file.peek(_HEAD)[:_HEAD]",
    ),
    Plant(
        "a line has no limit",
        CORPORA + "test_no_document_is_longer_than_the_stated_limit",
        "data/corpora/records.py",
        'check_size(f"{name}:{number}", len(line), "divide the line, or leave it out")',
        "",
    ),
    Plant(
        "the cache of a saved set is read with it",
        SAVED,
        "data/corpora/tables.py",
        "return SavedSet([folder / name for name in names], columns, others)",
        'return SavedSet(sorted(folder.glob("*.arrow")), columns, others)',
    ),
    Plant(
        "columns that a saved set hides are read",
        CORPORA + "test_a_saved_folder_that_cannot_be_read_is_refused",
        "data/corpora/sources.py",
        "if shown is None or name in shown]",
        "]",
    ),
    Plant(
        "documents come in the order in which threads end",
        "tests/pure/test_data_prepare.py::test_documents_keep_their_order_whatever_the_threads",
        "data/corpora/ahead.py",
        "if len(pending) == _THREADS:\n                    yield pending.popleft().result()",
        "if len(pending) == _THREADS:\n                    yield pending.pop().result()",
    ),
    Plant(
        "links in a tar are passed over",
        "tests/cpu/test_data_shards.py::test_strange_members_are_refused_by_name",
        "data/shards.py",
        "if info.issym() or info.islnk():",
        "if False:",
    ),
    Plant(
        "members whose names are in upper case are empty",
        "tests/cpu/test_data_shards.py::test_documents_are_the_samples_of_webdataset",
        "data/shards.py",
        'partition("/")[2].partition(".")[2].lower()',
        'partition("/")[2].partition(".")[2]',
    ),
    Plant(
        "merges are ordered by their text, not by score",
        FOREIGN_TOKENIZERS + "test_sentencepiece_files_give_their_library_s_ids",
        "data/foreign_tokenizers.py",
        "(-score, at, left, right)",
        "(at, -score, left, right)",
    ),
    Plant(
        "ids of a tekken file are its ranks",
        FOREIGN_TOKENIZERS + "test_tekken_files_have_special_tokens_first_and_a_cut_vocabulary",
        "data/foreign_tokenizers.py",
        '"vocab": {spelt(token): rank + first for',
        '"vocab": {spelt(token): rank for',
    ),
    Plant(
        "a conversion is not proved",
        FOREIGN_TOKENIZERS + "test_what_cannot_be_converted_is_refused_with_a_way_out",
        "data/foreign_tokenizers.py",
        "    _prove(file, text, encode)\n",
        "",
    ),
    Plant(
        "a text is cut before a line that belongs to the signs before it",
        PARTS,
        "data/cuts.py",
        "{_SPACES}|[A-Za-z0-9](?=",
        "{_SPACES}|[!-~](?=",
    ),
    Plant(
        "a text is cut at lines although a space is put before each part",
        PARTS,
        "data/cuts.py",
        "if len(found) == 1 and not puts_space:",
        "if len(found) == 1:",
    ),
    Plant(
        "an added token may reach across a place to cut",
        STAY_WHOLE,
        "data/cuts.py",
        "if any(_reaches_across(token) for",
        "if any(False for",
    ),
    Plant(
        "merges over a space are not looked for",
        STAY_WHOLE,
        "data/cuts.py",
        're.search(f"[!-~]{_METASPACE}", token) for token in vocab',
        "False for token in vocab",
    ),
)
