"""A real Chromium without a window, for tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Page, async_playwright

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
DEADLINE_MS = 20_000


@asynccontextmanager
async def chromium_page(*, url: str) -> AsyncIterator[Page]:
    """Yields a page that shows ``url``; afterwards asserts that nothing was asked of another server and nothing failed.

    Skips the test where no Chromium is installed.
    """
    program = next((found for name in PROGRAMS if (found := shutil.which(name)) is not None), None)
    if program is None:
        pytest.skip(f"none of {', '.join(PROGRAMS)} is installed (Debian: apt install chromium): no page was looked at")
    complaints: list[str] = []
    asked: list[str] = []
    async with async_playwright() as playwright:
        # The tests run as root in containers, where Chromium's own sandbox cannot start.
        browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            page = await browser.new_page()
            page.set_default_timeout(DEADLINE_MS)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("request", lambda request: asked.append(request.url))
            await page.goto(url)
            yield page
        finally:
            await browser.close()
    assert not complaints, complaints
    assert asked and all(each.startswith(url) for each in asked), asked
