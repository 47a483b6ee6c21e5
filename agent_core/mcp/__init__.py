"""MCP servers as tools of one agent.

```text
servers.py       which servers there are: plain values
agent_servers.py the servers of one agent: its tools, what is missing, who is waited for
connection.py    one server's life, from its start to its last process
tools.py         a server's tools as ours, and what they answer
client.py        the protocol itself; imports the SDK, so it is loaded aside by loading.py
stdio.py         a server that is a process of ours
```
"""
