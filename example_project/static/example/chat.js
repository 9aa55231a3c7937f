import { follow } from "./stream.js";

// The stream of the chat brings the words that the agent says now, and tells when something else has changed:
// then the page loads what is stored. Forms are sent without leaving the page.
const transcript = document.getElementById("transcript");
const writing = document.getElementById("writing");
const problem = document.getElementById("problem");
const compose = document.getElementById("compose");
const send = compose.querySelector("button");
const { text, key } = compose.elements;
const blank = document.getElementById("entry").content.firstElementChild;

const isAtEnd = () => window.innerHeight + window.scrollY >= document.body.scrollHeight - 40;
const goToEnd = () => window.scrollTo(0, document.body.scrollHeight);

const keepingTheEnd = (change) => {
  const wasAtEnd = isAtEnd();
  change();
  if (wasAtEnd) goToEnd();
};

// The number of the message that is being written.
let current = -1;

const write = ({ number, is_first: isFirst, delta }) => {
  if (number < transcript.children.length) return;
  // A turn that continues after a dead worker says the whole message again.
  if (isFirst || number !== current) writing.replaceChildren(blank.cloneNode(true));
  current = number;
  writing.querySelector(".text").textContent += delta;
};

// Elements that stay are not touched, so that a click on them is not lost.
const update = (element, fresh) => {
  const added = [...fresh.children];
  for (const old of [...element.children]) {
    const same = added.findIndex((child) => child.isEqualNode(old));
    if (same < 0) old.remove();
    else added.splice(same, 1);
  }
  element.append(...added);
};

const show = (page) => {
  const stored = page.getElementById("transcript").children;
  transcript.append(...[...stored].slice(transcript.children.length));
  if (current < transcript.children.length) writing.replaceChildren();
  for (const id of ["waiting", "now"]) update(document.getElementById(id), page.getElementById(id));
};

// One request after the other, so that an older page never replaces a newer one.
let last = Promise.resolve();

const load = (url, options) => {
  const loaded = last.then(async () => {
    const response = await fetch(url, options);
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    keepingTheEnd(() => show(page));
    expectMore();
    return page;
  });
  last = loaded.catch(() => {});
  return loaded;
};

const refresh = () => load(location.href).catch(() => {});

// A worker that dies says nothing. After its term the stored session shows that nobody drives the chat.
let timer = 0;

const expectMore = () => {
  clearTimeout(timer);
  if (document.getElementById("stop")) timer = setTimeout(refresh, Number(transcript.dataset.termMs) + 1000);
};

const post = async (form, submitter) => {
  const body = new FormData(form, submitter);
  const isMessage = form === compose;
  if (isMessage) {
    send.disabled = true;
    text.value = "";
  }
  let draft = body.get("text");
  try {
    const page = await load(submitter?.getAttribute("formaction") ?? form.action, { method: "POST", body });
    const { text: unsent, key: next } = page.getElementById("compose").elements;
    problem.textContent = page.getElementById("problem").textContent;
    draft = unsent.value;
    key.value = next.value;
  } catch {
    // The key stays: if the message was stored after all, it is not stored twice.
    problem.textContent = "The server did not answer. Try again.";
  }
  if (isMessage) {
    send.disabled = false;
    text.value = [draft, text.value].filter(Boolean).join("\n");
    goToEnd();
  }
};

if (transcript.dataset.events) {
  expectMore();
  follow(transcript, document.getElementById("status"), {
    from: Number(transcript.dataset.from),
    isOpen: "",
    onChunk: (chunk) => {
      expectMore();
      if (chunk.type === "text_delta") keepingTheEnd(() => write(chunk));
      else refresh();
    },
  });
  document.addEventListener("submit", (event) => {
    event.preventDefault();
    post(event.target, event.submitter);
  });
}

compose.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!send.disabled) compose.requestSubmit();
  }
});

goToEnd();
