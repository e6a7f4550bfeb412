"""Which class of ``transformers`` reads a tokenizer's folder, and what it makes of the file.

``AutoTokenizer`` chooses a class by ``tokenizer_class`` and by the model's type. A general class
reads ``tokenizer.json`` as it is. The others take vocabulary, merges and post-processor from the
file and bring a normaliser, a pre-tokenizer and a decoder of their own, whatever the file has.

Facts: ``models/auto/tokenization_auto.py`` and ``models/*/tokenization_*.py`` of release 5.24.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from moefold.data.errors import DataError

Content = dict[str, Any]
"""The JSON object of a ``tokenizer.json``."""
Settings = Mapping[str, Any]
"""Fields of ``tokenizer_config.json``, with those of older files."""

GENERAL = "TokenizersBackend"
"""The class that reads ``tokenizer.json`` as it is."""
_GENERAL_NAMES = {GENERAL, "PythonBackend", "PreTrainedTokenizer", "BloomTokenizer"}

_MODEL_TYPES = {
    GENERAL: """arctic aria ernie4_5 ernie4_5_moe flex_olmo glm glm4 glm4_moe glm4_moe_lite
        gpt_bigcode granite granitemoe granitemoehybrid granitemoeshared internlm2 internlm3
        iquestcoder jamba kimi_k25 kimi_linear mimo_v2_flash minicpm3 minimax_m2 ministral
        ministral3 mistral mistral3 mixtral modernbert-decoder nemotron olmo2 olmo3 olmo_hybrid
        persimmon phi3 phimoe stablelm""",
    "CodeLlamaTokenizer": "code_llama",
    "CohereTokenizer": "cohere cohere2",
    "GPT2Tokenizer": "codegen dbrx gpt2 gpt_neo gptj jais2 opt phi starcoder2",
    "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
    "GemmaTokenizer": "gemma gemma2 gemma3 gemma3_text recurrent_gemma zaya",
    "Qwen2Tokenizer": "qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next",
    "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text",
    "XGLMTokenizer": "xglm",
    "BertTokenizer": "bert",
}
_CLASS_OF_TYPE = {kind: name for name, kinds in _MODEL_TYPES.items() for kind in kinds.split()}
"""The class of a model's type, of models that generate text."""

_DECIDING_TYPES = """
arctic ernie4_5 ernie4_5_moe internlm2 internlm3 iquestcoder jamba minicpm3 minimax_m2
modernbert-decoder nemotron phi3 phimoe qwen2 qwen3_5 qwen3_5_moe qwen3_5_moe_text
"""
_DECIDED_BY_TYPE = set(_DECIDING_TYPES.split())
"""Model types whose class is used whatever ``tokenizer_class`` says."""
_MISTRAL = {"ministral", "ministral3", "mistral", "mistral3", "mixtral"}

_CLASS_NAMES = """
Albert Barthez BigBird Blenderbot CLIP Camembert CodeGen CodeLlama Deberta DebertaV2 DistilBert
Esmc Funnel Herbert Lasr LayoutLMv2 LayoutLMv3 LayoutXLM Luke MBart50 MBart MLuke MPNet MarkupLM
Nllb Nougat OpenAIGPT Pegasus Reformer RemBert Roberta SeamlessM4T Siglip2 Splinter T5 Udop
Whisper XGLM XLMRoberta XLNet
"""
_OTHER_CLASSES = set(_CLASS_NAMES.split())
"""Names of classes, without ``Tokenizer``, that build a tokenizer of their own."""


class Rebuilt(NamedTuple):
    """What a class that builds a tokenizer of its own takes from the file, and what it brings."""

    model: str
    """Type of the model that the file must have."""
    named: Mapping[str, str | None]
    """Default special tokens by name."""
    parts: Callable[[Settings], Content]
    """Returns what replaces parts of the file; ``model`` has only the fields that change."""
    marks_special: Literal["", "plain", "kept"] = ""
    """How it makes named and listed tokens special: with plain flags besides, or with theirs."""
    around: tuple[str, str] | None = None
    """Names of the tokens that it writes before and after each text, whatever the file has."""


