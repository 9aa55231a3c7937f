// The released clients of both protocols, driven by lines of JSON: {"do": …} in, {"messages": …} out.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const [, , modules, kind, base, owner, tenant, thread] = process.argv;
const require = createRequire(`${modules}/`);
const load = (name) => import(pathToFileURL(require.resolve(name)).href);

const headers = { "X-Owner": owner, "X-Tenant": tenant };

// Lets a response through up to a number of reads, and then breaks off the connection.
let cutAfter = null;
let lastStatus = null;
// The ids of the events of the response, and how many of them the client has applied for certain.
let ids = [];
let begun = 0;
let applied = 0;
const lastEventId = () => ids.slice(0, applied).findLast((id) => id !== null) ?? null;
async function cuttingFetch(url, init) {
  const abort = new AbortController();
  const response = await fetch(url, { ...init, headers: { ...init?.headers, ...headers }, signal: abort.signal });
  lastStatus = response.status;
  if (!response.ok || !response.body) return response;
  const limit = cutAfter;
  cutAfter = null;
  ids = [];
  begun = applied = 0;
  let reads = 0;
  let text = "";
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  const body = new ReadableStream({
    async pull(controller) {
      if (limit !== null && reads++ >= limit) {
        abort.abort();
        controller.error(new TypeError("network error: cut by the test"));
        return;
      }
      try {
        const { done, value } = await reader.read();
        if (done) return controller.close();
        text += decoder.decode(value, { stream: true });
        const events = text.split("\n\n");
        text = events.pop();
        for (const event of events.filter((each) => each.includes("data: "))) {
          const id = event.split("\n").find((line) => line.startsWith("id:"));
          ids.push(id === undefined ? null : id.slice(3).trim());
        }
        controller.enqueue(new TextEncoder().encode(events.map((event) => `${event}\n\n`).join("")));
      } catch (error) {
        controller.error(new TypeError(`network error: ${error.message}`));
      }
    },
    cancel() {
      abort.abort();
    },
  });
  return new Response(body, { status: response.status, headers: response.headers });
}

async function aguiClient() {
  const { HttpAgent } = await load("@ag-ui/client");
  class Agent extends HttpAgent {
    how = "POST";
    requestInit(input) {
      const init = super.requestInit(input);
      if (this.how === "POST") return init;
      const own = this.how === "LAST" && this.after ? { "Last-Event-ID": this.after } : {};
      return { method: "GET", headers: { ...init.headers, ...own }, signal: init.signal };
    }
  }
  const agent = new Agent({ url: `${base}agui/`, threadId: thread, fetch: cuttingFetch });
  let outcome = null;
  async function run(how, parameters) {
    agent.how = how;
    agent.after = lastEventId() ?? agent.after;
    agent.url = how === "POST" ? `${base}agui/` : `${base}agui/${encodeURIComponent(thread)}/`;
    outcome = { kind: "cut" };
    try {
      await agent.runAgent(parameters, {
        // The events before this one are applied.
        onEvent: () => {
          applied = begun;
          begun += 1;
        },
        onMessagesChanged: () => {
          applied = begun;
        },
        onRunFinishedEvent: ({ outcome: kind, interrupts, pendingToolCallIds }) => {
          outcome = { kind, interrupts, pendingToolCallIds };
        },
        onRunErrorEvent: ({ event }) => {
          outcome = { kind: "error", message: event.message };
        },
        onRunFailed: ({ error }) => {
          outcome = { kind: "cut", message: error.message };
          return { stopPropagation: true };
        },
      });
    } catch (error) {
      outcome = { kind: "broken", message: error.message };
    }
    return outcome;
  }
  return {
    say: ({ id, text }) => {
      agent.addMessage({ id, role: "user", content: text });
      return run("POST");
    },
    again: () => run("POST"),
    come_back: () => run("GET"),
    go_on: () => run("LAST"),
    reload: async () => {
      agent.after = null;
      ids = [];
      agent.setMessages([]);
      agent.setState({});
      return run("GET");
    },
    answer: async ({ approved, digest, id }) => {
      const resume = [{ interruptId: id, status: "resolved", payload: { approved, digest } }];
      return run("POST", { resume });
    },
    tool: async ({ id, call, content }) => {
      agent.addMessage({ id, role: "tool", toolCallId: call, content });
      return run("POST");
    },
    held: async () => ({ messages: agent.messages, state: agent.state }),
  };
}

