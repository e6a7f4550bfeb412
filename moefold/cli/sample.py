"""``moefold sample``: generate text with a model.

Continues each --prompt, or with --chat answers it, and prints prompts and texts. Several prompts
are decoded together. Of a run's folder the newest checkpoint is used.
"""

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from moefold.cli._common import add_json, print_json, print_notes
from moefold.cli._generation import (
    add_options,
    check_options,
    default_tokens,
    first_messages,
    mark_part,
    sampling,
)
from moefold.data.chats.replies import ANSWER, Piece, ReplyForm
from moefold.data.chats.template_names import parse_values
from moefold.training.formatting import escape_control

MAX_TOKENS = 128


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
    if args.template_value and not args.chat:
        raise ValueError("--template-value is only for conversations: add --chat")
    path = check_options(args)  # fails before torch is loaded

    from moefold.training.text_generator import TextGenerator

    prompts = args.prompt or [""]
    generator = TextGenerator.open(path, args.uses)
    values = parse_values(args.template_value)
    forms = list[ReplyForm]()
    if args.chat:
        chats = [[*first_messages(args), {"role": "user", "content": text}] for text in prompts]
        ids = [generator.encode_chat(messages, **values) for messages in chats]
        forms = [generator.reply_form(messages, **values) for messages in chats]
    else:
        ids = [generator.tokenizer.encode_prompt(text) for text in prompts]
    if not all(ids):
        raise ValueError("--prompt must have text: this tokenizer has no token that begins a text")
    settings = generator.settings(args.chat, **sampling(args))
    notes = [*generator.notes, *settings.notes()]
    tokens = default_tokens(args, settings, MAX_TOKENS)
    continued = generator.generate(ids, tokens, chat=args.chat, **sampling(args))
    decode = generator.tokenizer.decode
    texts = [decode(new) for new in continued]
    parts: list[list[Piece]] = [[] for _ in prompts]
    for number, form in enumerate(forms):  # none without --chat
        if form.has_parts:
            parts[number] = form.split(decode(continued[number], special=True))
    if args.json:
        rows = []
        for prompt, text, new, pieces in zip(prompts, texts, continued, parts, strict=True):
            row = {"prompt": prompt, "text": text, "tokens": len(new)}
            rows.append(row | ({"parts": [p._asdict() for p in pieces]} if pieces else {}))
        about = {"checkpoint": str(path), "step": generator.step}
        print_json(about | {"samples": rows, "notes": notes})
        return 0
    print_notes(notes)
    console = Console(highlight=False, soft_wrap=True)
    for number, (prompt, text, pieces) in enumerate(zip(prompts, texts, parts, strict=True)):
        if number:
            console.rule(style="dim")
        console.print(Text.assemble((prompt + "\n" * args.chat, "bold")), end="")
        _print_parts(console, pieces or [Piece(ANSWER, text)])
    return 0


def _print_parts(console: Console, pieces: Sequence[Piece]) -> None:
    """Print the parts of a text, reasoning with a mark before it."""
    before: str | None = None
    for kind, text in pieces:
        shown = escape_control(text) if console.is_terminal else text
        console.print(Text(mark_part(kind, before), style="dim"), end="")
        console.print(Text(shown, style="" if kind == ANSWER else "dim"), end="")
        before = kind
    console.print()
