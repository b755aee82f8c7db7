"""Client libraries, unmodified, each as a program of its own against the running cluster, all of them at once.

Their greedy answers are those of a quiet cluster: what runs beside them changes nothing.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from ..asking import ask, events, raw_body
from ..client_environments import foreign_environment, programs_of
from ..cluster import MODEL, Cluster
from ..golden import make_prompt

FLOWS = Path(__file__).parents[1] / "client_flows"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
DEADLINE_S = 300.0
pytestmark = pytest.mark.timeout(900)  # Whichever comes first makes the environment of the libraries.

Flows = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def capital(combined: Cluster) -> str:
    """The answer to the question that every program asks, from a quiet cluster."""
    with combined.client() as client:
        return ask(client, messages=FRANCE, max_tokens=24).text


@pytest.fixture(scope="module")
def flows(combined: Cluster, capital: str) -> Iterator[Flows]:
    """Starts every program of ``client_flows``; a call waits for one and returns what it printed."""
    theirs = programs_of("libraries") / "python"
    pythons = {"openai 3": Path(sys.executable), "openai 2": theirs, "langchain": theirs, "llama_index": theirs}
    running: dict[str, subprocess.Popen[str]] = {}
    for name, python in pythons.items():
        program = FLOWS / f"{name.split()[0]}_flows.py"
        running[name] = subprocess.Popen(
            [python, program, f"{combined.url}/v1", MODEL],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=foreign_environment(),
        )

    def found(name: str) -> dict[str, Any]:
        out, errors = running[name].communicate(timeout=DEADLINE_S)
        assert running[name].returncode == 0, errors[-4000:]
        return dict(json.loads(out.splitlines()[-1]))

    try:
        yield found
        combined.wait_idle()
    finally:
        for process in running.values():
            process.kill()
            process.communicate()


@pytest.mark.parametrize("major", [3, 2])
def test_the_official_client(flows: Flows, capital: str, major: int) -> None:
    """Two major versions: sync, async, ``.stream()``, parse, tools, typed errors; an answer that is left is freed."""
    found = flows(f"openai {major}")
    assert found["version"].startswith(f"{major}.")
    assert found["models"] == [MODEL]
    assert {found["whole"], found["streamed"], found["helper"], *found["texts"]} == {capital}
    assert found["usage"] and found["parsed"] and found["completion"]
    assert {"chunk", "content.delta", "content.done"} <= set(found["helper_events"])
    tool = found["tool"]
    assert tool["name"] == "save_person" and tool["reason"] == "tool_calls"
    assert tool["fits"] and tool["same_when_streamed"] and tool["after"] in ("stop", "length")
    assert found["unknown_model"] == "model_not_found"
    assert found["bad_value"] == "temperature"
    assert found["embeddings"] == "unsupported_endpoint"


def test_langchain(flows: Flows, capital: str) -> None:
    """ChatOpenAI: invoke, stream, async, batch, a chain, structured output, tools and their results."""
    found = flows("langchain")
    assert {found["whole"], found["streamed"], found["async"], *found["batch"]} == {capital}
    assert found["chain"] == found["conversation"] != ""
    assert found["usage"] and found["reason"] in ("stop", "length")
    assert found["structured"] and found["tool"] == "save_person" and found["after_tool"]


def test_llama_index(flows: Flows, capital: str) -> None:
    """OpenAILike: chat, stream, async, complete, tools."""
    found = flows("llama_index")
    answers = ("whole", "streamed", "async", "complete", "complete_streamed")
    assert {found[name] for name in answers} == {capital}
    assert found["tool"] == "save_person"


def test_curl_without_a_buffer(combined: Cluster, client: openai.OpenAI) -> None:
    """``curl -N`` shows one event for each token as it comes, and the end."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    prompt = make_prompt(81, 30)
    body = raw_body(prompt=prompt, max_tokens=12, stream=True, ignore_eos=True)
    command = ["curl", "-sSN", "-D", "-", "-H", "content-type: application/json", "-d", "@-"]
    done = subprocess.run(
        [*command, f"{combined.url}/v1/completions"], input=body, capture_output=True, timeout=DEADLINE_S, check=True
    )
    head, _, data = done.stdout.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"text/event-stream" in head.lower()
    *chunks, last = events(data)
    assert last == "[DONE]"
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == ask(client, prompt=prompt, max_tokens=12, ignore_eos=True).text
    combined.wait_idle()
