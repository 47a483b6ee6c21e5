"""No agent: the openai SDK alone. Prints the milliseconds from each call to its first chunk."""

from __future__ import annotations

import asyncio
import sys
import time

from openai import AsyncOpenAI


async def call(times: int) -> None:
    """Call the endpoint that the environment names, `times` times, one after the other."""
    async with AsyncOpenAI(max_retries=0) as client:
        for _ in range(times):
            begun = time.perf_counter()
            stream = await client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": "stream 3"}], stream=True
            )
            first = None
            async for chunk in stream:
                if first is None and chunk.choices and chunk.choices[0].delta.content:
                    first = time.perf_counter()
            assert first is not None
            print((first - begun) * 1000)


if __name__ == "__main__":
    asyncio.run(call(int(sys.argv[1])))
