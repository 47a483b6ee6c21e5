"""The rules of ACP v1 that our tests name, in our words: who owes what, and how strictly.

Each line: the number, how strict (must, should, may, or `-` where the protocol only implies it),
who owes it (agent, client, both), and what. The client's rules are here because our own clients,
and tests of what we do about a client that breaks them, name them too.

Source: https://agentclientprotocol.com, protocol version 1.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["ACP_RULES", "Rule"]


class Rule(NamedTuple):
    """One rule."""

    id: str
    level: str
    who: str
    says: str


_TABLE: Final = """
001 must both What travels is JSON-RPC 2.0, encoded as UTF-8.
002 must both On stdio a line is a message and a message is a line.
003 must agent Nothing but messages is ever written to stdout, not by children either.
004 may agent Log lines go to stderr, as UTF-8.
005 must client Nothing but messages is written to the agent's stdin.
006 should both Stdio is offered.
007 must both Any other way to connect carries the same messages through the same stages of life.
008 must both An answer has a result or else an error with a number and a text.
009 must both Nobody answers a notification.
010 must both An answer repeats the id of its request, the type included.
011 should both Our own ids are whole numbers or text.
012 must both A line that is no JSON gets a parse error that names no id.
013 must both JSON that is no message is an invalid request.
014 should both A method we lack, or never offered, is not found.
015 should both Params that do not fit are invalid params.
016 must both An error number nobody has heard of is still just a failure.
017 should both Numbers of our own for errors stay out of the ranges that are taken.
018 should agent An error is told in one short sentence; what else there is to say is its data.
019 must both An array of messages is refused as a whole.
020 must both Paths are absolute, and lines are counted from one.
021 must client Initialize comes before any session.
022 must client The version asked for is the newest one known.
023 must agent A version we speak is the one we answer with.
024 must agent A version we do not speak is answered with the one we do.
025 should client A client that does not speak the version it was given says so and leaves.
026 must agent Initialize is answered with the version and what we are capable of.
027 should agent We say who we are.
028 should client The client says who it is.
029 must both A capability that is missing or null is not there.
030 should both Whatever the other side is capable of, we work with it.
031 must agent Sessions can be made, prompted and cancelled, and they report.
032 must agent Text and links to resources are taken in every prompt.
033 may agent Images, audio and embedded resources are taken where we said so.
034 should agent Until initialize has come, every other request is invalid.
035 must both The version that was agreed on holds until the connection ends.
036 must both Nothing of our own stands in the protocol's objects but below `_meta`.
040 must agent A login in a terminal is offered only to a client that runs those.
041 must client A login in a terminal is run by the client, not asked for by a request.
042 should agent The program that the login starts logs in, and ends.
043 - agent After authenticate has succeeded a session can be made.
044 must client Logout is asked for only if it was offered.
045 - agent After a logout, what needed a login needs it again.
046 may agent A session that needs a login first is refused as such.
047 should agent Who cannot log in is never told to.
048 must client Authenticate names a method that was offered.
050 must agent Every new session has an id of its own.
051 must client A session's directory is an absolute path.
052 must agent The session's directory is where relative paths begin, wherever we were started.
053 should agent Tools reach the session's directories and nothing around them.
054 must client Further directories are given only to who offered to take them.
055 - agent Further directories hold for one opening of the session.
056 must agent MCP servers that speak stdio are supported.
057 should agent MCP servers that speak HTTP are supported.
058 must client MCP servers of other kinds are given only to who offered to take them.
059 should agent All MCP servers that were given are connected to.
060 must client A session is loaded only where loading was offered.
061 must agent Loading shows everything that happened in the session.
062 must agent Loading is answered when everything has been shown.
063 must agent Resuming shows nothing of the past.
064 - agent A resumed session is ready when that is answered.
065 must client Resume, close, list and delete are asked for only where they were offered.
066 must agent Closing cancels what runs, and lets go of the session.
067 may agent Closing what is not open is an error.
068 must agent A list in which nothing is, is an empty list.
069 must agent A list for one directory has that directory's sessions only.
070 must client The client reads nothing into a cursor, and stops where there is none.
071 should agent A cursor we never gave is refused.
072 should agent A page of the list has an end.
073 - agent Listing changes nothing.
074 should agent Deleting what is not there succeeds.
075 - agent What was deleted is listed no more.
076 should agent A session that is not open here is not found, and the error names it.
077 must agent A system prompt in a way we did not offer is not guessed at.
080 must client A prompt has only what the agent offered to take.
081 must agent A turn ends with one answer, and one of the five reasons to stop.
082 may agent A turn may end early, and says for which reason.
083 must agent What happens in a turn is reported for the session that was prompted.
084 must agent What was reported of a turn comes before its answer.
085 may agent Chunks of one message have one id, and those of another have another.
086 - both A prompt that was refused takes no part in what follows.
087 may agent Usage says how full the context is, and what the session has cost so far.
088 - agent Updates may come while no turn runs.
090 may client A turn may be cancelled at any time.
091 should client Tool calls that are open at the cancel are shown as cancelled at once.
092 must client Every open permission question is answered as cancelled.
093 should agent A cancel stops models and tools as soon as they can be.
094 must agent A cancelled prompt is answered as cancelled.
095 must agent What goes wrong while a turn is being stopped does not change its answer.
096 must agent Nothing of a cancelled turn is reported after its answer.
097 should client What is reported after the cancel is still taken.
098 - agent A cancel that comes too late does nothing.
099 - agent No tool call of a cancelled turn is left open.
100 - agent A session goes on after a cancel.
105 may both A cancelled request may still come to its end.
106 must agent A cancelled request is answered, with a result or as cancelled.
107 may both With the request, what it had begun is cancelled too.
108 should both A request that was cancelled from within is answered in the same way.
109 - both Cancelling a request that is not open does nothing.
110 - agent With a turn, its own open requests to the client are cancelled.
111 - agent A prompt cancelled as a request may be answered as a cancelled turn.
115 should agent Each tool call of the model is reported.
116 must agent A tool call has an id of its own, and is reported before it changes.
117 should agent A call is pending, then in progress once it runs, then completed or failed.
118 - agent What a tool call shows is replaced as a whole, and stays where it is not mentioned.
119 - agent A diff names an absolute path, and has no old text where the file is new.
120 must agent What was not allowed is not run.
121 may client The client may decide a question by its own settings.
122 - agent A question has at least one answer, and each answer an id of its own.
123 must agent A terminal is shown in its call before it is released.
124 - agent An answer that is not understood is not a yes.
130 must agent Files are asked of the client only as far as it offered that.
131 must agent Terminals are asked of the client only if it offered them.
132 must client A file is made where there is none, and read as the editor has it.
133 must agent Each terminal is released, whatever became of the command.
134 must client Output beyond the limit is cut at its start, between characters.
135 should client What a released terminal showed is still shown.
136 should client What is not there is not found.
140 must agent A plan is reported, and each time all of it.
141 may agent A plan may grow and shrink.
142 may agent The mode that a session is in is one of those it has.
143 - agent The mode may change at any time, and a change that the client did not make is told.
144 must agent Every option has a value from the start.
145 must agent An option that was set is answered with all options as they are now.
146 must agent Options that are on or off are shown only to a client that knows those.
147 must both Nothing depends on an option's category.
148 should agent Options come in the order of their weight, and the mode is the same in both places.
149 - agent An option, value or mode that is not there is refused, and changes nothing.
150 may agent Commands are offered after the session is there, and are called by a prompt.
151 - agent What is told about a session is only what has changed.
155 must agent Nothing is elicited in a way that the client did not offer.
156 should agent Without elicitation, things go on all the same.
157 must agent What is elicited is asked of the person whose session it is.
158 must agent No form asks for a secret.
159 must agent To decline, to cancel and to fail is each an answer.
160 must agent An elicitation by URL has an id of its own, and its end is told to who was asked.
161 must agent A URL carries no secret, and is encrypted where it leads elsewhere.
162 must client Elicitations that are over, or were never offered, are not acted on.
163 should both What was filled in is checked against the form.
164 must agent What a person entered at a URL comes neither through here nor to the model.
170 may both Methods of our own begin with an underscore.
171 must both A request with such a name is answered, too.
172 should both And where nobody knows it, with: not found.
173 should both A notification that nobody knows is ignored.
174 should both Keys of the trace context in `_meta` mean that and nothing else.
175 must agent Notices, compaction, plan operations and subagents go only to clients that know them.
176 must agent A compaction that began ends once, and its id is not used again.
177 must agent Telemetry never writes to stdout.
"""

ACP_RULES: Final = {
    f"ACP-{number}": Rule(f"ACP-{number}", level, who, says)
    for number, level, who, says in (row.split(" ", 3) for row in _TABLE.strip().splitlines())
}
"""Every rule by its id, in order."""
