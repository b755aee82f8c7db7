"""Everything of a model folder that turns messages into token ids and token ids into text.

Owns tokenizer, token table, chat template and end-of-sequence ids. Immutable once loaded; the tokenizer itself is
thread-safe. Reads ``tokenizer.json``, ``tokenizer_config.json``, ``chat_template.jinja``, ``generation_config.json``
and ``config.json``; never weights, never the network.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from cluster.ingress.api.chat_template import ChatTemplate
from cluster.ingress.api.control_text import ControlText
from cluster.ingress.api.tool_format import TAGGED, ToolFormat
from cluster.ingress.detokenize import TokenTable
from kvstore.errors import BadInput, EnvironmentProblem

INLINE_ENCODE_CHARS = 4096
"""Longer texts are tokenised on a thread (the tokenizer lets go of the interpreter), so that streams go on."""


class TokenizerBundle:
    """Tokenizer, token table, chat template and end-of-sequence ids of one model."""

    def __init__(
        self, tokenizer: Tokenizer, *, eos_token_ids: Sequence[int] = (), template: ChatTemplate | None = None
    ) -> None:
        # A truncating or padding tokenizer would change prompts behind the client's back.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self.table = TokenTable.from_tokenizer(tokenizer)
        self.control_text = ControlText(tokenizer)
        self.eos_token_ids = tuple(eos_token_ids)

    @classmethod
    def from_folder(cls, folder: Path) -> TokenizerBundle:
        """Loads from a model folder.

        Raises: EnvironmentProblem when a file is missing or cannot be used.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise EnvironmentProblem(f"{folder} has no tokenizer.json")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise EnvironmentProblem(f"{path} cannot be read: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        special = _special_tokens(config)
        source = _template_source(folder, config)
        template = None if source is None else ChatTemplate(source, special)
        return cls(tokenizer, eos_token_ids=_eos_token_ids(folder, tokenizer, special), template=template)

    @property
    def tool_format(self) -> ToolFormat | None:
        """How this model writes tool calls; None when that is not known or its marks are not text."""
        form = TAGGED if self._template is None else self._template.tool_format
        return None if form is None or form.trigger in self.table.special_names else form

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        unix_s: float | None = None,
    ) -> str:
        """Returns the text of a chat prompt; what clients wrote in it holds no control token (see ``control_text``).

        ``unix_s`` is the time that the template sees; None: now.

        Raises: BadInput when there is no template or it refuses the messages.
        """
        if self._template is None:
            raise BadInput("messages", len(messages), "this model has no chat template; use /v1/completions")
        disarm = self.control_text.disarm
        return self._template.render(
            [disarm(dict(message)) for message in messages],
            [disarm(dict(tool)) for tool in tools],
            unix_s=unix_s,
        )

    def encode_now(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Returns the token ids of a text; takes about half a microsecond for each character."""
        if self.control_text.is_guarded(text):
            return self.control_text.encode(text, add_special_tokens=add_special_tokens)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The same without holding up the event loop for long."""
        if len(text) <= INLINE_ENCODE_CHARS and not self.control_text.is_guarded(text):
            return self.encode_now(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode_now, text, add_special_tokens=add_special_tokens)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EnvironmentProblem(f"{path} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Returns the named special tokens, each a text or an object with ``content``."""
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"):
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _eos_token_ids(folder: Path, tokenizer: Tokenizer, special: dict[str, str]) -> tuple[int, ...]:
    """Returns every id that ends an answer: from the generation settings, the model, and the tokenizer."""
    ids: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        ids += value if isinstance(value, list) else [value]
    if (eos_token := special.get("eos_token")) is not None:
        ids.append(tokenizer.token_to_id(eos_token))
    return tuple(dict.fromkeys(token_id for token_id in ids if isinstance(token_id, int)))
