"""The status page in a real browser without a window: what people see, from this server alone."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Page, expect
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cluster.ingress.api.status_page import status_page_routes
from cluster.ingress.api.tenants import OPEN_PATHS
from tests.browser import chromium_page

from .conftest import World, serve_app

FACTS: dict[str, Any] = {
    "workers": [
        {"id": "prefill-0", "role": "prefill", "state": "ready", "pid": 11, "node": "node-0", "pool_blocks": 512,
         "used_blocks": 128, "quarantined_blocks": 3, "running": 2, "waiting": 1},
        {"id": "decode-0", "role": "decode", "state": "lost", "pid": 12, "node": "node-0", "pool_blocks": 1024,
         "used_blocks": None, "quarantined_blocks": None, "running": None, "waiting": None},
    ],
    "store": [{"node": "node-0", "tiers": [{"name": "host", "blocks": 700, "used_blocks": 77, "bytes": 1 << 30}]}],
    "streams": [{"request_id": "req-live", "phase": "decoding", "attempt": 1, "epoch": 1,
                 "delivered_output_tokens": 37}],
    "interruptions": [{"request_id": "req-broken", "reason": "worker_exited", "delivered_output_tokens": 5,
                       "message": "<img src=x onerror=document.title='run'>", "age_s": 130.0}],
    "promises": {"transport_failures": 4, "missed_deadlines": 3, "invariant_breaches": 2, "capacity_refusals": 1},
    "tokens": {"generated_tokens": 900, "delivered_tokens": 850, "discarded_tokens": 50},
    "leases": 2,
}  # fmt: skip


class Site:
    """The page's own files and some facts. Anything else that is asked for is a 404."""

    def __init__(self) -> None:
        self.url = ""
        self.facts: dict[str, Any] = copy.deepcopy(FACTS)
        self.key: str | None = None
        self.status = 200

    async def answer(self, request: Request) -> Response:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "no"}}, status_code=401)
        return JSONResponse(self.facts, status_code=self.status)


@pytest_asyncio.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    app = Starlette(routes=[*status_page_routes(), Route("/internal/status", site.answer)])
    async with serve_app(app) as site.url:
        yield site


def row(page: Page, table: str, number: int = 0) -> Any:
    return page.locator(f"#{table} tbody tr").nth(number).locator("td")


async def test_people_see_workers_streams_and_what_broke(site: Site) -> None:
    """Every figure stands in its column; what a message says is shown, not run."""
    async with chromium_page(url=site.url) as page:
        await expect(page.locator("#note")).to_have_text("1 of 2 workers ready, 2 leases")
        cells = ["prefill-0", "prefill", "ready", "128 of 512", "3", "2", "1", "11", "node-0"]
        await expect(row(page, "workers")).to_have_text(cells)
        await expect(page.locator("#workers td.lost")).to_have_text("lost")
        await expect(row(page, "store")).to_have_text(["node-0", "host", "77 of 700", "1024"])
        await expect(row(page, "streams")).to_have_text(["req-live", "decoding", "1", "1", "37"])
        told = FACTS["interruptions"][0]["message"]
        await expect(row(page, "interruptions")).to_have_text(["2 min", "req-broken", "worker_exited", "5", told])
        await expect(page.locator("#promises dd")).to_have_text(["4", "3", "2", "1"])
        await expect(page.locator("#promises dt").first).to_have_text("transport failures")
        await expect(page.locator("#tokens dd")).to_have_text(["900", "850", "50"])
        assert await page.locator("img").count() == 0 and await page.title() == "Kopir"


async def test_it_follows_what_happens_and_says_when_it_cannot(site: Site) -> None:
    """New facts come by themselves; a server that fails or goes away is named, and the old facts are marked as old."""
    async with chromium_page(url=site.url) as page:
        await expect(row(page, "streams").nth(4)).to_have_text("37")
        site.facts["streams"] = []
        site.facts["workers"][1]["state"] = "ready"
        await expect(page.locator("#streams")).to_have_text("nothing runs")
        await expect(page.locator("#note")).to_have_text("2 of 2 workers ready, 2 leases")
        site.status = 503
        await expect(page.locator("#note")).to_have_text("this server answers 503")
        await expect(page.locator("body")).to_have_class("stale")
        await expect(row(page, "workers").first).to_have_text("prefill-0")
        site.status = 200
        await expect(page.locator("body")).not_to_have_class("stale")


async def test_a_key_is_asked_for_where_one_is_needed(site: Site) -> None:
    """Without one nothing is shown; it is kept for this tab only, and nowhere in the page."""
    site.key = "kopir-right"
    async with chromium_page(url=site.url) as page:
        await expect(page.locator("#note")).to_have_text("an API key is needed")
        assert await page.locator("#workers").inner_text() == ""
        await page.fill("#key-text", "kopir-wrong")
        await page.click("#key button")
        await expect(page.locator("#note")).to_have_text("this key is not let in")
        await page.fill("#key-text", site.key)
        await page.click("#key button")
        await expect(row(page, "streams").first).to_have_text("req-live")
        await expect(page.locator("#key")).to_be_hidden()
        assert site.key not in await page.content()
        assert await page.evaluate("localStorage.length") == 0


@pytest.mark.parametrize("path", ["/", "/status.js"])
async def test_the_page_comes_with_the_server_and_loads_nothing_from_elsewhere(world: World, path: str) -> None:
    """No address of another host in its files, and a policy that would stop the browser from asking one."""
    answer = await world.http.get(path)
    assert answer.status_code == 200 and path in OPEN_PATHS
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "//" not in answer.text.replace("// ", "")
    assert (await world.http.head(path)).status_code == 200
