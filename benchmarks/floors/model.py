"""No agent: a provider's SDK alone. Prints the milliseconds from each call to its first words."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

SAID: list[Any] = [{"role": "user", "content": "stream 3"}]


async def call(api: str, times: int) -> None:
    """Call the endpoint that the environment names, `times` times, one after the other."""
    async with _client(api) as client:
        for _ in range(times):
            begun = time.perf_counter()
            first = None
            async for event in await _ask(api, client):
                if first is None and _has_words(api, event):
                    first = time.perf_counter()
            assert first is not None
            print((first - begun) * 1000)


def _client(api: str) -> Any:
    if api == "anthropic":
        from anthropic import AsyncAnthropic

        return AsyncAnthropic(max_retries=0)
    from openai import AsyncOpenAI

    return AsyncOpenAI(max_retries=0)


def _ask(api: str, client: Any) -> Any:
    match api:
        case "chat":
            return client.chat.completions.create(model="any", messages=SAID, stream=True)
        case "responses":
            return client.responses.create(model="any", input=SAID, stream=True)
        case _:
            return client.messages.create(model="any", max_tokens=9, messages=SAID, stream=True)


def _has_words(api: str, event: Any) -> bool:
    match api:
        case "chat":
            return bool(event.choices and event.choices[0].delta.content)
        case "responses":
            return event.type == "response.output_text.delta"
        case _:
            return event.type == "content_block_delta"


if __name__ == "__main__":
    asyncio.run(call(sys.argv[1], int(sys.argv[2])))
