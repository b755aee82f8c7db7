"""F62: nothing that a client sends takes anything down, and every refusal is one JSON error that names the field."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from ..asking import ask, raw_body
from ..cluster import MODEL, Cluster
from ..golden import Golden, make_prompt

DEEP = '{"model":"' + MODEL + '","prompt":' + "[" * 2000 + "1" + "]" * 2000 + "}"
VALID = {"model": MODEL, "prompt": "hi", "max_tokens": 1}

COMPLETIONS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "empty prompt": ("prompt", {"prompt": ""}),
    "empty token array": ("prompt", {"prompt": []}),
    "empty inner array": ("prompt", {"prompt": [[]]}),
    "negative id": ("prompt", {"prompt": [-1]}),
    "id beyond the vocabulary": ("prompt", {"prompt": [5, 49152]}),
    "huge id": ("prompt", {"prompt": [10**18]}),
    "id beyond 64 bits": ("prompt", {"prompt": [10**30]}),
    "prompt beyond the context": ("prompt", {"prompt": [1000] * 1024}),
    "two prompts": ("prompt", {"prompt": ["a", "b"]}),
    "max_tokens 0": ("max_tokens", {"max_tokens": 0}),
    "max_tokens -1": ("max_tokens", {"max_tokens": -1}),
    "max_tokens 10^9": ("max_tokens", {"max_tokens": 10**9}),
    "max_tokens text": ("max_tokens", {"max_tokens": "many"}),
    "n 0": ("n", {"n": 0}),
    "n 17": ("n", {"n": 17}),
    "temperature -1": ("temperature", {"temperature": -1}),
    "temperature text": ("temperature", {"temperature": "hot"}),
    "empty stop": ("stop", {"stop": [""]}),
    "1,000 stops": ("stop", {"stop": [f"stop {index}" for index in range(1000)]}),
    "bias beyond the vocabulary": ("logit_bias", {"logit_bias": {"49152": 5}}),
    "bias of no id": ("logit_bias", {"logit_bias": {"x": 5}}),
    "stop id beyond the vocabulary": ("stop_token_ids", {"stop_token_ids": [49152]}),
    "unknown field": ("no_such_field", {"no_such_field": 1}),
    "echo": ("echo", {"echo": True}),
    "suffix": ("suffix", {"suffix": "x"}),
}
CHATS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "no messages": ("messages", {"messages": []}),
    "messages of a wrong type": ("messages", {"messages": "hi"}),
    "unknown role": (None, {"messages": [{"role": "wizard", "content": "hi"}]}),
    "tools": ("tools", {"messages": [{"role": "user", "content": "hi"}], "tools": []}),
    "images": (None, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
}
RAW: dict[str, bytes] = {
    "no JSON": b"hello",
    "nothing": b"",
    "half a JSON": b'{"model": "',
    "not an object": b"[1, 2]",
    "NaN": json.dumps({**VALID, "temperature": float("nan")}).encode(),
    "infinity": json.dumps({**VALID, "temperature": float("inf")}).encode(),
    "invalid UTF-8": b'{"model": "\xff\xfe", "prompt": "hi"}',
    "lone surrogate": b'{"model": "' + MODEL.encode() + b'", "prompt": "\\ud800", "max_tokens": 0}',
    "2,000 levels": DEEP.encode(),
}


@pytest.fixture(scope="module", autouse=True)
def same_processes(pair: Cluster) -> Any:
    """Every process is the same one after all of it, and everything is at rest."""
    before = pair.pids()
    yield
    assert pair.pids() == before
    pair.wait_idle()


@pytest.fixture(autouse=True)
def still_right(client: openai.OpenAI, golden: Golden) -> Any:
    """A valid request is answered right after each bad one."""
    yield
    prompt = make_prompt(62, 20)
    assert ask(client, prompt=prompt, max_tokens=2).text == golden.run(prompt, 2).text


def check_refusal(answer: Any, *, param: str | None, statuses: tuple[int, ...] = (400,)) -> None:
    """Asserts an error in OpenAI's shape, named by ``param``."""
    assert answer.status_code in statuses, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["message"]
    assert answer.headers["x-request-id"].startswith("req-")
    if param is not None:
        assert error["param"] is not None and error["param"].split("[")[0].split(".")[0] == param, error
        assert param in error["message"]


@pytest.mark.parametrize("name", COMPLETIONS)
def test_bad_completion_is_refused_by_field(pair: Cluster, name: str) -> None:
    """A 400 that names the field, streamed or not."""
    param, change = COMPLETIONS[name]
    for stream in (False, True):
        body = raw_body(**{**VALID, **change, "stream": stream})
        check_refusal(pair.http.post("/v1/completions", content=body), param=param)


@pytest.mark.parametrize("name", CHATS)
def test_bad_chat_is_refused_by_field(pair: Cluster, name: str) -> None:
    """The same for chats."""
    param, change = CHATS[name]
    check_refusal(pair.http.post("/v1/chat/completions", content=raw_body(max_tokens=1, **change)), param=param)


@pytest.mark.parametrize("name", RAW)
def test_bad_body_is_refused(pair: Cluster, name: str) -> None:
    """Bodies that are no request at all."""
    check_refusal(pair.http.post("/v1/completions", content=RAW[name]), param=None)


def test_body_beyond_the_limit_is_refused(pair: Cluster) -> None:
    """10 MiB: 413."""
    body = raw_body(prompt="x" * (10 << 20))
    pair.large_body_bytes += len(body)
    check_refusal(pair.http.post("/v1/completions", content=body), param=None, statuses=(413,))


def test_what_is_not_there_is_404(pair: Cluster) -> None:
    """Models, requests and paths that do not exist."""
    check_refusal(
        pair.http.post("/v1/completions", content=raw_body(**{**VALID, "model": "gpt-9"})),
        param="model",
        statuses=(404,),
    )
    for path in ("/v1/models/gpt-9", "/v1/requests/req-0", "/v1/nothing"):
        check_refusal(pair.http.get(path), param=None, statuses=(404,))
