// Writes sessions by the original's own API, and prints what the same API reads.
import { PostgresCheckpointStore } from "@obsku/checkpoint-postgres";

const store = new PostgresCheckpointStore(undefined, { options: `-c search_path=${process.argv[2]}` });

function tagged(value) {
  if (value instanceof Date) return { __type: "Date", value: value.toISOString() };
  if (value instanceof Map) return { __type: "Map", value: [...value].map(([k, v]) => [k, tagged(v)]) };
  if (value instanceof Set) return { __type: "Set", value: [...value].map(tagged) };
  if (Buffer.isBuffer(value)) return { __type: "Buffer", value: value.toString("base64") };
  if (Array.isArray(value)) return value.map(tagged);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, tagged(v)]));
}

async function orError(read) {
  try {
    return await read();
  } catch (error) {
    return { error: String(error.message) };
  }
}

const call = { name: "scan", toolUseId: "call-1", input: { ports: [22, 443], since: new Date(1700000000000) } };
const output = {
  found: new Map([["22", { open: true }], [443, new Set(["tls", "h2"])]]),
  raw: Buffer.from([0, 255, 10]),
  at: new Date("2026-01-31T12:00:00.123Z"),
  text: "é \u2028 \ud83d\ude00 \ud800 \u0000",
  numbers: [0, -1, 1.5, 1e21, 5e-324, 9007199254740991],
  nothing: null,
};

await store.setup();
const full = await store.createSession("./project", {
  title: "Security scan",
  workspaceId: "team",
  metadata: { started: new Date(1700000000001), labels: new Set(["b", "a"]), depth: { a: [1, [2]] } },
});
await store.createSession("", {});
await store.addMessage(full.id, { sessionId: full.id, role: "system", content: "You are careful." });
await store.addMessage(full.id, { sessionId: full.id, role: "user", content: "Scan example.com é", tokensIn: 5 });
await store.addMessage(full.id, { sessionId: full.id, role: "assistant", toolCalls: [call], tokensIn: 9, tokensOut: 0 });
await store.addMessage(full.id, {
  sessionId: full.id,
  role: "tool",
  content: "",
  toolResults: [{ content: "open", toolUseId: "call-1", status: "success", fullOutputRef: "file-1" }],
});
const first = await store.saveCheckpoint({
  sessionId: full.id,
  namespace: "",
  version: 1,
  step: 0,
  nodeResults: { plan: { status: "completed", output, startedAt: 1, completedAt: 2 }, fix: { status: "pending" } },
  pendingNodes: ["scan", "fix"],
  source: "input",
});
await store.saveCheckpoint({
  sessionId: full.id,
  namespace: "",
  version: 2,
  step: 1,
  parentId: first.id,
  nodeId: "scan",
  nodeResults: { scan: { status: "failed", error: "timeout" }, old: { status: "Complete" } },
  pendingNodes: [],
  cycleState: { backEdge: "B->A", iteration: 3 },
  source: "interrupt",
});
await store.saveCheckpoint({
  sessionId: full.id, namespace: "scan", version: 1, step: 0, nodeResults: {}, source: "loop",
});
// A checkpoint belongs to what was written up to its millisecond.
await new Promise((resolve) => setTimeout(resolve, 5));
await store.addMessage(full.id, { sessionId: full.id, role: "user", content: "later" });
const fork = await store.fork(first.id, {});

const poisoned = await store.createSession("./poisoned", { title: "poisoned" });
await store.addMessage(poisoned.id, { sessionId: poisoned.id, role: "user", content: "before" });
await orError(() =>
  store.addMessage(poisoned.id, { sessionId: poisoned.id, role: "assistant", toolCalls: [{ name: "x" }] }),
);
await store.saveEntity({ sessionId: full.id, name: "example.com", type: "host", attributes: {}, relationships: [] });
await store.saveFact({ content: "port 22 is open", confidence: 0.5, sourceSessionId: full.id });

const sessions = [];
for (const session of await store.listSessions()) {
  sessions.push({
    session,
    messages: await orError(() => store.getMessages(session.id)),
    checkpoints: await orError(() => store.listCheckpoints(session.id)),
  });
}
console.log(JSON.stringify(tagged({ sessions, fork: fork.id, poisoned: poisoned.id })));
await store.close();
