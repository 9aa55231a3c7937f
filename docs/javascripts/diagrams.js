// Draw the Mermaid diagrams of a page, in the colours of its scheme, from a copy on the same host.
// Only pages with a diagram load it. Without JavaScript, a page shows the text of the diagram.
(() => {
  const sources = [...document.querySelectorAll("pre.language-mermaid")];
  if (!sources.length) return;
  const pictures = sources.map((source) => {
    const picture = document.createElement("div");
    picture.className = "diagram";
    source.after(picture);
    return picture;
  });
  const READABLE = 0.62; // of the natural width
  const texts = sources.map((source) => source.querySelector("code").textContent);

  const draw = async () => {
    const isDark = document.body.getAttribute("data-md-color-scheme") === "slate";
    mermaid.initialize({
      startOnLoad: false,
      fontFamily: "inherit",
      theme: isDark ? "dark" : "neutral",
      themeVariables: isDark ? { edgeLabelBackground: "#1e2129" } : {},
    });
    for (const [index, text] of texts.entries()) {
      const { svg } = await mermaid.render(`diagram-${index}`, text);
      pictures[index].innerHTML = svg;
      // A wide diagram scrolls on a telephone: otherwise its text would be too small to read.
      const drawn = pictures[index].firstElementChild;
      drawn.style.minWidth = `${READABLE * parseFloat(drawn.style.maxWidth)}px`;
      sources[index].hidden = true;
    }
    document.body.dataset.diagrams = isDark ? "dark" : "light";
  };

  const library = document.createElement("script");
  library.src = new URL("mermaid.tiny.js", document.currentScript.src).href;
  // One after the other: a reader may change the scheme while the diagrams are being drawn.
  let drawing = Promise.resolve();
  const drawNext = () => (drawing = drawing.then(draw));
  library.onload = () => {
    drawNext();
    new MutationObserver(drawNext).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
  };
  document.head.append(library);
})();
