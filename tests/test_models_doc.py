"""docs/models.md: every configuration in it is loaded, and talks to the double in its dialect."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import anyio
import dialects
import pytest
from model_rig import a_request, collect
from msgspec import structs

from acp_server.config import Config, ProviderConfig, load_config
from acp_server.models import ModelMaker
from agent_core.content import ReasoningPart, Text, TextPart, ToolCallPart
from agent_core.models.adapter import AssistantTurn, Finish, ToolSpec, ToolTurn, UserTurn
from agent_core.models.providers import PROVIDERS
from conformance.providers.server import Reply, provider_double

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
SECTIONS = re.split(r"^#{2,3} ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
BLOCKS = {
    section.partition("\n")[0]: block[1]
    for section in SECTIONS
    if (block := re.search(r"```toml\n(.*?)```", section, re.DOTALL))
}
HISTORY = (
    UserTurn((Text("look at a"),)),
    AssistantTurn(
        (
            ReasoningPart("hm", "another:model", "sealed"),
            TextPart("I look."),
            ToolCallPart("call_1_1_1", "read", '{"path":"a"}'),
        )
    ),
    ToolTurn("call_1_1_1", "read", "text of a"),
)
TOOL = ToolSpec("read", "Read a file.", {"type": "object", "properties": {}})


def test_each_of_the_known_providers_has_its_block(load: Callable[[str], Config]) -> None:
    used = {load(text).model for text in BLOCKS.values()}
    models = [load(text).models for text in BLOCKS.values()]
    named = used | {each.model for table in models for each in table.values()}

    assert {name.partition(":")[0] for name in named} >= set(PROVIDERS)


@pytest.mark.parametrize("title", BLOCKS)
async def test_a_documented_configuration_works_as_it_stands(
    title: str, load: Callable[[str], Config]
) -> None:
    config = load(BLOCKS[title])
    api = ModelMaker(config).api(config.model)
    with anyio.fail_after(10):
        async with provider_double([Reply(dialects.last_words(api))]) as double:
            there = dialects.base_url(api, double)
            table = config.models.get(config.model)
            provider = (table.model if table else config.model).partition(":")[0]
            settings = structs.replace(
                config.providers.get(provider, ProviderConfig()),
                api=api,
                base_url=there,
                key="k",
                key_command=(),
            )
            config = structs.replace(config, providers={**config.providers, provider: settings})
            model = ModelMaker(config).make(config.model)
            request = a_request(*HISTORY, system="Be brief.", tools=(TOOL,))
            events, error = await collect(model, request)
            await model.aclose()

    assert error is None
    assert events[-1] == Finish("stop")
    assert double.violations == []
    assert "sealed" not in str(double.requests)


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], Config]:
    def load(text: str) -> Config:
        path = tmp_path / "config.toml"
        path.write_text(text, encoding="utf-8")
        return load_config({"config": str(path)}, {})

    return load
