"""What ``moefold sample`` does."""

import argparse
import json
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from moefold.checkpoint.errors import CheckpointError
from moefold.layers.cache import KeyValueCache
from moefold.model.decoder import DecoderModel
from moefold.model.generate import generate
from moefold.training.model_checkpoint import StoredModel
from moefold.training.words import harmless


def sample(args: argparse.Namespace) -> int:
    """Carry out the command; return its exit status."""
    with StoredModel.open(args.checkpoint, args.uses) as stored:
        tokenizer = stored.tokenizer
        if tokenizer is None:
            raise CheckpointError(
                f"{stored.path} holds no tokenizer, so text means nothing to it; import it from a "
                "folder that has one"
            )
        run = stored.meta.get("run") or {}
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = DecoderModel(stored.decoder, stored.precision, device=device)
        stored.fill(model)
    prompts = args.prompt or [""]
    ids = [tokenizer.prompt(text) for text in prompts]
    if not all(ids):
        raise ValueError("--prompt: give some text; this tokenizer has no token that starts one")
    continued = generate(
        partial(model.next_logits, cache=KeyValueCache.of(stored.decoder)),
        ids,
        args.tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        end=tokenizer.end_id,
        vocab=tokenizer.size,
        # Longer texts than it was trained on are new to the model.
        window=run.get("data", {}).get("seq") or stored.decoder.context,
    )
    texts = [tokenizer.decode(new) for new in continued]
    if args.json:
        print(json.dumps(_facts(stored, prompts, texts, continued), indent=2))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        if number:
            console.rule(style="dim")
        shown = harmless(text) if console.is_terminal else text
        console.print(Text.assemble((prompt, "bold"), shown))
    return 0


def _facts(
    stored: StoredModel, prompts: list[str], texts: list[str], ids: list[list[int]]
) -> dict[str, Any]:
    rows = [
        {"prompt": prompt, "text": text, "tokens": len(new)}
        for prompt, text, new in zip(prompts, texts, ids, strict=True)
    ]
    step = stored.meta.get("progress", {}).get("step")
    return {"checkpoint": str(stored.path), "step": step, "samples": rows}
