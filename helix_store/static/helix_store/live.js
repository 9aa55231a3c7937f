/* The chunks of a stream as they are written, below those of the page. Chunks are shown as text only. */
"use strict";

{
  const status = document.getElementById("helix-live");
  const list = document.getElementById("helix-chunks");
  const most = 500;

  const add = (sequence, data) => {
    const item = document.createElement("li");
    item.value = Number(sequence);
    let chunk = null;
    try { chunk = JSON.parse(data); } catch { /* It is shown as it is. */ }
    const said = chunk && ["delta", "text", "content"].map((key) => chunk[key]).find((each) => typeof each === "string");
    if (typeof said === "string" && typeof chunk.type === "string") {
      const type = document.createElement("span");
      type.className = "helix-chunk-type";
      type.textContent = chunk.type;
      item.append(type, " ");
    }
    const text = document.createElement("span");
    text.className = "helix-chunk-text";
    text.textContent = (typeof said === "string" && typeof chunk.type === "string") ? said : data;
    item.append(text);
    list.append(item);
    while (list.children.length > most) list.firstElementChild.remove();
  };

  const source = new EventSource(`${status.dataset.url}?from=${status.dataset.after}`);
  const close = (words) => { source.close(); status.textContent = words; };
  source.onopen = () => { status.textContent = status.dataset.waiting; };
  source.onmessage = (event) => add(event.lastEventId, event.data);
  source.onerror = () => { if (source.readyState === EventSource.CLOSED) status.textContent = status.dataset.refused; };
  for (const last of ["end", "fail", "paused", "truncated"]) {
    source.addEventListener(last, () => close(status.dataset.ended));
  }
  window.addEventListener("pagehide", () => source.close());
}
