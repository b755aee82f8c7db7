"""Chat templates run in a sandbox, with the names that published templates use."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from cluster.ingress.api.chat_template import ChatTemplate
from cluster.ingress.api.tokenizer import TokenizerBundle
from kvstore.errors import BadInput, EnvironmentProblem

USER = {"role": "user", "content": "hi"}


def test_names_of_published_templates() -> None:
    """Special tokens, tojson, loop control, strftime_now, add_generation_prompt."""
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}"
        "{% endfor %}{{ strftime_now('%Y-%m-%d') }}{% if add_generation_prompt %}>{% endif %}",
        {"bos_token": "<s>"},
        now=lambda: datetime(2026, 1, 2),
    )
    assert template.render([USER, USER]) == '<s>{"role": "user", "content": "hi"}2026-01-02>'


def test_refusal_of_a_template_is_bad_input() -> None:
    """What the template says reaches the client, under the field messages."""
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(BadInput, match="roles must alternate") as caught:
        template.render([USER])
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    ["{{ messages.__class__.__mro__ }}", "{{ ''.__class__.__base__.__subclasses__() }}", "{{ messages.append(1) }}"],
)
def test_sandbox_keeps_a_template_inside(source: str) -> None:
    """A template from a model folder reaches neither Python's inside nor the caller's messages."""
    messages = [dict(USER)]
    try:
        text = ChatTemplate(source, {}).render(messages)
    except BadInput:
        text = ""
    assert "class" not in text
    assert messages == [USER]


def test_template_that_does_not_compile_stops_the_start() -> None:
    """Told at start, not at the first request."""
    with pytest.raises(EnvironmentProblem, match="does not compile"):
        ChatTemplate("{% for %}", {})


def test_folder_without_tokenizer_is_one_clear_line(tmp_path: Path) -> None:
    """Names the folder and the file."""
    with pytest.raises(EnvironmentProblem, match=r"tokenizer\.json"):
        TokenizerBundle.from_folder(tmp_path)


@pytest.mark.model
def test_packaged_template_renders_as_transformers_does(model_folder: Path) -> None:
    """Our sandbox and transformers give the same text, with and without a system message."""
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(str(model_folder))
    bundle = TokenizerBundle.from_folder(model_folder)
    system = {"role": "system", "content": "Be brief."}
    for messages in ([USER], [system, USER], [system, USER, {"role": "assistant", "content": "yes"}, USER]):
        expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert bundle.render(messages) == expected
    assert reference.eos_token_id in bundle.eos_token_ids
