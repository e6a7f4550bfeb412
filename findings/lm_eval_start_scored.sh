#!/usr/bin/env bash
# Perplexity tasks count the start token as a predicted one where the tokenizer adds it itself.
#
# Versions: lm-eval 0.4.13, transformers 5.24.0, torch 2.13.0 (CPU).
#
# Input: a small mixtral with a tokenizer that puts <s> first, and a text without one. It is scored
#   as tasks with `output_type: loglikelihood_rolling` do (word_perplexity, bits_per_byte).
# Expected: the sum of log p(token | <s> and the tokens before it) over the text's own tokens: lm-eval's
#   guide to models calls it the likelihood of the whole string, given one token before it. Where the text
#   itself begins with the start token, it takes care that there is no second one.
# Seen: one term more, log p(<s> | <s>). The method writes a prefix token before the text's ids, which
#   have a start token already. Nothing is printed. With `add_bos_token=False` the sum is right.
# For users: perplexities of models with such tokenizers (Llama, Mixtral) are too high, the more
#   so the shorter the texts, and not comparable with those of models without. The model has never been
#   trained to predict a start token after a start token.
#
# Exit status: 0 while this is so, 1 when it is not.
source "$(dirname "$0")/install.sh"
install env torch==2.13.0 transformers==5.24.0 lm-eval==0.4.13 accelerate==1.15.0
cat > show.py <<'P'
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

TEXT = "a short text"
pieces = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
inner = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
inner.add_special_tokens(pieces[:2])
inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
inner.post_processor = processors.TemplateProcessing(
    single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
torch.manual_seed(0)
config = MixtralConfig(
    vocab_size=len(pieces),
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_local_experts=4,
    max_position_embeddings=128,
    bos_token_id=0,
    eos_token_id=1,
    initializer_range=0.2,
)
model = MixtralForCausalLM(config).eval()


def log_probability(ids):
    """Return the sum of log p of all ids but the first."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, torch.tensor(ids[1:])[:, None]).sum().item()


def scored(**settings):
    """Return what lm-eval sums up for the text."""
    tool = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=1, **settings)
    request = Instance("loglikelihood_rolling", {}, (TEXT,), 0)
    return tool.loglikelihood_rolling([request], disable_tqdm=True)[0]


ids = tokenizer(TEXT).input_ids
assert ids.count(0) == 1 and ids[0] == 0
due, twice = log_probability(ids), log_probability([0, *ids])
plain, without = scored(), scored(add_bos_token=False)
print(f"{len(ids) - 1} tokens after the start, log p {due:.4f}; with the start scored as well {twice:.4f}")
print(f"lm-eval: {plain:.4f}; with add_bos_token=False: {without:.4f}")
close = abs(plain - twice) < 1e-3 and abs(without - due) < 1e-3
raise SystemExit(0 if close and abs(due - twice) > 0.5 else 1)
P
env/bin/python -W ignore show.py 2>log || { status=$?; tail -5 log; exit $status; }
