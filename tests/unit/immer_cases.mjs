// Prints random documents, and what the real Immer does to them, as one JSON object a line.
// Arguments: the name Immer is installed under, the seed, the number of recipes, the number of single patches.
import { createRequire } from "node:module";

const [packageName, seed, recipes, singles] = process.argv.slice(2);
const immer = createRequire(import.meta.url)(packageName);
immer.enablePatches();

let state = Number(seed);
function random(bound) {
  // mulberry32
  state = (state + 0x6d2b79f5) | 0;
  let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
  mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
  return ((mixed ^ (mixed >>> 14)) >>> 0) % bound;
}
const pick = (choices) => choices[random(choices.length)];

const KEYS = ["a", "b", "notes", "a/b", "m~n", "~1", "", "0", "1", "01", "-", "length", "é", "\u0000", "🙂"];
const SCALARS = [null, true, false, 0, 1, -7, 2.5, 1e21, 9007199254740991, "", "text", "é\ud800", "__proto__"];

function value(depth) {
  const kind = depth <= 0 ? 0 : random(4);
  if (kind < 2) return pick(SCALARS);
  const items = Array.from({ length: random(5) }, () => value(depth - 1));
  return kind === 2 ? items : Object.fromEntries(items.map((item) => [pick(KEYS), item]));
}

const isContainer = (item) => item !== null && typeof item === "object";
const document = () => (random(4) ? { ...value(4), list: value(3), items: [value(2), value(1), 3] } : [value(3), value(2)]);

function containerIn(root) {
  let container = root;
  while (random(3)) {
    const inner = Object.values(container).filter(isContainer);
    if (!inner.length) break;
    container = pick(inner);
  }
  return container;
}

function change(container) {
  const position = Array.isArray(container) ? random(container.length + 1) : pick(KEYS);
  if (!Array.isArray(container)) {
    const present = Object.keys(container);
    if (random(3) === 0 && present.length) delete container[pick(present)];
    else container[present.length && random(2) ? pick(present) : position] = value(3);
    return;
  }
  const changes = [
    () => container.push(value(2), value(1)),
    () => container.unshift(value(2)),
    () => container.pop(),
    () => container.shift(),
    () => container.splice(position, random(3), ...Array.from({ length: random(3) }, () => value(2))),
    () => container.reverse(),
    () => { container[position] = value(2); },
    () => { container.length = position; },
  ];
  pick(changes)();
}

const print = (line) => process.stdout.write(JSON.stringify(line) + "\n");

for (let count = 0; count < Number(recipes); count++) {
  const before = document();
  const recipe = (draft) => {
    if (random(20) === 0) return value(3);
    for (let steps = 1 + random(5); steps > 0; steps--) change(containerIn(draft));
  };
  const [result, patches, inverse] = immer.produceWithPatches(before, recipe);
  print({ kind: "recipe", document: before, patches, inverse, result });
}

const ODD_SEGMENTS = [0, 1, 2, 3, 7, -1, 1.5, "0", "1", "2", "3", "01", "+1", " 1", "1e0", "x", "-", "length", "", true, null, "a", "list", "items"];
for (let count = 0; count < Number(singles); count++) {
  const before = { list: [1, [2], { a: 3 }], items: [], a: { 0: "zero", length: 2, list: [4, 5, 6] } };
  const path = Array.from({ length: 1 + random(3) }, (_, at) => (at === 0 && random(5) ? pick(["list", "items", "a"]) : pick(ODD_SEGMENTS)));
  const patch = { op: pick(["add", "replace", "remove"]), path, value: random(2) ? random(5) : value(2) };
  let result;
  try {
    result = immer.applyPatches(before, [patch]);
  } catch {
    result = "refused";
  }
  print({ kind: "single", document: before, patches: [patch], result });
}
