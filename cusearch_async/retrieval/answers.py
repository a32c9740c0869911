"""Reads answers of external services, up to a maximum size."""

from __future__ import annotations

import aiohttp

MAX_ANSWER_BYTES = 8 << 20
"""After decompression. A page of search results, or 600 tokens of a simulator, need about 1 % of it."""
_AT_ONCE = 1 << 16


async def read_answer(response: aiohttp.ClientResponse) -> bytes:
    """The decompressed body; the Content-Length header is not trusted.

    Raises: aiohttp.ClientPayloadError after `MAX_ANSWER_BYTES`; the rest is not read."""
    body = bytearray()
    async for chunk in response.content.iter_chunked(_AT_ONCE):
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            response.close()
            raise aiohttp.ClientPayloadError(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)
