// Follows a stream of helix_store, and says in words how that goes.

const secondsUntilNextAttempt = 3;

const reasons = {
  403: "This answer belongs to another visitor. Ask for another one.",
  404: "This answer does not exist. Ask for another one.",
  501:
    "This server cannot send a live answer, because it is not an ASGI server. " +
    "Stop it, run this command, and reload the page: ",
};

// `element` has the address of the stream and the command of a server that can send it, `status` shows the
// words; `isOpen` are those of an open connection. `onChunk` gets each chunk after the sequence `from`, and
// `onTruncated` is called when the oldest ones are gone.
export const follow = (element, status, { from = 0, isOpen = "answering", onChunk, onTruncated }) => {
  const { events, server } = element.dataset;
  let sequence = from;

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
        command.textContent = server;
        status.append(command);
      }
    } else if (response.ok) {
      tryAgain("The connection was lost.");
    } else {
      tryAgain(`The server cannot send the answer now (status ${response.status}).`);
    }
  };

  const listen = () => {
    const url = `${events}?from=${sequence}`;
    const source = new EventSource(url);
    const stop = (text) => {
      source.close();
      status.textContent = text;
    };
    source.onopen = () => {
      status.textContent = isOpen;
    };
    source.onmessage = (event) => {
      sequence = Number(event.lastEventId);
      onChunk(JSON.parse(event.data), sequence);
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
      sequence = JSON.parse(event.data).oldest - 1;
      onTruncated?.(sequence);
      listen();
    });
  };

  listen();
};
