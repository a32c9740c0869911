"""Answers of services that others run, read up to a bound."""

from __future__ import annotations

import aiohttp

MAX_ANSWER_BYTES = 8 << 20
"""Decompressed. A page of search results, or 600 tokens of a simulator, take a hundredth of it."""
_AT_ONCE = 1 << 16


async def read_answer(response: aiohttp.ClientResponse) -> bytes:
    """The body, however it is compressed and whatever length it claims.

    Raises: aiohttp.ClientPayloadError for more than `MAX_ANSWER_BYTES`, of which no more is read."""
    body = bytearray()
    async for chunk in response.content.iter_chunked(_AT_ONCE):
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            response.close()
            raise aiohttp.ClientPayloadError(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)
