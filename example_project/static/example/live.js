import { follow } from "./stream.js";

// Shows an answer as it is written. What was shown is kept in the tab together with the sequence of its last
// chunk, so that a reload goes on from there.
const answer = document.getElementById("answer");

if (answer) {
  const key = answer.dataset.events;
  const shown = JSON.parse(sessionStorage.getItem(key)) ?? { text: "", sequence: 0 };

  const show = () => {
    answer.textContent = shown.text;
    sessionStorage.setItem(key, JSON.stringify(shown));
  };

  show();
  follow(answer, document.getElementById("status"), {
    from: shown.sequence,
    onChunk: (chunk, sequence) => {
      shown.text += chunk.delta;
      shown.sequence = sequence;
      show();
    },
    onTruncated: (sequence) => {
      shown.text = "";
      shown.sequence = sequence;
    },
  });
}
