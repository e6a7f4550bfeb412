"""``moefold chat``: chat with a model in the terminal.

Reads messages, one per line, and prints the model's answers token by token, in its chat template.
/new starts a new conversation, Ctrl-C stops an answer, Ctrl-D or /exit ends the command.
"""

import argparse
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from moefold.cli._common import print_notes
from moefold.cli._generation import (
    add_options,
    check_options,
    default_tokens,
    first_messages,
    mark_part,
    sampling,
)
from moefold.data.chats.replies import ANSWER
from moefold.data.chats.template_names import parse_values
from moefold.training.formatting import escape_control

if TYPE_CHECKING:
    from moefold.training.text_generator import Reply

NEW = "/new"
EXIT = "/exit"
MAX_TOKENS = 1024


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Answer each input line until the input ends."""
    path = check_options(args)  # fails before torch is loaded

    from moefold.training.text_generator import TextGenerator

    console = Console(highlight=False, soft_wrap=True)
    generator = TextGenerator.open(path, args.uses)
    settings = generator.settings(True, **sampling(args))
    print_notes([*generator.notes, *settings.notes()])
    args.tokens = default_tokens(args, settings, MAX_TOKENS)
    messages = first_messages(args)
    values = parse_values(args.template_value)
    # Fails at once if the folder has no chat template.
    generator.render_chat([*messages, {"role": "user", "content": "?"}], **values)
    while True:
        try:
            line = console.input("[bold]> [/]").strip()
        except EOFError:
            console.print()
            return 0
        if line == EXIT:
            return 0
        if line == NEW:
            messages = first_messages(args)
        elif line:
            messages.append({"role": "user", "content": line})
            reply = generator.stream_reply(messages, args.tokens, values, **sampling(args))
            messages.append(_print_reply(console, reply))


def _print_reply(console: Console, reply: "Reply") -> dict[str, Any]:
    """Print a reply while it is generated; return it as a message, up to Ctrl-C."""
    before: str | None = None
    try:
        for kind, text in reply:
            console.print(Text(mark_part(kind, before), style="dim"), end="")
            style = "" if kind == ANSWER else "dim"
            console.print(Text(escape_control(text), style=style), end="")
            before = kind
    except KeyboardInterrupt:
        console.print(Text(" …", style="dim"), end="")
    console.print()
    return reply.message()
