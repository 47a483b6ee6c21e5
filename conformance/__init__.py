"""Black-box tools to judge any ACP agent. Imports neither `acp_server` nor `agent_core`."""
