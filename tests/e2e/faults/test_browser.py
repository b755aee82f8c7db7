"""The status page of a running cluster in a real browser: a stream, its death, and what is counted of it."""

from __future__ import annotations

import asyncio
import os
import signal

from playwright.async_api import expect

from tests.browser import chromium_page

from ..asking import events, raw_body
from ..cluster import Cluster
from ..golden import make_prompt
from .test_kills import wait_replaced, workers_of


async def test_the_page_shows_a_stream_and_then_its_interruption(whole: Cluster) -> None:
    """Live with its phase; broken with its reason; counted as a transport failure and as nothing else."""
    async with chromium_page(url=f"{whole.url}/") as page:
        await expect(page.locator("#note")).to_contain_text("3 of 3 workers ready")
        before = [int(text) for text in await page.locator("#promises dd").all_inner_texts()]
        body = raw_body(prompt=make_prompt(140, 30), max_tokens=1500, ignore_eos=True, stream=True)
        with whole.http.stream("POST", "/v1/completions", content=body) as answer:
            chunks = answer.iter_raw()
            data = next(chunks)
            request_id = answer.headers["x-request-id"]
            stream = page.locator("#streams tbody tr", has_text=request_id)
            await expect(stream.locator("td").nth(1)).to_have_text("delivering")
            dead = workers_of(whole, request_id)["decode"]
            os.kill(dead["pid"], signal.SIGKILL)
            data += b"".join(chunks)
        error = events(data)[-1]["error"]
        broken = page.locator("#interruptions tbody tr", has_text=request_id).locator("td")
        await expect(broken.nth(2)).to_have_text("worker_exited")
        await expect(broken.nth(3)).to_have_text(str(error["delivered_output_tokens"]))
        await expect(stream).to_have_count(0)
        after = [str(count + (index == 0)) for index, count in enumerate(before)]
        await expect(page.locator("#promises dd")).to_have_text(after)
        await asyncio.to_thread(wait_replaced, whole, dead)
        await expect(page.locator("#note")).to_contain_text("3 of 3 workers ready")
