// What tests ask of a page that a browser shows (tests/e2e/test_report_page.py).
({
  // What has no name: what a screen reader would read as nothing.
  nameless() {
    const labelled = (each) => document.getElementById(each.getAttribute("aria-labelledby"));
    return [...document.querySelectorAll("button, input, [role=slider], [role=img], [role=region], section, table")]
      .filter((each) => !(each.getAttribute("aria-label") || each.textContent.trim() || (each.labels && each.labels.length) || labelled(each)))
      .map((each) => each.outerHTML.slice(0, 200));
  },

  // Texts whose contrast with the ground they stand on is below WCAG's 4.5 : 1.
  pale() {
    const parsed = (text) => text.match(/[\d.]+/g).map(Number);
    const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    const luminance = (color) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, index) => sum + weight * linear(color[index] / 255), 0);
    const ground = (node) => {
      for (let at = node; at; at = at.parentElement) {
        const color = parsed(getComputedStyle(at).backgroundColor);
        if (color.length < 4 || color[3] > 0) return color;
      }
      return [255, 255, 255];
    };
    const found = [];
    for (const node of document.querySelectorAll("main *")) {
      const hasText = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
      if (!hasText || !node.getClientRects().length) continue;
      const style = getComputedStyle(node);
      const [a, b] = [luminance(parsed(node instanceof SVGElement ? style.fill : style.color)), luminance(ground(node))];
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      if (ratio < 4.5) found.push(`${ratio.toFixed(2)} ${node.outerHTML.slice(0, 120)}`);
    }
    return found;
  },

  // Plots without a stroke, a bar or a cell.
  empty: () => [...document.querySelectorAll(".plot")].filter((each) => !each.querySelector("svg path[d], svg rect, svg circle")).map((each) => each.outerHTML.slice(0, 200)),
})
