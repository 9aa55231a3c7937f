/* The chunks of a stream as they are written, below those of the page. Chunks are shown as text only. */
"use strict";

{
  const status = document.getElementById("helix-live");
  const list = document.getElementById("helix-chunks");
  const most = 500;

  /* The type and the text of a chunk, where it has both; else its JSON. */
  const read = (data) => {
    try {
      const chunk = JSON.parse(data);
      const text = [chunk.delta, chunk.text, chunk.content].find((each) => typeof each === "string");
      if (typeof chunk.type === "string" && text !== undefined) return { type: chunk.type, text };
    } catch {
      /* It is shown as it is. */
    }
    return { type: "", text: data };
  };

  const span = (name, text) => {
    const element = document.createElement("span");
    element.className = name;
    element.textContent = text;
    return element;
  };

  const add = (sequence, { type, text }) => {
    const last = list.lastElementChild;
    if (type && last && last.dataset.type === type) {
      last.lastElementChild.append(text);
      return;
    }
    const item = document.createElement("li");
    item.dataset.type = type;
    item.append(span("helix-chunk-type", `#${sequence} ${type}`), " ", span("helix-chunk-text", text));
    list.append(item);
    if (list.children.length > most) list.firstElementChild.remove();
  };

  const source = new EventSource(`${status.dataset.url}?from=${status.dataset.after}`);
  const end = () => {
    source.close();
    status.textContent = status.dataset.ended;
  };
  source.onopen = () => {
    status.textContent = status.dataset.waiting;
  };
  source.onmessage = (event) => add(event.lastEventId, read(event.data));
  source.onerror = () => {
    if (source.readyState === EventSource.CLOSED) status.textContent = status.dataset.refused;
  };
  for (const last of ["end", "fail", "paused", "truncated"]) source.addEventListener(last, end);
  window.addEventListener("pagehide", () => source.close());
}
