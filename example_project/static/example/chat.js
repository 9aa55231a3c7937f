import { follow } from "./stream.js";

// The page comes with the stored messages. The stream of the turn brings words while the agent writes, and
// its messages when they are stored: those replace the words, and show what a reload would show.
const transcript = document.getElementById("transcript");
const status = document.getElementById("status");
const compose = document.getElementById("compose");
const send = compose.querySelector("button");

const isAtEnd = () => window.innerHeight + window.scrollY >= document.body.scrollHeight - 40;
const goToEnd = () => window.scrollTo(0, document.body.scrollHeight);

const blank = document.getElementById("entry").content.firstElementChild;

const append = (entry) => {
  transcript.append(entry);
  return entry;
};

const entryOf = ({ role, title, text }) => {
  const entry = blank.cloneNode(true);
  entry.className = role;
  entry.querySelector(".title").textContent = title;
  entry.querySelector(".text").textContent = text;
  return entry;
};

const ask = (question) => {
  document.getElementById("question").textContent = question;
  document.getElementById("approval").hidden = !question;
  status.textContent = "";
  send.disabled = Boolean(question);
};

if (transcript.dataset.events) {
  let stored = transcript.children.length;
  let written = null;

  const change = {
    text_delta: ({ number, delta }) => {
      if (number < stored) return;
      written ??= append(blank.cloneNode(true));
      written.querySelector(".text").textContent += delta;
    },
    messages: ({ number, entries }) => {
      const fresh = entries.slice(Math.max(0, stored - number));
      if (fresh.length === 0) return;
      written?.remove();
      written = null;
      fresh.map(entryOf).forEach(append);
      stored += fresh.length;
    },
  };

  // A worker that dies says nothing. After its term the server knows that nobody drives the chat.
  const silence = Number(transcript.dataset.termMs) + 1000;
  let timer = 0;
  const expectMore = () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      status.textContent = "The agent has been silent for a while. Reload the page: if it has stopped, it can go on.";
    }, silence);
  };

  send.disabled = true;
  expectMore();
  follow(transcript, status, {
    comesLater: true,
    onChunk: (chunk) => {
      expectMore();
      const wasAtEnd = isAtEnd();
      change[chunk.type]?.(chunk);
      if (wasAtEnd) goToEnd();
    },
    onEnd: ({ question }) => {
      clearTimeout(timer);
      ask(question);
      goToEnd();
    },
    onFail: () => {
      clearTimeout(timer);
      status.textContent = "The agent failed. Reload the page to let it go on.";
    },
  });
}

compose.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!send.disabled) compose.requestSubmit();
  }
});

goToEnd();
