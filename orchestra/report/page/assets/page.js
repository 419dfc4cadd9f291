"use strict";
// Reads the data of the page and draws it.

(function draw() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const page = document.getElementById("page");
  const sections = data.plan ? planSections(data.plan) : data.sweep ? sweepSections(data) : runSections(data);
  page.replaceChildren(...[sections].flat(Infinity).filter(Boolean));
  page.append(el("footer", null, `Written ${format.when(data.made)} by orchestra ${data.orchestra}. This file asks nobody for anything${data.plan ? "" : "; times are of the hosts' clocks"}.`));
  document.documentElement.dataset.drawn = "true";
})();
