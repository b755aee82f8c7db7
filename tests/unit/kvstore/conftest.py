"""A store node per test, which must leave nothing behind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from store_site import Site


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(tmp_path)
    try:
        yield site
    finally:
        await site.close()
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [], "a slab was left behind"
