"use strict";
// Reads the data of the page and draws it.

(function draw() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const page = document.getElementById("page");
  const sections = data.plan ? planSections(data.plan) : data.sweep ? sweepSections(data) : runSections(data);
  page.replaceChildren(...[sections].flat(Infinity).filter(Boolean));
  page.append(el("footer", null, `Written ${format.when(data.made)} by orchestra ${data.orchestra}. This file asks nobody for anything${data.plan ? "" : "; times are of the hosts' clocks"}.`));
  // On paper nobody opens anything: the configuration is the one part that stands nowhere else on the page.
  const folded = [...page.querySelectorAll("#configuration details")].filter((each) => !each.open);
  window.addEventListener("beforeprint", () => folded.forEach((each) => {
    each.open = true;
    // What is in it is made now, not when the event of its own comes.
    each.dispatchEvent(new Event("toggle"));
  }));
  window.addEventListener("afterprint", () => folded.forEach((each) => { each.open = false; }));
  document.documentElement.dataset.drawn = "true";
})();
