"use strict";
// The sections of a sweep's page: its members as a table, and the metric against what distinguishes them.

const metricOf = (row, sweep) => row.values[sweep.metric];
const isLogAxis = (values) => values.every((value) => isNumber(value) && value > 0) && Math.max(...values) / Math.min(...values) > 30;

/** The position of each value of one parameter between 0 and 1: numbers by size, other values one beside the other. */
function parameterAxis(values) {
  const known = values.filter((value) => value !== undefined && value !== null);
  if (known.length && known.every(isNumber)) {
    const [low, high] = extent(known);
    const isLog = isLogAxis(known);
    const place = scale(low, high, 0, 1, isLog);
    const some = [...new Set(known)].sort((a, b) => a - b);
    return { place, ticks: some.length <= 6 ? some : (isLog ? logTicks : ticks)(low, high, 4), show: format.small, isLog };
  }
  const names = [...new Set(known.map(String))].sort((a, b) => compare(a, b));
  return { place: (value) => (names.length < 2 ? 0.5 : names.indexOf(String(value)) / (names.length - 1)), ticks: names.slice(0, 12), show: String, isLog: false };
}

function membersSection(sweep) {
  const keys = sweep.keys;
  const last = keys.map((key) => key.split(".").pop());
  const titles = keys.map((key, index) => (last.filter((each) => each === last[index]).length > 1 ? key : last[index]));
  const metrics = [...new Set(sweep.members.flatMap((row) => Object.keys(row.values)))].filter((key) => sweep.members.some((row) => isNumber(row.values[key])));
  const show = { loss: format.loss, tokens_per_s: format.quantity, mfu: format.percent };
  const columns = [
    { key: "member", title: "member", value: (row) => row.index, show: (value) => String(value).padStart(3, "0") },
    ...keys.map((key, index) => ({ key, title: titles[index], value: (row) => row.overrides[key] ?? null, show: (value) => (value === null ? "–" : isNumber(value) ? format.small(value) : String(value)) })),
    ...metrics.map((key) => ({ key, title: key === "tokens_per_s" ? "tokens/s" : key === "mfu" ? "MFU" : key, value: (row) => row.values[key], show: show[key] || format.loss })),
    { key: "state", title: "state", isText: true, show: (state, row) => [el("span", { class: `tag ${state === "finished" ? "good" : row.cause && state !== "running" ? "bad" : ""}` }, state), row.cause && state !== "finished" ? el("div", { class: "quiet" }, row.cause) : null] },
    { key: "step", title: "step", show: (value, row) => `${format.count(value)} / ${format.count(row.steps)}` },
    { key: "attempts", title: "attempts", show: format.count },
  ];
  return section("members", "Members", table(columns, sweep.members, { label: "Members of the sweep", isFiltered: true, sortBy: sweep.metric, example: `${titles[0] || "loss"}<0.01 finished` }));
}

