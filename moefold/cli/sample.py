"""``moefold sample``: generate text with a model.

Continues each --prompt, or with --chat answers it, and prints prompts and texts. Several prompts
are decoded together. Of a run's folder the newest checkpoint is used.
"""

import argparse

from rich.console import Console
from rich.text import Text

from moefold.cli._common import add_json, print_json, print_notes
from moefold.cli._generation import add_options, check_options, first_messages, sampling
from moefold.training.formatting import escape_control


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_options(parser)
    text = "text to continue; repeatable (default: empty)"
    parser.add_argument("--prompt", metavar="TEXT", action="append", help=text)
    text = "treat each prompt as a user's message in the model's chat template"
    parser.add_argument("--chat", action="store_true", help=text)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    if args.system and not args.chat:
        raise ValueError("--system is only for conversations: add --chat")
    path = check_options(args)  # fails before torch is loaded

    from moefold.training.text_generator import TextGenerator

    prompts, generator = args.prompt or [""], TextGenerator.open(path, args.uses)
    if args.chat:
        chats = ([*first_messages(args), {"role": "user", "content": text}] for text in prompts)
        ids = [generator.encode_chat(messages) for messages in chats]
    else:
        ids = [generator.tokenizer.encode_prompt(text) for text in prompts]
    if not all(ids):
        raise ValueError("--prompt must have text: this tokenizer has no token that begins a text")
    continued = generator.generate(ids, args.tokens, chat=args.chat, **sampling(args))
    texts = [(generator.tokenizer.decode(new), len(new)) for new in continued]
    if args.json:
        rows = [
            {"prompt": prompt, "text": text, "tokens": tokens}
            for prompt, (text, tokens) in zip(prompts, texts, strict=True)
        ]
        notes = {"notes": list(generator.notes)}
        print_json({"checkpoint": str(path), "step": generator.step, "samples": rows} | notes)
        return 0
    print_notes(generator.notes)
    console = Console(highlight=False, soft_wrap=True)
    for number, (prompt, (text, _)) in enumerate(zip(prompts, texts, strict=True)):
        if number:
            console.rule(style="dim")
        shown = escape_control(text) if console.is_terminal else text
        console.print(Text.assemble((prompt + "\n" * args.chat, "bold"), shown))
    return 0