async function aiClient() {
  const { AbstractChat, DefaultChatTransport } = await load("ai");
  class State {
    status = "ready";
    error = undefined;
    messages = [];
    pushMessage = (message) => {
      this.messages = [...this.messages, message];
    };
    popMessage = () => {
      this.messages = this.messages.slice(0, -1);
    };
    replaceMessage = (index, message) => {
      this.messages = [
        ...this.messages.slice(0, index),
        structuredClone(message),
        ...this.messages.slice(index + 1),
      ];
    };
    snapshot = (value) => structuredClone(value);
  }
  class Chat extends AbstractChat {}
  let finish = null;
  const chat = new Chat({
    id: thread,
    state: new State(),
    transport: new DefaultChatTransport({ api: `${base}ai/`, fetch: cuttingFetch }),
    onError: () => {},
    onFinish: ({ isAbort, isDisconnect, isError, finishReason }) => {
      finish = { isAbort, isDisconnect, isError, finishReason };
    },
  });
  const settled = async (promise) => {
    finish = null;
    await promise;
    if (chat.status === "error") {
      return { kind: finish?.isDisconnect ? "cut" : "error", message: chat.error?.message };
    }
    return { kind: "success", ...finish };
  };
  const reload = async () => {
    try {
      const response = await fetch(`${base}threads/${encodeURIComponent(thread)}/?format=ai`, { headers });
      if (response.ok) chat.messages = (await response.json()).messages;
      return { kind: response.status };
    } catch (error) {
      // The server was killed after it had said that nothing runs.
      return { kind: "cut", message: error.message };
    }
  };
  return {
    say: ({ id, text }) => settled(chat.sendMessage({ id, role: "user", parts: [{ type: "text", text }] })),
    edit: ({ id, text }) => settled(chat.sendMessage({ text, messageId: id })),
    regenerate: () => settled(chat.regenerate()),
    // Sends the messages as the client holds them, of which the last one may be an answer.
    send: () => settled(chat.sendMessage()),
    again: () => settled(chat.regenerate()),
    come_back: async () => {
      lastStatus = null;
      const outcome = await settled(chat.resumeStream());
      // Nothing runs: then a page loads the thread.
      return lastStatus === 204 ? reload() : outcome;
    },
    reload,
    answer: async ({ approved, id }) => {
      await chat.addToolApprovalResponse({ id, approved });
      return settled(chat.sendMessage());
    },
    tool: async ({ call, tool, content }) => {
      await chat.addToolOutput({ tool, toolCallId: call, output: content });
      return settled(chat.sendMessage());
    },
    held: async () => ({ messages: chat.messages }),
  };
}

// The clients leave rejections of aborted requests unhandled.
process.on("unhandledRejection", () => {});
process.on("uncaughtException", () => {});

const client = await (kind === "agui" ? aguiClient() : aiClient());
console.error = () => {};
console.warn = () => {};
process.stdout.write(`${JSON.stringify({ ready: true })}\n`);
for await (const line of createInterface({ input: process.stdin })) {
  const { do: name, cut = null, ...rest } = JSON.parse(line);
  cutAfter = cut;
  lastStatus = null;
  let answer;
  try {
    const outcome = await client[name](rest);
    answer = { outcome, arrived: lastStatus === 200, ...(await client.held()) };
  } catch (error) {
    answer = { failure: String(error.stack ?? error) };
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
