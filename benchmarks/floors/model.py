"""No agent: a provider's SDK alone. Prints the milliseconds from each call to its first words."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

SAID: list[Any] = [{"role": "user", "content": "stream 3"}]


async def chat() -> AsyncIterator[bool | None]:
    """Yield whether each event of Chat Completions holds words; `None` before each call."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(max_retries=0) as client:
        while True:
            yield None
            stream = await client.chat.completions.create(model="any", messages=SAID, stream=True)
            async for chunk in stream:
                yield bool(chunk.choices[0].delta.content)


async def responses() -> AsyncIterator[bool | None]:
    """The same with the Responses API."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(max_retries=0) as client:
        while True:
            yield None
            async for event in await client.responses.create(model="any", input=SAID, stream=True):
                yield event.type == "response.output_text.delta"


async def anthropic() -> AsyncIterator[bool | None]:
    """The same with the Messages API."""
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(max_retries=0) as client:
        while True:
            yield None
            stream = await client.messages.create(
                model="any", max_tokens=9, messages=SAID, stream=True
            )
            async for event in stream:
                yield event.type == "content_block_delta"


async def call(api: str, times: int) -> None:
    """Call the endpoint that the environment names, `times` times, one after the other."""
    begun: float | None = None
    async for words in {"chat": chat, "responses": responses, "anthropic": anthropic}[api]():
        if words is None:
            if times == 0:
                return
            times, begun = times - 1, time.perf_counter()
        elif words and begun is not None:
            print((time.perf_counter() - begun) * 1000)
            begun = None


if __name__ == "__main__":
    asyncio.run(call(sys.argv[1], int(sys.argv[2])))
