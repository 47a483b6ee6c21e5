"""Mutants that break the handshake and the login."""

from __future__ import annotations

from typing import Final

from conformance.selftest.mutants.mutant import Mutant, mutant

__all__ = ["MUTANTS"]

MUTANTS: Final[tuple[Mutant, ...]] = (
    mutant(
        "silent-initialize",
        "It never answers initialize.",
        "initialize",
        (
            "methods",
            '            if request.method == "session/prompt":\n',
            '            if request.method == "initialize":\n                return None\n'
            '            if request.method == "session/prompt":\n',
        ),
    ),
    mutant(
        "echoes-version",
        "It agrees to every version.",
        "initialize version",
        ("methods", '"protocolVersion": PROTOCOL_VERSION', '"protocolVersion": version'),
    ),
    mutant(
        "string-version",
        "The version in its answer is a string.",
        "initialize version schema",
        ("methods", '"protocolVersion": PROTOCOL_VERSION', '"protocolVersion": "1"'),
    ),
    mutant(
        "refuses-versions",
        "It answers a version that it does not speak with an error.",
        "initialize version",
        (
            "methods",
            '        capabilities = params.get("clientCapabilities")\n',
            "        if version != PROTOCOL_VERSION:\n"
            '            raise RpcError(INVALID_REQUEST, "only version 1 is spoken here")\n'
            '        capabilities = params.get("clientCapabilities")\n',
        ),
    ),
    mutant(
        "takes-any-version",
        "It takes a version that is no number.",
        "initialize version errors",
        ("methods", "type(version) is not int or not 0 <= version <= 65535", "version is None"),
    ),
    mutant(
        "boolean-markers",
        "It offers session features by true rather than by an object.",
        "initialize capabilities schema",
        ("methods", "{feature: {} for feature", "{feature: True for feature"),
    ),
    mutant(
        "object-for-boolean",
        "It offers session/load by an object rather than by true.",
        "initialize capabilities schema",
        ("methods", '"loadSession": True', '"loadSession": {}'),
    ),
    mutant(
        "unknown-capability",
        "It has a capability of its own among those of the protocol.",
        "initialize capabilities extensions",
        ("methods", '"loadSession": True', '"loadSession": True, "hasTools": True'),
    ),
    mutant(
        "nameless",
        "It does not say what it is.",
        "initialize agent-info",
        ("methods", '            "agentInfo": AGENT_INFO,\n', ""),
    ),
    mutant(
        "needs-capabilities",
        "It fails if the client does not say what it can do.",
        "initialize capabilities",
        (
            "methods",
            'capabilities = params.get("clientCapabilities")\n',
            'capabilities = dict(params["clientCapabilities"])\n',
        ),
    ),
    mutant(
        "serves-before-initialize",
        "It serves requests before initialize.",
        "initialize order",
        ("methods", "elif not self._is_initialized:", "elif self._sessions is None:"),
    ),
    mutant(
        "terminal-login-uninvited",
        "It offers a login in a terminal to clients that have none for it.",
        "initialize auth",
        (
            "methods",
            '"authMethods": [AUTH_METHOD]',
            '"authMethods": [AUTH_METHOD, {"id": "t", "name": "T", "type": "terminal"}]',
        ),
    ),
    mutant(
        "login-twice-in-list",
        "Two of its ways to log in have the same id.",
        "initialize auth",
        ("methods", '"authMethods": [AUTH_METHOD]', '"authMethods": [AUTH_METHOD, AUTH_METHOD]'),
    ),
    mutant(
        "takes-any-login",
        "It takes a way to log in that it did not offer.",
        "auth errors",
        ("methods", 'if checks.string(params, "methodId") != AUTH_METHOD["id"]:', "if not params:"),
    ),
    mutant(
        "login-in-vain",
        "After a login it still asks for one.",
        "INI-17 auth",
        ("methods", "        self._is_authenticated = True\n", ""),
        flags="--auth",
    ),
    mutant(
        "logout-in-vain",
        "After a logout it still opens sessions.",
        "INI-24 auth logout",
        ("methods", "        self._is_authenticated = not self._has_auth\n", ""),
        flags="--auth",
    ),
    mutant(
        "login-without-a-way",
        "It asks for a login and offers no way to.",
        "auth",
        ("methods", '"authMethods": [AUTH_METHOD]', '"authMethods": []'),
        flags="--auth",
    ),
    mutant(
        "refuses-the-next-version",
        "It answers a client of version 2 with an error.",
        "INI-03 initialize version",
        (
            "methods",
            '        capabilities = params.get("clientCapabilities")\n',
            '        if version == 2:\n            raise checks.invalid("protocolVersion", "is too new")\n'
            '        capabilities = params.get("clientCapabilities")\n',
        ),
    ),
    mutant(
        "refuses-later-capabilities",
        "It fails if the client can do what it does not know.",
        "INI-07 initialize capabilities",
        (
            "methods",
            "        self._is_initialized = True\n",
            '        known = {"fs", "terminal", "elicitation", "session", "auth", "_meta"}\n'
            "        if set(self._capabilities) - known:\n"
            '            raise checks.invalid("clientCapabilities", "are unknown")\n'
            "        self._is_initialized = True\n",
        ),
    ),
    mutant(
        "logout-fails",
        "It offers a logout and answers it with an error.",
        "INI-18 auth logout",
        (
            "methods",
            "        self._is_authenticated = not self._has_auth\n        return {}\n",
            '        raise RpcError(INTERNAL_ERROR, "nobody can leave")\n',
        ),
        flags="--auth",
    ),
)
