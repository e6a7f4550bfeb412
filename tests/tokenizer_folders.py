"""Tokenizer folders in the forms that released models have, each small and written on the spot.

``FOLDERS`` has a writer by name. Each folder has an end token and a chat template, so that text,
pairs and conversations can be encoded with any of them; those of ``READ_BY_BOTH`` are read by
``AutoTokenizer``, too.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.chats import WORDS

TEXT = [" ".join(WORDS), "the router sends 1234 tokens\n\n  to experts' layers", "aa bb  cc"] * 3
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
TURN_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}"
    "<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)
GPT4_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def special(text: str, **flags: Any) -> dict[str, Any]:
    """Return an added token as ``tokenizer_config.json`` has it, a special one by default."""
    plain = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"content": text} | plain | {"special": True} | flags


def write(
    folder: Path,
    inner: tokenizers.Tokenizer,
    template: str | None = CHATML_TEMPLATE,
    model: dict[str, Any] | None = None,
    files: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Write a folder; ``model`` is its ``config.json``, the rest ``tokenizer_config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    written = {"tokenizer_config.json": config, **(files or {})}
    if model is not None:
        written["config.json"] = model
    if template is not None:
        written["chat_template.jinja"] = template
    for name, content in written.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        path.write_text(text, encoding="utf-8")
    return folder


def byte_level(
    tokens: tuple[str, ...] = (END_OF_TEXT, IM_START, IM_END), pattern: str | None = None
) -> tokenizers.Tokenizer:
    """Return a byte-level BPE, with special tokens first."""
    inner = tokenizers.Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pattern is None:
        inner.pre_tokenizer = last  # type: ignore[assignment]
    else:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        inner.pre_tokenizer = pre_tokenizers.Sequence([split, last])  # type: ignore[assignment]
    inner.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=list(tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(TEXT, trainer)
    return inner


def pieces(tokens: tuple[str, ...], legacy: bool = True) -> tokenizers.Tokenizer:
    """Return a BPE with byte fallback and ``▁`` for spaces, as converted from SentencePiece."""
    vocab = {token: number for number, token in enumerate(tokens)}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    text = "\n".join(TEXT).replace(" ", "▁")
    for character in sorted({*text} - {"\n"}):
        vocab[character] = len(vocab)
    merges = []
    for left, right in ("▁t", "th", "he", "▁r", "ro", "ou", "er", "▁e", "ex", "▁a", "a▁"):
        if left in vocab and right in vocab and left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append((left, right))
    model = models.BPE(
        vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    inner = tokenizers.Tokenizer(model)
    replace = normalizers.Replace(" ", "▁")
    inner.normalizer = (  # type: ignore[assignment]
        normalizers.Sequence([normalizers.Prepend("▁"), replace]) if legacy else replace
    )
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if legacy:
        stages.append(decoders.Strip(" ", 1, 0))
    inner.decoder = decoders.Sequence(stages)  # type: ignore[assignment]
    inner.add_special_tokens(list(tokens))
    return inner


def begins_with(inner: tokenizers.Tokenizer, start: str, byte: bool = False) -> None:
    """Let a tokenizer add ``start`` before each text."""
    number = inner.token_to_id(start)
    template: Any = processors.TemplateProcessing(
        single=f"{start} $A", pair=f"{start} $A {start}:1 $B:1", special_tokens=[(start, number)]
    )
    both = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])  # type: ignore[list-item]
    inner.post_processor = both if byte else template  # type: ignore[assignment]


def llama3(folder: Path) -> Path:
    """Byte-level, digits in threes, a start token by the post-processor, ignored flags."""
    names = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", IM_START, IM_END)
    inner = byte_level(names, GPT4_WORDS)
    begins_with(inner, names[0], byte=True)
    tokens = {str(inner.token_to_id(name)): special(name) for name in names}
    return write(
        folder,
        inner,
        model={"model_type": "llama"},
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token=names[0],
        eos_token=IM_END,
        added_tokens_decoder=tokens,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=True,
    )


def llama3_named_llama(folder: Path) -> Path:
    """Byte-level, with a class that is not: ``LlamaTokenizerFast``, as DeepSeek's folders."""
    inner = byte_level(("<s>", "</s>", IM_START, IM_END), GPT4_WORDS)
    begins_with(inner, "<s>", byte=True)
    return write(
        folder,
        inner,
        model={"model_type": "deepseek_v3"},
        tokenizer_class="LlamaTokenizerFast",
        bos_token={"__type": "AddedToken", **special("<s>")},
        eos_token=IM_END,
        add_bos_token=True,
        legacy=True,
    )


