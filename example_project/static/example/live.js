"use strict";

// Shows a stream as it is written. What was shown is kept in the tab together with the sequence of its last
// chunk, so that a reload goes on from there.
const answer = document.getElementById("answer");

if (answer) {
  const status = document.getElementById("status");
  const key = answer.dataset.events;
  const shown = JSON.parse(sessionStorage.getItem(key)) ?? { text: "", sequence: 0 };

  const show = () => {
    answer.textContent = shown.text;
    sessionStorage.setItem(key, JSON.stringify(shown));
  };

  const listen = () => {
    const source = new EventSource(`${key}?from=${shown.sequence}`);
    const stop = (text) => {
      source.close();
      status.textContent = text;
    };
    source.onopen = () => {
      status.textContent = "answering";
    };
    source.onmessage = (event) => {
      shown.text += JSON.parse(event.data).delta;
      shown.sequence = Number(event.lastEventId);
      show();
    };
    source.addEventListener("end", () => stop("finished"));
    source.addEventListener("fail", () => stop("failed"));
    source.addEventListener("paused", () => stop("paused"));
    source.addEventListener("truncated", (event) => {
      source.close();
      shown.text = "";
      shown.sequence = JSON.parse(event.data).oldest - 1;
      listen();
    });
  };

  show();
  listen();
}
