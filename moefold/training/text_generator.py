"""Generation with a stored model: continued text, or answers in its chat template."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from moefold.checkpoint.errors import CheckpointError
from moefold.config.plugins import import_plugins
from moefold.convert.importer import import_folder
from moefold.data.answer_end import answer_ends
from moefold.data.conversations import load_chat_template
from moefold.data.tokenizer import Tokenizer, from_path
from moefold.model.decoder import DecoderModel
from moefold.model.families.peft import base_folder, is_hub_folder
from moefold.model.generate import generate, stream_tokens
from moefold.model.incremental import IncrementalDecoder
from moefold.training.distributed import device_kind
from moefold.training.model_checkpoint import StoredModel, fill

TEMPERATURE, TOP_P = 0.8, 0.95
UNFINISHED = "\ufffd"
"""Decoded form of a character whose bytes are incomplete."""


@dataclass(frozen=True)
class TextGenerator:
    """A model with its tokenizer and sampling defaults. No cache is kept across prompts."""

    path: Path
    model: DecoderModel
    tokenizer: Tokenizer
    window: int | None
    """Maximum number of tokens that the model sees, its training length; None: no limit."""
    step: int | None = None
    """Steps that the model was trained for, None for a Hugging Face folder."""
    notes: tuple[str, ...] = ()
    """Notes on what of a Hugging Face folder is not read."""

    @classmethod
    def open(cls, source: str | Path, uses: Sequence[str | Path] = ()) -> "TextGenerator":
        """Load a Hugging Face folder, a checkpoint, or a run's newest checkpoint.

        Raises:
            CheckpointError: if it has no tokenizer.
        """
        path, device, step = Path(source), device_kind(), None
        notes: tuple[str, ...] = ()
        if is_hub_folder(path):
            import_plugins(uses)
            folder = path if (path / "tokenizer.json").is_file() else base_folder(path)
            tokenizer = from_path(str(folder)) if (folder / "tokenizer.json").is_file() else None
            with import_folder(path) as imported:
                model = DecoderModel(imported.decoder, "fp32", device=device)
                fill(model, imported.tensors)
            notes = imported.left_out
            window = imported.decoder.context
        else:
            with StoredModel.open(path, uses) as stored:
                path, tokenizer, meta = stored.path, stored.tokenizer, stored.meta
                model = stored.model(device=device)
            window = (meta.get("run") or {}).get("data", {}).get("seq") or stored.decoder.context
            step = meta.get("progress", {}).get("step")
        if tokenizer is None:
            raise CheckpointError(
                f"{path} has no tokenizer, so it cannot read or write text; import it from a "
                "folder that has one"
            )
        return cls(path, model, tokenizer, window, step, notes)

    def settings(self, chat: bool = False, **overrides: Any) -> dict[str, Any]:
        """Return options of ``generate``: the overrides, else the folder's, else the defaults.

        With ``chat``, the token by which the chat template ends answers ends texts, too.
        """
        stored = self.tokenizer.files.generation_config(self.tokenizer.end_id)
        stored = {name: value for name, value in stored.items() if value is not None}
        options = {"temperature": TEMPERATURE, "top_k": None, "top_p": TOP_P}
        options |= {name: stored[name] for name in options.keys() & stored.keys()}
        if stored.get("do_sample") is False:
            options["temperature"] = 0
        options |= {name: value for name, value in overrides.items() if value is not None}
        vocab = self.tokenizer.size
        stop_ids = {*self.tokenizer.end_ids}
        if chat:
            stop_ids.update(answer_ends(self.tokenizer))
        return options | {"stop_ids": stop_ids, "vocab": vocab, "window": self.window}

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return a conversation as token ids, up to the beginning of the next answer."""
        template = load_chat_template(self.tokenizer, today=datetime.now())
        text = template.render(messages, prompt=True).text
        ((ids_N, _),) = self.tokenizer.encode_chats([text])
        return ids_N.tolist()

    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int, **options: Any
    ) -> list[list[int]]:
        """Return the token ids generated after each prompt, decoded together."""
        return generate(IncrementalDecoder(self.model), prompts, tokens, **self.settings(**options))

    def stream_answer(
        self, messages: Sequence[Mapping[str, Any]], tokens: int, **options: Any
    ) -> Iterator[str]:
        """Yield the next answer of a conversation in pieces of whole characters."""
        ids, shown_text = list[int](), ""
        prompt = [self.encode_chat(messages)]
        decoder, settings = IncrementalDecoder(self.model), self.settings(True, **options)
        for new_tokens in stream_tokens(decoder, prompt, tokens, **settings):
            ids += new_tokens.values()
            text = self.tokenizer.decode(ids)
            if not text.endswith(UNFINISHED):
                yield text[len(shown_text) :]
                shown_text = text
        yield self.tokenizer.decode(ids)[len(shown_text) :]
