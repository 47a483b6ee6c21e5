// An agent on the official TypeScript SDK: the first word of a prompt says what it does.
// Argument: the directory of the package.

import { Readable, Writable } from "node:stream";
import { pathToFileURL } from "node:url";

const sdk = await import(pathToFileURL(`${process.argv[2]}/dist/v1/stable/acp.js`).href);
const { agent, methods, ndJsonStream } = sdk;
const forever = new Promise(() => {});
let cancel;
const cancelled = new Promise((resolve) => {
  cancel = resolve;
});

const options = [
  { optionId: "go", name: "Allow", kind: "allow_once" },
  { optionId: "no", name: "Reject", kind: "reject_once" },
];

async function prompt({ params, client }) {
  const update = (fields) =>
    client.notify(methods.client.session.update, { sessionId: params.sessionId, update: fields });
  const say = (text) =>
    update({ sessionUpdate: "agent_message_chunk", content: { type: "text", text } });
  const [what, ...rest] = params.prompt[0].text.split(" ");
  if (what === "say") {
    await say(rest.join(" "));
  } else if (what === "ask") {
    const toolCallId = "c";
    const call = { toolCallId, title: "Delete it", kind: "delete", status: "pending" };
    await update({ sessionUpdate: "tool_call", ...call });
    const { outcome } = await client.request(methods.client.session.requestPermission, {
      sessionId: params.sessionId,
      toolCall: { toolCallId },
      options,
    });
    await say(outcome.optionId ?? outcome.outcome);
  } else if (what === "die") {
    await say("dying");
    process.exit(3);
  } else {
    await say("waiting");
    await cancelled;
    if (what === "ignore") await forever;
    return { stopReason: "cancelled" };
  }
  return { stopReason: "end_turn" };
}

agent({ name: "foreigner" })
  .onRequest(methods.agent.initialize, () => ({ protocolVersion: 1, agentCapabilities: {} }))
  .onRequest(methods.agent.session.new, () => ({ sessionId: "theirs" }))
  .onRequest(methods.agent.session.prompt, prompt)
  .onNotification(methods.agent.session.cancel, () => cancel())
  .connect(ndJsonStream(Writable.toWeb(process.stdout), Readable.toWeb(process.stdin)));
