"""``moefold sample``: text from a checkpoint.

Continues prompts with the model of a checkpoint, or of a run's newest one.
"""

import argparse
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from moefold.checkpoint.errors import CheckpointError
from moefold.checkpoint.folder import checkpoint_in
from moefold.cli._common import add_json, add_plugins, print_json
from moefold.training.words import harmless


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint or a run's folder")
    text = "text to go on from; repeatable (default: none)"
    parser.add_argument("--prompt", metavar="TEXT", action="append", help=text)
    parser.add_argument("--tokens", metavar="N", type=int, default=128, help="new tokens at most")
    text = "0 takes the likeliest"
    parser.add_argument("--temperature", metavar="T", type=float, default=0.8, help=text)
    text = "probability drawn from"
    parser.add_argument("--top-p", metavar="P", type=float, default=0.95, help=text)
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="same seed, same text")
    add_plugins(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Carry out the command; return its exit status."""
    if args.tokens < 1:
        raise ValueError(f"--tokens {args.tokens}: at least 1")
    if args.temperature < 0:
        raise ValueError(f"--temperature {args.temperature}: 0 (the likeliest token) or more")
    if not 0 < args.top_p <= 1:
        raise ValueError(f"--top-p {args.top_p}: above 0, and at most 1 (every token)")
    path = checkpoint_in(Path(args.checkpoint))  # before torch is loaded: there may be none
    prompts = args.prompt or [""]
    step, texts = _sample(args, path, prompts)
    if args.json:
        rows = [
            {"prompt": prompt, "text": text, "tokens": tokens}
            for prompt, (text, tokens) in zip(prompts, texts, strict=True)
        ]
        print_json({"checkpoint": str(path), "step": step, "samples": rows})
        return 0
    console = Console(highlight=False, soft_wrap=True)
    for number, (prompt, (text, _)) in enumerate(zip(prompts, texts, strict=True)):
        if number:
            console.rule(style="dim")
        shown = harmless(text) if console.is_terminal else text
        console.print(Text.assemble((prompt, "bold"), shown))
    return 0


def _sample(
    args: argparse.Namespace, path: Path, prompts: list[str]
) -> tuple[int | None, list[tuple[str, int]]]:
    """Return the checkpoint's step, and each prompt's new text and number of tokens."""
    from moefold.layers.cache import KeyValueCache
    from moefold.model.generate import generate
    from moefold.training.distributed import device_kind
    from moefold.training.model_checkpoint import StoredModel

    with StoredModel.open(path, args.uses) as stored:
        tokenizer = stored.tokenizer
        if tokenizer is None:
            raise CheckpointError(
                f"{stored.path} holds no tokenizer, so text means nothing to it; import it from a "
                "folder that has one"
            )
        model = stored.model(device=device_kind())
    ids = [tokenizer.prompt(text) for text in prompts]
    if not all(ids):
        raise ValueError("--prompt: give some text; this tokenizer has no token that starts one")
    run = stored.meta.get("run") or {}
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
    texts = [(tokenizer.decode(new), len(new)) for new in continued]
    return stored.meta.get("progress", {}).get("step"), texts
