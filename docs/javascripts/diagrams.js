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
  const texts = sources.map((source) => source.querySelector("code").textContent);

  const draw = async () => {
    const isDark = document.body.getAttribute("data-md-color-scheme") === "slate";
    mermaid.initialize({ startOnLoad: false, theme: isDark ? "dark" : "neutral", fontFamily: "inherit" });
    for (const [index, text] of texts.entries()) {
      const { svg } = await mermaid.render(`diagram-${index}`, text);
      pictures[index].innerHTML = svg;
      sources[index].hidden = true;
    }
    document.body.dataset.diagrams = isDark ? "dark" : "light";
  };

  const library = document.createElement("script");
  library.src = new URL("mermaid.tiny.js", document.currentScript.src).href;
  library.onload = () => {
    draw();
    new MutationObserver(draw).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
  };
  document.head.append(library);
})();