def class_of_folder(model: Mapping[str, Any], config: Settings, byte_level: bool) -> str:
    """Return the name of the class that reads a folder, :data:`GENERAL` for unknown ones.

    Args:
        model: ``config.json``, of which ``model_type`` and ``tokenizer_class`` are read.
        config: ``tokenizer_config.json``.
        byte_level: whether ``tokenizer.json`` names a part ``ByteLevel``.
    """
    model_type = model.get("model_type")
    declared = _without_fast(config.get("tokenizer_class") or model.get("tokenizer_class"))
    registered = _CLASS_OF_TYPE.get(model_type) if isinstance(model_type, str) else None
    if (
        declared == "LlamaTokenizer"
        and byte_level
        and model_type not in _MISTRAL
        and model_type not in _DECIDED_BY_TYPE
    ):
        return GENERAL
    if declared is None:
        return registered or GENERAL
    if registered in (None, declared):
        return _known(declared)
    if registered == GENERAL or model_type in _DECIDED_BY_TYPE:
        return registered or GENERAL
    return _known(declared)


def _without_fast(name: Any) -> str | None:
    return name.removesuffix("Fast") if isinstance(name, str) and name else None


def _known(name: str) -> str:
    """Return a class's name, or the general one's for names without a class."""
    known = name in REBUILT or name.removesuffix("Tokenizer") in _OTHER_CLASSES
    return name if known and name not in _GENERAL_NAMES else GENERAL


def rebuilt_by(name: str, content: Content, source: str) -> Rebuilt | None:
    """Return what a class makes of a file, None for the class that reads it as it is.

    Raises:
        DataError: if the class is one that is not known here, or needs another kind of file.
    """
    if name == GENERAL:
        return None
    remedy = (
        "set tokenizer_class in tokenizer_config.json to PreTrainedTokenizerFast if tokenizer.json "
        "is right as it is, or load the folder with AutoTokenizer and save it again"
    )
    if name not in REBUILT:
        raise DataError(
            f"{source}: tokenizer_class is {name}, of which transformers takes only parts of "
            f"tokenizer.json, and which is not supported; {remedy}"
        )
    rebuilt = REBUILT[name]
    model = content.get("model")
    kind = model.get("type") if isinstance(model, dict) else None
    if kind != rebuilt.model:
        raise DataError(
            f"{source}: transformers reads it with {name}, by tokenizer_class or by the model's "
            f"type, which builds a {rebuilt.model}, but tokenizer.json has a model of type {kind}; "
            f"{remedy}"
        )
    return rebuilt


def _metaspace(scheme: str) -> Content:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}


def _sequence(kind: str, *parts: Content) -> Content:
    return {"type": "Sequence", kind: list(parts)}


def _byte_level(prefix_space: Any = False, regex: bool = True) -> Content:
    return {
        "type": "ByteLevel",
        "add_prefix_space": bool(prefix_space),
        "trim_offsets": True,
        "use_regex": regex,
    }


def _spaces(content: str, pattern: str) -> Content:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def _decoder(*more: Content) -> Content:
    kinds = ({"type": "ByteFallback"}, {"type": "Fuse"})
    return _sequence("decoders", _spaces(" ", "▁"), *kinds, *more)


def _bpe(**changed: Any) -> Content:
    """Return the fields of a BPE besides vocabulary and merges."""
    return {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    } | changed


_BYTES_BPE = _bpe(continuing_subword_prefix="", end_of_word_suffix="")


def _llama(settings: Settings) -> Content:
    prefix_space = settings.get("add_prefix_space")
    scheme = "always" if settings.get("legacy") else "first"
    stripped = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if prefix_space is not None and not prefix_space:
        scheme = "never"
    return {
        "model": _bpe(fuse_unk=True, byte_fallback=True),
        "normalizer": None,
        "pre_tokenizer": _metaspace(scheme),
        "decoder": _decoder() if scheme == "never" else _decoder(stripped),
    }


def _gemma(settings: Settings) -> Content:
    behaviour = {"behavior": "MergedWithPrevious", "invert": False}
    unknown = settings.get("unk_token", "<unk>")
    return {
        "model": _bpe(unk_token=str(unknown), fuse_unk=True, byte_fallback=True),
        "normalizer": _spaces("▁", " "),
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}} | behaviour,
        "decoder": _decoder(),
    }


