"""Generation with a stored model: continued text, or answers in its chat template."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from moefold.checkpoint.errors import CheckpointError
from moefold.config.plugins import import_plugins
from moefold.convert.importer import import_folder
from moefold.data.chats.answer_end import answer_ends
from moefold.data.chats.conversations import chat_template
from moefold.data.chats.renderer import Renderer
from moefold.data.chats.replies import Piece, ReplyForm
from moefold.data.chats.template_names import check_values, template_variables
from moefold.data.config import DataError
from moefold.data.corpora.records import BadDocument
from moefold.data.tokenizer import Tokenizer, from_path
from moefold.model.decoder import DecoderModel
from moefold.model.families.peft import base_folder, is_hub_folder
from moefold.model.generate import generate, stream_tokens
from moefold.model.incremental import IncrementalDecoder
from moefold.training.distributed import device_kind
from moefold.training.generation_settings import Settings, generation_settings
from moefold.training.model_checkpoint import StoredModel, fill

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
        path = Path(source)
        device = device_kind()
        step = None
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
                path = stored.path
                tokenizer = stored.tokenizer
                meta = stored.meta
                model = stored.model(device=device)
            window = (meta.get("run") or {}).get("data", {}).get("seq") or stored.decoder.context
            step = meta.get("progress", {}).get("step")
        if tokenizer is None:
            raise CheckpointError(
                f"{path} has no tokenizer, so it cannot read or write text; import it from a "
                "folder that has one"
            )
        return cls(path, model, tokenizer, window, step, notes)

    def settings(self, chat: bool = False, **overrides: Any) -> Settings:
        """Return how text is generated: by the overrides, else the folder's settings.

        With ``chat``, the token by which the chat template ends answers ends texts, too.

        Raises:
            DataError: if the folder's settings are malformed.
        """
        stored = self.tokenizer.files.generation_config(self.tokenizer.end_id)
        stop_ids = {*self.tokenizer.end_ids}
        if chat:
            stop_ids.update(answer_ends(self.tokenizer))
        settings = generation_settings(stored, overrides, stop_ids)
        fixed = {"stop_ids": stop_ids, "vocab": self.tokenizer.size, "window": self.window}
        return settings._replace(options=settings.options | fixed)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
        """Return a conversation as text, up to the beginning of the next answer.

        ``values`` are variables of the template, besides those of all training conversations.

        Raises:
            DataError: if the template does not read one of the values, or fails.
        """
        template = chat_template(self.tokenizer, today=datetime.now())
        given = self.tokenizer.files.template_values() | values
        try:
            check_values(values, template_variables(template.text), "--template-value")
            with Renderer(template) as renderer:
                return renderer.text_of(messages, options=given, prompt=True)
        except BadDocument as error:
            raise DataError(f"{self.path}: {': '.join(error.args)}") from error

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> list[int]:
        """Return the token ids of :meth:`render_chat`."""
        ((ids_N, _),) = self.tokenizer.encode_chats([self.render_chat(messages, **values)])
        return ids_N.tolist()

    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int, **options: Any
    ) -> list[list[int]]:
        """Return the token ids generated after each prompt, decoded together.

        ``options`` are those of :meth:`settings`.
        """
        settings = self.settings(**options)
        return generate(IncrementalDecoder(self.model), prompts, tokens, **settings.options)

    def reply_form(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> ReplyForm:
        """Return how replies to a conversation are divided into reasoning and answer."""
        template = self.tokenizer.files.chat_template() or ""
        prompt = self.render_chat(messages, **values)
        return ReplyForm(template, prompt, self.tokenizer.special_texts)

    def stream_reply(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokens: int,
        values: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> "Reply":
        """Return the next reply of a conversation, which is generated as it is iterated over."""
        form = self.reply_form(messages, **(values or {}))
        prompt = [self.encode_chat(messages, **(values or {}))]
        settings = self.settings(True, **options)
        new = stream_tokens(IncrementalDecoder(self.model), prompt, tokens, **settings.options)
        return Reply(self.tokenizer, form, (i for each in new for i in each.values()))


class Reply:
    """A reply while it is generated: iterate over it for its parts in pieces, then ask for more."""

    def __init__(self, tokenizer: Tokenizer, form: ReplyForm, new_ids: Iterator[int]) -> None:
        self._tokenizer = tokenizer
        self._form = form
        self._new_ids = new_ids
        self._ids = list[int]()

    def __iter__(self) -> Iterator[Piece]:
        """Yield pieces of whole characters; neighbours of one kind belong together."""
        shown = list[int]()  # characters of each part
        for new in self._new_ids:
            self._ids.append(new)
            text = self._text()
            if not text.endswith(UNFINISHED):
                yield from self._unshown(self._form.split(text, ended=False), shown)
        yield from self._unshown(self._form.split(self._text()), shown)

    def _text(self) -> str:
        return self._tokenizer.decode(self._ids, special=self._form.has_parts)

    def _unshown(self, pieces: Sequence[Piece], shown: list[int]) -> Iterator[Piece]:
        shown.extend([0] * (len(pieces) - len(shown)))
        for n, (kind, text) in enumerate(pieces):
            if len(text) > shown[n]:
                yield Piece(kind, text[shown[n] :])
                shown[n] = len(text)

    def message(self) -> dict[str, Any]:
        """Return the reply so far as a message of the conversation."""
        return self._form.message(self._text())
