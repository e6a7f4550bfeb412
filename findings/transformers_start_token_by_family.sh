#!/usr/bin/env bash
# A start token that both of a tokenizer's files ask for is added or not by config.json's model_type.
#
# Versions: transformers 5.24.0 against 4.57.6 (no torch needed).
#
# Input: a folder with tokenizer.json (byte-level BPE, a post-processor that puts <s> first) and a
#   tokenizer_config.json with `tokenizer_class: GPTNeoXTokenizerFast`, `bos_token: <s>` and
#   `add_bos_token: true`. The same two files stand beside a config.json of model_type mixtral or olmoe.
# Expected: <s> comes first, as both files say; a tokenizer does not depend on the model beside it. Release
#   4 does so. The likely guess for release 5 is that tokenizer.json alone decides, which gives <s> too.
# Seen: release 4.57.6 adds <s> with both. Release 5.24.0 adds it beside mixtral and drops it beside
#   olmoe: it builds the class anew from vocabulary and merges there, without the file's post-processor
#   and without a look at `add_bos_token`. Nothing is printed.
# For users: an upgrade from 4 to 5 removes the first token of every text of such a folder, in training
#   and in generation. Compare tokenizer(text).input_ids with tokenizers.Tokenizer.from_file(...).
#
# Exit status: 0 while this is so, 1 when it is not.
source "$(dirname "$0")/install.sh"
cat > show.py <<'P'
import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

release, due = sys.argv[1], json.loads(sys.argv[2])
pieces = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
tokenizer.add_special_tokens(pieces[:2])
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.post_processor = processors.TemplateProcessing(
    single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
)
described = {
    "tokenizer_class": "GPTNeoXTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "add_bos_token": True,
}
as_stated = True
for family, starts in due.items():
    folder = Path(f"{release}-{family}")
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    stored = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("ab").ids
    ids = AutoTokenizer.from_pretrained(folder)("ab").input_ids
    print(f"transformers {release}, {family}: {ids} (tokenizer.json by itself: {stored})")
    as_stated &= ids == stored[0 if starts else 1 :]
raise SystemExit(0 if as_stated else 1)
P
status=0
for release in 4.57.6 5.24.0; do
    install "env-$release" "transformers==$release"
    with_olmoe=$([ "$release" = 4.57.6 ] && echo true || echo false)
    "env-$release/bin/python" show.py "$release" "{\"mixtral\": true, \"olmoe\": $with_olmoe}" 2>log ||
        { status=1; tail -3 log; }
done
exit $status