function parallelSection(sweep) {
  const rows = sweep.members.filter((row) => isNumber(metricOf(row, sweep)));
  if (rows.length < 2 || !sweep.keys.length) return null;
  const ordered = [...rows].sort((a, b) => metricOf(b, sweep) - metricOf(a, sweep));
  const axes = [...sweep.keys.map((key) => ({ title: key, value: (row) => row.overrides[key], ...parameterAxis(rows.map((row) => row.overrides[key])) })),
    { title: sweep.metric, value: (row) => metricOf(row, sweep), ...parameterAxis(rows.map((row) => metricOf(row, sweep))) }];
  const isBest = new Set(sweep.best.slice(0, Math.max(1, Math.ceil(rows.length / 10))));
  const view = responsive((width) => {
    const [height, top, bottom, side] = [280, 30, 14, 44];
    const x = scale(0, axes.length - 1, side, width - side);
    const y = (axis, row) => { const value = axis.value(row); return value === undefined ? null : height - bottom - axis.place(value) * (height - top - bottom); };
    const lines = ordered.map((row) => {
      const points = axes.map((axis, index) => [x(index), y(axis, row)]).filter(([, at]) => at !== null);
      return svg("path", { class: isBest.has(row.index) ? "curve s0" : "curve axis", opacity: isBest.has(row.index) ? 0.9 : rows.length > 200 ? 0.3 : 0.6, d: `M${points.map(([at, down]) => `${at.toFixed(1)} ${down.toFixed(1)}`).join("L")}` }, svg("title", null, `${row.name}: ${sweep.metric} ${format.loss(metricOf(row, sweep))}`));
    });
    const drawn = axes.flatMap((axis, index) => [
      svg("line", { class: "hair", x1: x(index), x2: x(index), y1: top, y2: height - bottom }),
      svg("text", { class: "strong", x: x(index), y: 12, "text-anchor": index === 0 ? "start" : index === axes.length - 1 ? "end" : "middle", dx: index === 0 ? -side + 4 : index === axes.length - 1 ? side - 4 : 0 }, width / axes.length < 130 ? axis.title.split(".").pop() : axis.title),
      axis.ticks.map((tick) => svg("text", { x: x(index) + (index === axes.length - 1 ? 5 : -5), y: height - bottom - axis.place(tick) * (height - top - bottom) + 4, "text-anchor": index === axes.length - 1 ? "start" : "end" }, axis.show(tick))),
    ]);
    return svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Parallel coordinates of ${rows.length} members: ${axes.map((axis) => axis.title).join(", ")}; the table above has the numbers` }, lines, drawn);
  });
  return section("parallel", "Parameters together", el("figure", { id: "plot-parallel" }, view.box, legend([{ className: "b0", text: `the best tenth by ${sweep.metric}` }, { className: "p-idle", text: "the others" }])));
}

function parameterSection(sweep) {
  const rows = sweep.members.filter((row) => isNumber(metricOf(row, sweep)));
  if (!rows.length || !sweep.keys.length) return null;
  const plots = sweep.keys.map((key) => {
    const axis = parameterAxis(rows.map((row) => row.overrides[key]));
    const [low, high] = extent(rows.map((row) => metricOf(row, sweep)));
    const view = responsive((width) => {
      const [height, left, bottom] = [200, 58, 26];
      const room = (high - low || Math.abs(high) || 1) * 0.08;
      const x = (value) => left + 14 + axis.place(value) * (width - left - 40);
      const y = scale(low - room, high + room, height - bottom, 8);
      const drawn = ticks(low - room, high + room, 4).flatMap((tick) => [svg("line", { class: "grid", x1: left, x2: width - 12, y1: y(tick), y2: y(tick) }), svg("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, digits(tick))]);
      drawn.push(axis.ticks.map((tick) => svg("text", { x: x(tick), y: height - 8, "text-anchor": "middle" }, axis.show(tick))));
      // The best one last: on top of the others.
      drawn.push([...rows].sort((a, b) => metricOf(b, sweep) - metricOf(a, sweep)).filter((row) => row.overrides[key] !== undefined).map((row) => svg("circle", { class: `dot ${sweep.best[0] === row.index ? "f1" : "f0"}`, opacity: 0.85, cx: x(row.overrides[key]), cy: y(metricOf(row, sweep)), r: sweep.best[0] === row.index ? 5 : rows.length > 200 ? 2.5 : 4 }, svg("title", null, `${row.name}: ${key}=${row.overrides[key]}, ${sweep.metric} ${format.loss(metricOf(row, sweep))}`))));
      return svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `${sweep.metric} against ${key}; the table of members has the numbers` }, drawn);
    });
    return el("figure", { id: `plot-parameter-${key}` }, el("figcaption", null, el("h3", null, `${sweep.metric} against ${key}`)), view.box);
  });
  return section("parameters", "Each parameter", el("div", { class: "plots" }, plots));
}

function bestSection(sweep) {
  const drawn = sweep.best.slice(0, 6).filter((index) => (sweep.curves[index] || { step: [] }).step.length);
  if (!drawn.length) return null;
  const series = drawn.map((index, order) => ({ name: sweep.members.find((row) => row.index === index).name, x: sweep.curves[index].step, y: sweep.curves[index].loss, order: color(order) }));
  const plot = curvePlot({ id: "plot-best", title: "Training loss of the best members", unit: "nats per token", height: 280, series, show: format.loss, showTick: (value) => digits(value), showX: format.count, xTitle: "step", key: series.map((each, order) => ({ className: `b${color(order)}`, text: each.name })) });
  return section("best", "Best members", plot.figure);
}

function sweepSections(data) {
  const sweep = data.sweep;
  const keys = Object.fromEntries(Object.entries(sweep.config).filter(([key]) => !sweep.keys.includes(key)).map(([key, value]) => [key, [value]]));
  return [
    el("h1", null, sweep.name),
    el("p", { class: "quiet path" }, [`sweep of ${plural(sweep.members.length, "member")}`, sweep.created ? `made ${format.when(sweep.created)}` : null].filter(Boolean).join(" · "), el("br"), sweep.path),
    verdictBox({ ...sweep.verdict, evidence: ["", "", ...sweep.verdict.evidence] }),
    bestSection(sweep), membersSection(sweep), parallelSection(sweep), parameterSection(sweep),
    section("configuration", "Configuration of all members", Object.keys(keys).length ? behind(`All ${Object.keys(keys).length} keys that are not swept`, () => keyTable(["value"], keys, "Configuration")) : el("p", { class: "quiet" }, "config.yaml is missing")),
  ];
}
