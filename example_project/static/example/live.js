"use strict";

// Shows a stream as it is written. What was shown is kept in the tab together with the sequence of its last
// chunk, so that a reload goes on from there.
const answer = document.getElementById("answer");

if (answer) {
  const status = document.getElementById("status");
  const key = answer.dataset.events;
  const shown = JSON.parse(sessionStorage.getItem(key)) ?? { text: "", sequence: 0 };
  const reasons = {
    403: "This answer belongs to another visitor. Press Ask for a new one.",
    404: "This answer does not exist. Press Ask for a new one.",
    501:
      "This server cannot send a live answer, because it is not an ASGI server. " +
      "Stop it, run this command, and reload the page: ",
  };
  const secondsUntilNextAttempt = 3;

  const show = () => {
    answer.textContent = shown.text;
    sessionStorage.setItem(key, JSON.stringify(shown));
  };

  const tryAgain = (text) => {
    status.textContent = `${text} The page tries again.`;
    setTimeout(listen, secondsUntilNextAttempt * 1000);
  };

  // An EventSource does not tell why a request was refused, and does not repeat it.
  const explain = async (url) => {
    const controller = new AbortController();
    let response;
    try {
      response = await fetch(url, { signal: controller.signal });
    } catch {
      tryAgain("The server does not respond.");
      return;
    }
    controller.abort();
    if (response.status in reasons) {
      status.textContent = reasons[response.status];
      if (response.status === 501) {
        const command = document.createElement("code");
        command.textContent = answer.dataset.server;
        status.append(command);
      }
    } else if (response.ok) {
      tryAgain("The connection was lost.");
    } else {
      tryAgain(`The server cannot send the answer now (status ${response.status}).`);
    }
  };

  const listen = () => {
    const url = `${key}?from=${shown.sequence}`;
    const source = new EventSource(url);
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
    source.onerror = () => {
      if (source.readyState === EventSource.CLOSED) {
        explain(url);
      } else {
        status.textContent = "The connection was lost. The browser connects again.";
      }
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