def llama2(folder: Path) -> Path:
    """SentencePiece's BPE with a normaliser, which the class ``LlamaTokenizer`` replaces."""
    inner = pieces(("<unk>", "<s>", "</s>"))
    begins_with(inner, "<s>")
    return write(
        folder,
        inner,
        INST_TEMPLATE,
        model={"model_type": "llama"},
        tokenizer_class="LlamaTokenizer",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        legacy=False,
        add_bos_token=True,
        add_eos_token=False,
    )


def mistral(folder: Path) -> Path:
    """The same file under a model type whose class reads it as it is; older files beside it."""
    inner = pieces(("<unk>", "<s>", "</s>", "[INST]", "[/INST]"))
    begins_with(inner, "<s>")
    return write(
        folder,
        inner,
        INST_TEMPLATE,
        model={"model_type": "mixtral"},
        tokenizer_class="LlamaTokenizer",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        legacy=True,
        files={
            "special_tokens_map.json": {
                "bos_token": {"content": "<s>", "lstrip": False, "rstrip": False},
                "eos_token": "</s>",
                "unk_token": "<unk>",
            }
        },
    )


def gemma(folder: Path) -> Path:
    """``▁`` without a prefix, tokens of white space that are not special, a dict of extras."""
    names = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>")
    inner = pieces((*names, "<image>"), legacy=False)
    inner.add_tokens([AddedToken("▁▁", normalized=False, special=False)])
    begins_with(inner, "<bos>")
    return write(
        folder,
        inner,
        TURN_TEMPLATE,
        model={"model_type": "gemma3_text"},
        tokenizer_class="GemmaTokenizer",
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        extra_special_tokens={"image_token": "<image>"},
        files={"generation_config.json": {"eos_token_id": [1, 6], "do_sample": False}},
    )


def qwen(folder: Path) -> Path:
    """Byte-level with a class that brings its own words; more tokens in the configuration."""
    inner = byte_level()
    names = (END_OF_TEXT, IM_START, IM_END)
    tokens = {str(number): special(name) for number, name in enumerate(names)}
    last = inner.get_vocab_size()
    tokens[str(last)] = special("<tool_call>", special=False)
    tokens[str(last + 1)] = special("</tool_call>", special=False)
    return write(
        folder,
        inner,
        model={"model_type": "qwen3_moe"},
        tokenizer_class="Qwen2Tokenizer",
        add_bos_token=False,
        add_prefix_space=False,
        added_tokens_decoder=tokens,
        additional_special_tokens=[IM_START, IM_END],
        bos_token=None,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        unk_token=None,
        split_special_tokens=False,
    )


def qwen_base(folder: Path) -> Path:
    """A base model: the end of documents is another token than that of the template's answers."""
    folder = qwen(folder)
    file = folder / "tokenizer_config.json"
    said = json.loads(file.read_text()) | {"eos_token": END_OF_TEXT}
    file.write_text(json.dumps(said))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    return folder


def gpt2(folder: Path) -> Path:
    """Byte-level with offsets that are trimmed, and a start token that is named but not added."""
    inner = byte_level((END_OF_TEXT,))
    inner.post_processor = processors.ByteLevel(trim_offsets=True)  # type: ignore[assignment]
    return write(
        folder,
        inner,
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}",
        model={"model_type": "gpt2"},
        tokenizer_class="GPT2Tokenizer",
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        add_prefix_space=False,
    )


