/* Keeps a page up to date: asks for a mark, and reads the page again if the mark has changed. Nothing is asked for
   while the page is hidden, and nothing is replaced that somebody is working on. */
"use strict";

{
  const status = document.getElementById("helix-live-page");
  const words = status.dataset;
  const seconds = Number(words.seconds);
  let mark = words.mark;
  let costsAt = Date.now();
  let costsAreOlder = false;
  let timer = 0;
  let failures = 0;

  const say = (text) => {
    status.textContent = text;
  };
  const sayTime = () => say(`${words.updated} ${new Date().toLocaleTimeString(document.documentElement.lang)}`);

  /* Whether somebody has changed a field. The browser chooses the first option if the page chooses none. */
  const isChanged = (field) => {
    if (field.type === "checkbox" || field.type === "radio") return field.checked !== field.defaultChecked;
    if (field.options) {
      const chosen = [...field.options].findIndex((option) => option.defaultSelected);
      return field.selectedIndex !== Math.max(chosen, 0);
    }
    return (field.value ?? "") !== (field.defaultValue ?? "");
  };

  /* A region with a selection, or with a form that somebody has begun to fill in, stays as it is. */
  const isInUse = (region) => {
    const selection = document.getSelection();
    if (selection && !selection.isCollapsed && region.contains(selection.anchorNode)) return true;
    return [...region.querySelectorAll("input:not([type=hidden]), textarea, select")].some(
      (field) => field === document.activeElement || isChanged(field),
    );
  };

  const replace = (region, fresh) => {
    const opened = [...region.querySelectorAll("details")].map((each) => each.open);
    const focused = region.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    const added = document.importNode(fresh, true);
    [...added.querySelectorAll("details")].forEach((each, place) => {
      each.open = opened[place] ?? each.open;
    });
    region.replaceWith(added);
    if (focused) added.querySelector(`[href="${CSS.escape(focused)}"]`)?.focus();
    /* Django's script knows only the boxes of the rows that are gone. */
    const boxes = added.querySelectorAll("tr input.action-select");
    if (boxes.length && window.Actions) window.Actions(boxes);
  };

  /* A page with costs reads them again only after some minutes: they are sums over days. */
  const readsCosts = () => Date.now() - costsAt >= 1000 * Number(words.costsSeconds);

  const refresh = async () => {
    const isWhole = readsCosts();
    const headers = isWhole ? {} : { "X-Helix-Live": "without-costs" };
    const response = await fetch(window.location.href, { credentials: "same-origin", headers });
    if (!response.ok || response.redirected) throw new Error("The page cannot be read.");
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    const regions = [...document.querySelectorAll("[data-helix-region]")];
    if (regions.some(isInUse)) return false;
    for (const region of regions) {
      const fresh = page.getElementById(region.id);
      if (fresh) replace(region, fresh);
    }
    costsAreOlder = !isWhole;
    if (isWhole) costsAt = Date.now();
    return true;
  };

  const ask = async () => {
    timer = 0;
    try {
      const response = await fetch(words.url, { credentials: "same-origin", headers: { Accept: "application/json" } });
      if (!response.ok) throw new Error("The mark cannot be read.");
      const now = await response.json();
      failures = 0;
      if (now.mark === mark && !(costsAreOlder && readsCosts())) {
        sayTime();
      } else if (await refresh()) {
        mark = now.mark;
        sayTime();
      } else {
        say(words.changed);
      }
      if (now.is_over) return;
    } catch {
      failures += 1;
      say(words.failed);
    }
    plan();
  };

  const plan = () => {
    if (!timer && !document.hidden) timer = setTimeout(ask, 1000 * Math.min(seconds * 2 ** failures, 60));
  };

  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    timer = 0;
    if (document.hidden) say(words.paused);
    else ask();
  });
  plan();
}
