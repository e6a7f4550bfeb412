"""``moefold chat``: chat with a model in the terminal.

Reads messages, one per line, and prints the model's answers token by token, in its chat template.
/new starts a new conversation, Ctrl-C stops an answer, Ctrl-D or /exit ends the command.
"""

import argparse
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from moefold.cli._common import print_notes
from moefold.cli._generation import add_options, check_options, first_messages, sampling
from moefold.training.formatting import escape_control

if TYPE_CHECKING:
    from moefold.training.text_generator import TextGenerator

NEW, EXIT = "/new", "/exit"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_options(parser)
    parser.set_defaults(tokens=1024)


def run(args: argparse.Namespace) -> int:
    """Answer each input line until the input ends."""
    path = check_options(args)  # fails before torch is loaded

    from moefold.training.text_generator import TextGenerator

    console = Console(highlight=False, soft_wrap=True)
    generator = TextGenerator.open(path, args.uses)
    print_notes(generator.notes)
    messages = first_messages(args)
    # Fails at once if the folder has no chat template.
    generator.encode_chat([*messages, {"role": "user", "content": "?"}])
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
            answer = _answer(console, generator, messages, args)
            messages.append({"role": "assistant", "content": answer})


def _answer(
    console: Console,
    generator: "TextGenerator",
    messages: list[dict[str, str]],
    args: argparse.Namespace,
) -> str:
    """Print an answer while it is generated; return it, up to Ctrl-C."""
    text = ""
    try:
        for piece in generator.stream_answer(messages, args.tokens, **sampling(args)):
            text += piece
            console.print(Text(escape_control(piece)), end="")
    except KeyboardInterrupt:
        console.print(Text(" …", style="dim"), end="")
    console.print()
    return text
