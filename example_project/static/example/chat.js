// The page of one thread. Its events (AG-UI) bring the words that the guide says now. Everything else is read from the
// stored thread: after each step, after each click, and every few seconds while somebody looks at the page.
const [log, compose, stop] = ["messages", "compose", "stop"].map((id) => document.getElementById(id));
const { api, server, raise, usedUp } = log.dataset;
const { text, csrfmiddlewaretoken: token } = compose.elements;
const titles = { user: "You", assistant: "Guide" };
const refusals = {
  404: { words: "This chat does not exist, or it belongs to another visitor." },
  501: { words: "Only an ASGI server sends words one by one. This command starts one:", command: server },
};
let { thread } = log.dataset;
let stored = { status: "unknown", messages: [], waiting: [], calls: [] };
let said = []; // The messages of the step that is not stored yet.
let draft = {}; // A message keeps its id until it is stored, so that it is not stored twice.
let [source, problem, looks] = [null, null, 0];
const newId = () => crypto.getRandomValues(new Uint32Array(4)).join("-"); // randomUUID needs HTTPS or localhost
const address = (path) => `${api}threads/${thread}/${path}`;
const request = (...given) => fetch(...given).catch(() => null);
const act = async (method, url, body) => {
  const headers = { "Content-Type": "application/json", "X-CSRFToken": token.value };
  const response = await request(url, { method, headers, body: body && JSON.stringify(body) });
  if (response?.ok) problem = void response.body?.cancel();
  else if (response?.status === 501) problem = refusals[501];
  else problem = { words: response ? (await response.json()).message : "The server did not answer. Try again." };
  await look();
  if (response?.ok && !source) follow(); // It may have ended already: the events say why.
  return Boolean(response?.ok);
};
const buttons = { "Try again": () => act("POST", `${api}ai/`, { id: thread, messages: [], trigger: "regenerate-message" }) };
const look = async () => {
  const number = ++looks;
  const response = await request(address(""));
  const found = response?.ok ? await response.json() : stored;
  if (number === looks) stored = found; // If it is not, a later look was quicker.
  if (stored.status === "running" && !source && !problem?.command) follow();
  show();
};

const follow = () => {
  source = new EventSource(`${api}agui/${thread}/`);
  source.onmessage = ({ data }) => take(JSON.parse(data));
  source.onerror = async ({ target: { readyState, url } }) => {
    problem = { words: "The connection was lost. The page connects again." };
    show();
    if (readyState !== EventSource.CLOSED) return;
    const response = await request(url); // An EventSource does not say why it was refused.
    source = void response?.body?.cancel();
    problem = refusals[response?.status] ?? problem;
    show();
  };
};

const take = ({ type, messageId: id, delta, ...event }) => {
  const message = said.find((each) => each.id === id);
  if (type === "RUN_STARTED") problem = null;
  if (type === "TEXT_MESSAGE_START" && !message) said.push({ id, role: "assistant", content: "" });
  if (type === "TEXT_MESSAGE_CONTENT") message.content += delta;
  if (type === "MESSAGES_SNAPSHOT") {
    said = [];
    stored.messages = event.messages.filter((each) => stored.waiting.every((post) => post.id !== each.id));
  }
  if (type === "RUN_ERROR") problem = { words: event.message, buttons };
  if (event.code === "budget_exceeded") Object.assign(problem, { words: usedUp, raise });
  if (type === "RUN_FINISHED" || type === "RUN_ERROR") source = void source.close();
  if (["MESSAGES_SNAPSHOT", "STEP_FINISHED", "RUN_FINISHED", "RUN_ERROR"].includes(type)) look();
  show();
};

const listed = (json) => Object.entries(JSON.parse(json)).map((pair) => pair.join(": ")).join("\n");
const entryOf = ({ id: key, function: { name: title, arguments: input } }) => {
  const result = stored.messages.find((message) => message.toolCallId === key)?.content;
  const asked = stored.calls.find((call) => call.id === key);
  const decide = (approved) => () => act("POST", address(`calls/${key}/`), { approved, digest: asked.digest });
  if (!asked) return { key, role: "tool", title, words: listed(result ?? input) };
  return { key, role: "asked", title, words: listed(input), buttons: { Approve: decide(true), Refuse: decide(false) } };
};
const entries = () => {
  const fresh = said.filter(({ id }) => stored.messages.every((message) => message.id !== id));
  const list = [...stored.messages, ...fresh].flatMap(({ id: key, role, content, toolCalls = [] }) => [
    ...(role in titles && content ? [{ key, role, title: titles[role], words: content }] : []),
    ...toolCalls.map(entryOf),
  ]);
  const isOpen = list.length > 0 && list.at(-1).role !== "assistant";
  const stopped = stored.status === "idle" && isOpen && { words: "The guide has stopped.", buttons };
  if (stored.status === "running" && isOpen) list.push({ role: "assistant", title: titles.assistant, words: "" });
  for (const { id: key, content: words } of stored.waiting) {
    const withdraw = () => act("DELETE", address(`posts/${key}/`));
    list.push({ key, role: "user waiting", title: titles.user, words, buttons: { Withdraw: withdraw } });
  }
  return problem || stopped ? [...list, { role: "problem", ...(problem || stopped) }] : list;
};
const made = (name, properties) => Object.assign(document.createElement(name), properties);
const itemOf = ({ key = "", role, title = "", words, command, raise: link, buttons = {} }) => {
  const item = made("li", { id: key, className: role });
  item.append(made("span", { className: "title", textContent: title }));
  item.append(made("span", { className: "text", textContent: words }));
  if (command) item.append(made("code", { textContent: command }));
  if (link) item.append(made("a", { textContent: "Raise the limit", href: `${link}?next=${location.pathname}` }));
  item.append(...Object.entries(buttons).map(([textContent, onclick]) => made("button", { textContent, onclick })));
  return item;
};

const show = () => {
  const isAtEnd = window.innerHeight + window.scrollY >= document.body.scrollHeight - 60;
  const items = entries().map(itemOf);
  items.forEach((item, index) => {
    // What has not changed is not touched, so that a click on it is not lost.
    const old = log.children[index] ?? log.appendChild(item);
    if (!old.isEqualNode(item)) old.replaceWith(item);
  });
  while (log.children.length > items.length) log.lastChild.remove();
  stop.hidden = stored.status !== "running";
  document.body.classList.toggle("begun", Boolean(thread));
  if (isAtEnd) window.scrollTo(0, document.body.scrollHeight);
};

const send = async (content) => {
  thread ||= newId();
  if (!location.pathname.includes(thread)) history.replaceState(null, "", `${location.pathname}${thread}/`);
  if (draft.content !== content) draft = { id: newId(), role: "user", content };
  if (await act("POST", `${api}agui/`, { threadId: thread, runId: newId(), messages: [draft] })) draft = {}; else return;
  if (text.value.trim() === content) text.value = "";
};
compose.onsubmit = (event) => {
  event.preventDefault();
  if (text.value.trim()) send(text.value.trim());
};
const isSending = ({ key, shiftKey, isComposing }) => key === "Enter" && !shiftKey && !isComposing;
text.addEventListener("keydown", (event) => isSending(event) && compose.onsubmit(event));
stop.onclick = () => act("POST", address("stop/"));
document.querySelectorAll(".ideas button").forEach((idea) => (idea.onclick = () => send(idea.textContent)));
setInterval(() => thread && !document.hidden && look(), 3000);
if (thread) follow();
show();