def qwen_words(letters: str) -> str:
    """Return the expression that divides text; ``letters`` are the characters of words."""
    words = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{letters}+|\p{{N}}"
    signs = rf"[^\s{letters.strip('[]')}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return f"{words}| ?{signs}"


def _qwen(letters: str) -> Callable[[Settings], Content]:
    """Return what a class of Qwen's brings; ``letters`` are the characters of words."""
    split = {
        "type": "Split",
        "pattern": {"Regex": qwen_words(letters)},
        "behavior": "Isolated",
        "invert": False,
    }

    def parts(settings: Settings) -> Content:
        last = _byte_level(settings.get("add_prefix_space"), regex=False)
        return {
            "model": _BYTES_BPE,
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": _sequence("pretokenizers", split, last),
            "decoder": _byte_level(True),
        }

    return parts


def _gpt2(settings: Settings) -> Content:
    return {
        "model": _BYTES_BPE,
        "normalizer": None,
        "pre_tokenizer": _byte_level(settings.get("add_prefix_space")),
        "decoder": _byte_level(True),
    }


def _gpt_neox(settings: Settings) -> Content:
    # It writes a post-processor that adds nothing.
    return _gpt2(settings) | {"normalizer": {"type": "NFC"}, "post_processor": None}


def _cohere(settings: Settings) -> Content:
    digits = {"type": "Digits", "individual_digits": True}
    bytes_ = _byte_level(settings.get("add_prefix_space"))
    return {
        "model": _BYTES_BPE,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": _sequence("pretokenizers", digits, bytes_),
        "decoder": bytes_,
    }


def _bert(settings: Settings) -> Content:
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": settings.get("tokenize_chinese_chars", True),
        "strip_accents": settings.get("strip_accents"),
        "lowercase": settings.get("do_lower_case", True),
    }
    return {
        "model": {
            "unk_token": str(settings.get("unk_token", "[UNK]")),
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        },
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    }


_END_OF_TEXT = "<|endoftext|>"
_LLAMA_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_GEMMA_TOKENS = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
_QWEN_TOKENS = {
    "eos_token": _END_OF_TEXT,
    "unk_token": _END_OF_TEXT,
    "pad_token": _END_OF_TEXT,
}
_GPT2_TOKENS = {
    "bos_token": _END_OF_TEXT,
    "eos_token": _END_OF_TEXT,
    "unk_token": _END_OF_TEXT,
}
_COHERE_TOKENS = {
    "bos_token": "<BOS_TOKEN>",
    "eos_token": "<|END_OF_TURN_TOKEN|>",
    "unk_token": "<UNK>",
    "sep_token": "<SEP>",
    "pad_token": "<PAD>",
    "cls_token": "<CLS>",
    "mask_token": "<MASK_TOKEN>",
}
_BERT_TOKENS = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
LETTERS = r"\p{L}"
LETTERS_AND_MARKS = r"[\p{L}\p{M}]"
REBUILT: dict[str, Rebuilt] = {
    "LlamaTokenizer": Rebuilt("BPE", _LLAMA_TOKENS, _llama),
    "GemmaTokenizer": Rebuilt("BPE", _GEMMA_TOKENS, _gemma),
    "Qwen2Tokenizer": Rebuilt("BPE", _QWEN_TOKENS, _qwen(LETTERS), "plain"),
    "Qwen3_5Tokenizer": Rebuilt("BPE", _QWEN_TOKENS, _qwen(LETTERS_AND_MARKS)),
    "GPT2Tokenizer": Rebuilt("BPE", _GPT2_TOKENS, _gpt2),
    "GPTNeoXTokenizer": Rebuilt("BPE", _GPT2_TOKENS | {"pad_token": "<|padding|>"}, _gpt_neox),
    "CohereTokenizer": Rebuilt("BPE", _COHERE_TOKENS, _cohere, "kept"),
    "BertTokenizer": Rebuilt("WordPiece", _BERT_TOKENS, _bert, around=("cls_token", "sep_token")),
}
"""Classes that build a tokenizer of their own, by name."""
