"""Time of a token of the demo's model: with keys and values kept, without, and by transformers.

    python bench/sampling.py [--tokens 400] [--rounds 3] [--threads 1] [--save]

Writes one text by a model of the recipe ``demo``'s sizes with drawn weights. Both ways of moefold
go in turns of ``TURN`` tokens of the same text, so that what else the machine does slows them
alike; transformers writes as many tokens of a model of its own, of the same sizes, after each
round, its window being longer. A figure is the sum of a round's tokens.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import moefold  # noqa: F401  (before torch: it says how threads wait)

# isort: split
import torch

from moefold.model.decoder import DecoderModel
from moefold.model.generate import NextLogits, stream_tokens
from moefold.model.incremental import IncrementalDecoder
from moefold.model.init import initialise
from moefold.run import load_run
from moefold.training.machine import cpu_name

RESULTS = Path(__file__).parent / "results" / "sampling.json"
TURN = 16
PROMPT = [1, 2, 3]


def main(words: Sequence[str]) -> int:
    """Run the rounds, and print tokens per second and the ratio of times."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--tokens", type=int, default=400)
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--threads", type=int, default=1)
    asked.add_argument("--save", action="store_true", help=f"note the figures in {RESULTS.name}")
    given = asked.parse_args(words)
    torch.set_num_threads(given.threads)
    run = load_run("demo")
    model = DecoderModel(run.decoder, "fp32")
    initialise(model, run.decoder, 1)
    peer = _peer(run)
    seconds: dict[str, list[float]] = {"kept": [], "whole": [], "transformers": []}
    for _ in range(given.rounds):
        kept, whole = _turns(model, run.data.seq, given.tokens)
        seconds["kept"].append(kept)
        seconds["whole"].append(whole)
        if peer is not None:
            seconds["transformers"].append(_by_peer(peer, given.tokens))
    figures: dict[str, Any] = {"machine": cpu_name(), "tokens": given.tokens, "seconds": seconds}
    pairs = zip(seconds["kept"], seconds["whole"], strict=True)
    figures["kept / whole"] = round(median(one / other for one, other in pairs), 3)
    for name, took in seconds.items():
        if took:
            print(f"{name}: {given.tokens / median(took):.0f} tokens/s")
    print(f"kept / whole: {figures['kept / whole']} of the time, {given.threads} threads")
    if given.save:
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        known[f"{given.threads} threads"] = figures
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    return 0


def _turns(model: DecoderModel, window: int, tokens: int) -> tuple[float, float]:
    """Return the seconds of both ways, which write the same text in turns."""
    ways = [
        _text(follows, window, tokens) for follows in (IncrementalDecoder(model), model.next_logits)
    ]
    seconds, texts = [0.0, 0.0], [list[int](), list[int]()]
    while len(texts[1]) < tokens:
        for number, way in enumerate(ways):
            started = time.perf_counter()
            for _ in range(min(TURN, tokens - len(texts[number]))):
                texts[number] += next(way).values()
            seconds[number] += time.perf_counter() - started
    return round(seconds[0], 3), round(seconds[1], 3)


def _text(follows: NextLogits, window: int, tokens: int) -> Iterator[dict[int, int]]:
    return stream_tokens(follows, [PROMPT], tokens, temperature=0.8, top_p=0.95, window=window)


def _peer(run: Any) -> Any:
    """Return a model of transformers of the same sizes; None where that is not installed."""
    try:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    except ImportError:
        return None
    shape = run.model.shape
    sizes = {
        "vocab_size": run.decoder.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "moe_intermediate_size": shape.expert_width,
        "max_position_embeddings": 4096,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).eval()


def _by_peer(peer: Any, tokens: int) -> float:
    how: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}
    how |= {"max_new_tokens": tokens, "min_new_tokens": tokens, "use_cache": True}
    started = time.perf_counter()
    with torch.no_grad():
        peer.generate(torch.tensor([PROMPT]), pad_token_id=0, **how)
    return round(time.perf_counter() - started, 3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
