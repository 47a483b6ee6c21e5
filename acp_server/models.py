"""The configured models: from names and tables to adapters."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, Final

from msgspec import structs

from acp_server.config import TRACE_SECRETS, Config, ConfigError, ProviderConfig, table_name
from acp_server.stored_keys import stored_key
from agent_core.models.adapter import ModelAdapter, ModelInfo
from agent_core.models.catalog import known
from agent_core.models.choice import Models
from agent_core.models.endpoint import Endpoint
from agent_core.models.endpoint_model import EndpointModel
from agent_core.models.keys import Key
from agent_core.models.providers import PROVIDERS, Api, dialect_for, is_openai, library_for
from agent_core.models.rehearsal import RehearsalModel
from agent_core.models.retry import RetryingModel
from agent_core.models.sdk import Library

__all__ = ["ModelMaker", "hide_variables", "library_of", "make_models", "model_problem"]

# The SDKs read these by themselves too, and nothing of ours needs them.
_FURTHER_SECRETS: Final = (
    "ACP_AGENT_TOKEN",
    "OPENAI_ADMIN_KEY",
    "OPENAI_WEBHOOK_SECRET",
    *TRACE_SECRETS,  # what the collector of traces is shown
)

_PR_SET_DUMPABLE: Final = 4  # of prctl(2)


def make_models(config: Config) -> Models:
    """Return the models that a session may choose from, the configured one first.

    Raises:
        ConfigError: The configured model, or its rehearsal script, cannot be used.
    """
    maker = ModelMaker(config)
    names = dict.fromkeys((config.model, *config.models))
    default, *others = (maker.make(name) for name in names)
    return Models(default, *others, find=maker.find)


def model_problem(config: Config, name: str | None = None) -> str | None:
    """Return what is missing for a model, by default the configured one, in words, or `None`."""
    name = name or config.model
    if name == "rehearsal":
        return None
    provider, maker = config.target(name).provider, ModelMaker(config)
    key = maker.key(provider)
    if key.is_given or not maker.needs_key(provider):
        return None
    return f"The model {name} needs a key: {key.advice}."


def library_of(config: Config) -> Library | None:
    """Return the library that the configured model needs, `None` if it needs none."""
    if config.model == "rehearsal":
        return None
    return library_for(ModelMaker(config).api(config.model))


def hide_variables(config: Config, environ: MutableMapping[str, str] = os.environ) -> None:
    """Take what providers are shown out of the environment, once the configuration is read.

    So no command that an agent runs sees it, and no SDK picks it up for the endpoint of another
    provider: from here on, only the configuration says what goes where.
    """
    names = {*_FURTHER_SECRETS, *(each.key_variable for each in config.providers.values())}
    names |= {each.token_variable for each in config.subagents.values()}
    for provider in PROVIDERS.values():
        names |= {provider.key_variable, provider.token_variable, *provider.header_variables}
    found = [environ.pop(str(name), None) for name in names - {None}]
    if any(found) and environ is os.environ:
        _close_environment()


def _close_environment() -> None:
    """Let nothing of this user read the environment this process was started with.

    What is taken out of it stays in ``/proc``, where a command could look it up. Not for root, who
    may read everything.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)


