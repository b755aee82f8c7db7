"""The proxy's edge: clients cannot switch protections off, and each answer has one request id."""

from __future__ import annotations

from cluster.ingress.edge import EdgeHeaders, clean_request_headers, clean_response_headers


def test_headers_that_switch_protections_off_are_taken_away() -> None:
    """Upper and lower case alike; a forged label too."""
    headers = [
        (b"X-Request-Timeout-Seconds", b"9999"),
        (b"x-request-disconnect-disabled", b"?1"),
        (b"x-kopir-label", b"forged"),
        (b"content-type", b"application/json"),
    ]
    assert clean_request_headers(headers) == [(b"content-type", b"application/json")]


def test_a_clients_request_id_is_only_a_label() -> None:
    """It goes on under another name, so that it never identifies anything."""
    assert clean_request_headers([(b"X-Request-Id", b"job-1")]) == [(b"x-kopir-label", b"job-1")]


def test_the_first_request_id_of_an_answer_stays_alone() -> None:
    """The ingress's own comes first; the proxy's goes."""
    headers = [(b"x-request-id", b"req-1"), (b"a", b"b"), (b"X-Request-ID", b"proxy")]
    assert clean_response_headers(headers) == [(b"x-request-id", b"req-1"), (b"a", b"b")]
    assert clean_response_headers([(b"X-Request-ID", b"proxy")]) == [(b"X-Request-ID", b"proxy")]


async def test_the_middleware_applies_both_and_leaves_other_scopes_alone() -> None:
    """Over ASGI, as the proxy runs it."""
    seen = []
    sent = []

    async def app(scope, receive, send) -> None:
        seen.append(scope)
        if scope["type"] == "http":
            headers = [(b"x-request-id", b"req-1"), (b"x-request-id", b"proxy")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"x"})

    async def send(message) -> None:
        sent.append(message)

    middleware = EdgeHeaders(app)
    await middleware({"type": "http", "headers": [(b"x-request-id", b"mine")]}, None, send)
    await middleware({"type": "lifespan"}, None, send)
    assert seen[0]["headers"] == [(b"x-kopir-label", b"mine")]
    assert seen[1] == {"type": "lifespan"}
    assert sent[0]["headers"] == [(b"x-request-id", b"req-1")]
    assert sent[1]["body"] == b"x"