def olmoe(folder: Path) -> Path:
    """A class that adds nothing, whatever the file's post-processor does, and names a new token."""
    inner = byte_level((END_OF_TEXT, IM_START, IM_END))
    begins_with(inner, END_OF_TEXT)
    return write(
        folder,
        inner,
        model={"model_type": "olmoe"},
        tokenizer_class="GPTNeoXTokenizer",
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token="<|padding|>",
        unk_token=None,
        add_bos_token=True,
    )


def granite(folder: Path) -> Path:
    """A list of extra special tokens, which the file lacks, and an older map of special tokens."""
    inner = byte_level((END_OF_TEXT, IM_START, IM_END))
    return write(
        folder,
        inner,
        model={"model_type": "granitemoe"},
        tokenizer_class="GPT2Tokenizer",
        bos_token=END_OF_TEXT,
        eos_token=IM_END,
        add_bos_token=False,
        extra_special_tokens=["<|tool_call|>", IM_START],
        files={
            "special_tokens_map.json": {
                "eos_token": END_OF_TEXT,
                "pad_token": {"content": END_OF_TEXT, "lstrip": False, "normalized": False},
            }
        },
    )


def added_tokens(folder: Path) -> Path:
    """Tokens in ``added_tokens.json``, one of them special by a list; several templates."""
    inner = byte_level((END_OF_TEXT, IM_START, IM_END))
    last = inner.get_vocab_size()
    tools = "{{ tools | tojson }}" + CHATML_TEMPLATE
    return write(
        folder,
        inner,
        model={"model_type": "phimoe"},
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token=IM_END,
        additional_special_tokens=["<|tool|>"],
        files={
            "added_tokens.json": {"<|tool|>": last, "<think>": last + 1},
            "additional_chat_templates/tool_use.jinja": tools,
        },
    )


def unigram(folder: Path) -> Path:
    """A unigram model with byte fallback, and a start token by an older post-processor."""
    inner = tokenizers.Tokenizer(models.Unigram())
    inner.normalizer = normalizers.Replace(Regex(" {2,}"), " ")  # type: ignore[assignment]
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")  # type: ignore[assignment]
    inner.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.UnigramTrainer(
        vocab_size=90,
        special_tokens=["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
        unk_token="<unk>",
        show_progress=False,
    )
    inner.train_from_iterator(TEXT, trainer)
    begins_with(inner, "<s>")
    return write(
        folder,
        inner,
        INST_TEMPLATE,
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def wordpiece(folder: Path) -> Path:
    """WordPiece with tokens before and after each text."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", IM_START, IM_END]
    inner = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)  # type: ignore[assignment]
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    inner.decoder = decoders.WordPiece()  # type: ignore[assignment]
    trainer = trainers.WordPieceTrainer(vocab_size=160, special_tokens=tokens, show_progress=False)
    inner.train_from_iterator(TEXT, trainer)
    inner.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))  # type: ignore[assignment]
    return write(
        folder,
        inner,
        tokenizer_class="BertTokenizer",
        model={"model_type": "bert"},
        do_lower_case=True,
        cls_token="[CLS]",
        sep_token="[SEP]",
        eos_token=IM_END,
        clean_up_tokenization_spaces=True,
    )


def glm(folder: Path) -> Path:
    """Two tokens before each text, added tokens that strip spaces, and special ones that split."""
    names = ("[gMASK]", "<sop>", END_OF_TEXT, IM_START, IM_END)
    inner = byte_level(names)
    inner.add_tokens([AddedToken("<|obs|>", lstrip=True, rstrip=True, special=False)])
    ids = [(name, number) for number, name in enumerate(names[:2])]
    inner.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="[gMASK] <sop> $A", pair="[gMASK] <sop> $A $B:1", special_tokens=ids
    )
    return write(
        folder,
        inner,
        model={"model_type": "glm4_moe"},
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token=IM_END,
        split_special_tokens=True,
    )


FOLDERS: dict[str, Callable[[Path], Path]] = {
    write.__name__: write
    for write in (
        llama3,
        llama3_named_llama,
        llama2,
        mistral,
        gemma,
        qwen,
        qwen_base,
        gpt2,
        olmoe,
        granite,
        added_tokens,
        unigram,
        wordpiece,
        glm,
    )
}
"""Writers of folders by name."""