class ModelMaker:
    """Makes adapters by name; those of one provider share its connections.

    Args:
        config: The configuration.
        max_attempts: Calls that a request may take.
    """

    def __init__(self, config: Config, *, max_attempts: int = 5) -> None:
        self._config = config
        self._max_attempts = max_attempts
        self._endpoints: dict[tuple[str, Library], Endpoint] = {}

    def find(self, name: str) -> ModelAdapter | None:
        """Return an adapter for any name that the configuration makes sense of, or `None`."""
        try:
            return self.make(name)
        except ConfigError:
            return None

    def make(self, name: str) -> ModelAdapter:
        """Return an adapter for a name of ``[models]``, for ``provider:id`` or ``rehearsal``.

        Raises:
            ConfigError: There is no such model, or its rehearsal script cannot be used.
        """
        if name == "rehearsal":
            return RetryingModel(self._rehearsal())
        provider, id, settings = self._config.target(name)
        info, api = self.info(name), self.api(name)
        endpoint = self._endpoint(provider, library_for(api))
        dialect = dialect_for(api, info, id, endpoint.base_url)
        model = EndpointModel(
            info,
            id=id,
            endpoint=endpoint,
            dialect=dialect,
            sampling=settings.sampling,
            max_output_tokens=settings.max_output_tokens,
        )
        return RetryingModel(model, max_attempts=self._max_attempts)

    def info(self, name: str) -> ModelInfo:
        """Return what is known of a model: what the configuration says, else the catalog.

        Raises:
            ConfigError: There is no such model.
        """
        _, id, settings = self._config.target(name)
        facts, given = structs.asdict(known(id)), structs.asdict(settings)
        fields: dict[str, Any] = {
            field: facts.get(field) if given.get(field) is None else given[field]
            for field in ModelInfo.__struct_fields__
        }
        if fields["effort"] not in fields["efforts"]:
            fields["effort"] = None  # the catalog's is none of those that the configuration leaves
        return ModelInfo(**fields | {"name": name})

    def api(self, name: str) -> Api:
        """Return what is spoken with a model.

        Raises:
            ConfigError: There is no such model.
        """
        provider, id, settings = self._config.target(name)
        chosen = settings.api or self._config.provider(provider).api
        if chosen is not None:
            return chosen
        if is_openai(self.base_url(provider)):
            return "responses" if known(id).wants_responses else "chat"
        return PROVIDERS[provider].api if provider in PROVIDERS else "chat"

    def base_url(self, provider: str) -> str:
        """Return where a provider is, without a slash at the end."""
        given = self._config.provider(provider).base_url
        return (given or PROVIDERS[provider].base_url).rstrip("/")

    def needs_key(self, provider: str) -> bool:
        """Say whether nothing can be done without a key: the provider is where it is known.

        It is shown none if it is shown a header instead.
        """
        settings = self._config.provider(provider)
        if _has_header(settings):
            return False
        if settings.key_variable is not None:
            return True
        at_home = provider in PROVIDERS and self.base_url(provider) == PROVIDERS[provider].base_url
        return at_home and PROVIDERS[provider].needs_key

    def key(self, provider: str) -> Key:
        """Return the provider's key, and how to change it."""
        settings, own = self._config.provider(provider), PROVIDERS.get(provider)
        variable = settings.key_variable or (own and own.key_variable)
        by_variable = f"set {variable}, or " if variable else "set "
        table = table_name("providers", provider)
        advice = f"{by_variable}key under [{table}] in {self._config.file}"
        if settings.key is None and settings.key_command is None:
            advice += f", or run `acp-agent login {shlex.quote(provider)}`"
        return Key(
            settings.key,
            command=settings.key_command or (),
            look_up=lambda: None if _has_header(settings) else stored_key(provider),
            advice=advice,
        )

    def _endpoint(self, provider: str, library: Library) -> Endpoint:
        endpoint = self._endpoints.get((provider, library))
        if endpoint is None:
            endpoint = self._endpoints[provider, library] = Endpoint(
                provider,
                library=library,
                base_url=self.base_url(provider),
                key=self.key(provider),
                needs_key=self.needs_key(provider),
                headers=self._config.provider(provider).headers,
                idle_limit_s=self._config.idle_limit_s,
            )
        return endpoint

    def _rehearsal(self) -> RehearsalModel:
        script = self._config.rehearsal_script
        try:
            return RehearsalModel(script=None if script is None else Path(script))
        except (OSError, ValueError) as exc:
            raise ConfigError(f"The rehearsal script cannot be used: {exc}") from None


def _has_header(settings: ProviderConfig) -> bool:
    """Say whether a provider is shown a header instead of a key."""
    return any(name.lower() in ("authorization", "x-api-key") for name in settings.headers)
