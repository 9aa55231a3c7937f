// Writes snapshots by the original's own API, and prints what the same API reads.
import pg from "pg";
import { PostgresCheckpointer, ensureCheckpointsSchema } from "@ziro-agent/checkpoint-postgres";

const [schema, table] = process.argv.slice(2);
const pool = new pg.Pool();
await ensureCheckpointsSchema(pool, { schema, table });

let clock = Date.now();
const checkpointer = new PostgresCheckpointer({ pool, schema, table, now: () => clock });

function snapshot(step) {
  return {
    version: 2,
    __ziro_snapshot__: true,
    agentId: "support",
    createdAt: new Date(1700000000000 + step).toISOString(),
    step,
    messages: [
      { role: "system", content: "Be brief. é \ud83d\ude00" },
      { role: "user", content: [{ type: "text", text: "Refund order 7" }] },
      { role: "assistant", content: [{ type: "tool-call", toolCallId: "c1", toolName: "refund", args: { usd: 12.5 } }] },
    ],
    steps: [],
    totalUsage: { promptTokens: 10 * step, completionTokens: 3 },
    budgetUsage: { usd: 0.000123, tokens: 13, llmCalls: 1, steps: 1, durationMs: 1234.5 },
    pendingApprovals: [{ toolCallId: "c1", toolName: "refund", parsedInput: { usd: 12.5 }, rawArgs: { usd: 12.5 } }],
    resolvedSiblings: [],
  };
}

for (const threadId of ["order é 7", "order-8"]) {
  for (let step = 1; step <= 5; step++) {
    clock += 1;
    await checkpointer.put(threadId, snapshot(step));
  }
}
const written = [];
for (let step = 1; step <= 40; step++) written.push(await checkpointer.put("one millisecond", snapshot(step)));

const threads = [];
for (const threadId of ["order é 7", "order-8"]) {
  const list = await checkpointer.list(threadId);
  const snapshots = {};
  for (const meta of list) snapshots[meta.id] = await checkpointer.get(threadId, meta.id);
  threads.push({ threadId, list, snapshots, newest: await checkpointer.get(threadId) });
}
console.log(JSON.stringify({ threads, written }));
await pool.end();
