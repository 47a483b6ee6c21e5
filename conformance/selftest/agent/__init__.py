"""A sound ACP agent of version 1, to judge a judge by; also an example of how one is made.

`methods` is what a client may call, `session` a session and its turns, `tools` its tool calls.
`words` says what the prompts mean, or `model` asks an endpoint. `loop` and `rpc` are what all
stands on. It uses nothing but the standard library.
"""
