"use strict";
// The sections of a page of runs, in the order in which a reader asks.

const ACCOUNTS = [
  ["productive", "steps that count", "training, the wait for data included"],
  ["lost", "trained again", "steps that a later attempt trained once more"],
  ["checkpoint", "saves", "the training's waits for checkpoints and records"],
  ["restart", "starts", "processes started, failures noticed, the first start too"],
  ["restore", "restores", "reading a checkpoint or a copy in memory"],
  ["queue", "queue", "waiting for the scheduler"],
  ["idle", "idle", "ended, until somebody went on with it"],
];
const KINDS = {
  finished: "finished", stopped: "stopped as asked", preempted: "preempted", time_limit: "time limit", refused: "refused to go on",
  loss: "rolled back", replay: "a step differed on replay", storage: "storage did not answer", rank_failed: "rank failed",
  hang: "hang", node_lost: "node lost", agent_lost: "agent lost", lost: "vanished without a word",
};
const X_AXES = [
  { key: "step", title: "step", show: format.count },
  { key: "tokens", title: "tokens", show: format.quantity },
  { key: "time_s", title: "time", show: format.duration, isTime: true },
  { key: "flops", title: "FLOPs", show: format.quantity },
];
const color = (order) => order % 6;
const plural = (count, word) => `${format.count(count)} ${word}${count === 1 ? "" : "s"}`;

function verdictBox(verdict) {
  const rest = verdict.evidence.slice(2);
  return el("div", { class: `verdict ${verdict.tone}` },
    el("p", { class: "sentence" }, verdict.sentence),
    rest.length ? el("ul", null, rest.map((text) => el("li", null, text))) : null,
    verdict.next.length ? el("p", { class: "next" }, "Next: ", verdict.next.map((text, index) => [index ? "; " : "", prose(text)])) : null);
}

function figuresOf(run) {
  const f = run.figures;
  const evals = Object.entries(f.eval || {}).map(([name, value]) => `${name} ${format.loss(value)}`).join(", ");
  const items = [
    ["Step", run.step === null ? "–" : format.count(run.step), run.steps ? `of ${format.count(run.steps)}` : null],
    ["Loss", format.loss(f.loss), evals ? `held out: ${evals}` : "last row, nats per token"],
    ["Tokens", format.quantity(f.tokens), f.num_parameters ? `${format.quantity(f.num_parameters)} parameters` : null],
    ["Speed", isNumber(f.tokens_per_s) ? `${format.quantity(f.tokens_per_s)} tok/s` : "–", f.step_time_s ? `${format.seconds(f.step_time_s)} a step` : null],
    ["MFU", format.percent(f.mfu), isNumber(f.mfu) ? `convention: ${run.speed.mfu_convention || "unknown"}` : null],
    ["Goodput", format.percent(f.goodput), f.wall_s ? `of ${format.seconds(f.wall_s)} wall time` : null],
    ["Attempts", format.count(f.attempts), f.ranks ? `${plural(f.ranks, "rank")}` : null],
    ["Model", f.model || "–", f.precision],
  ];
  return el("dl", { class: "figures" }, items.map(([title, value, note]) => el("div", null, el("dt", null, title), el("dd", null, value, note ? el("small", null, note) : null))));
}

function head(run, isAlone) {
  const title = el(isAlone ? "h1" : "h2", null, run.name);
  const facts = [run.state, run.began ? `began ${format.when(run.began)}` : null, run.figures.job ? `job ${run.figures.job}` : null, run.figures.revision ? `revision ${String(run.figures.revision).slice(0, 12)}` : null];
  return [
    title,
    el("p", { class: "quiet path" }, facts.filter(Boolean).join(" · "), el("br"), run.path),
    verdictBox(run.verdict),
    run.notes.length ? el("ul", { class: "notes" }, run.notes.map((note) => el("li", null, note))) : null,
    figuresOf(run),
  ];
}

/** The x of a run's restarts on an axis; null where it has none. */
function restartMarks(run, axis) {
  if (axis !== "step" && axis !== "time_s") return [];
  return run.attempts.slice(0, -1).filter((row) => row.kind).map((row) => ({
    x: axis === "step" ? row.reached_step : row.ended_s,
    text: `attempt ${row.number}: ${KINDS[row.kind] || row.kind}`,
  })).filter((mark) => isNumber(mark.x));
}

function columnSeries(runs, key, axis) {
  return runs.map((run, index) => ({ run, index })).filter(({ run }) => run.curves.columns[key] && run.curves.columns[axis]).map(({ run, index }) => ({
    name: run.name, x: run.curves.columns[axis], y: run.curves.columns[key], order: color(index), isDashed: runs.length > 6 && index >= 6,
  }));
}

function runsKey(runs) {
  return runs.length > 1 ? runs.map((run, index) => ({ className: `b${color(index)}`, text: run.name })) : null;
}

function lossSection(runs) {
  const state = { axis: "step", isLog: false };
  const axisOf = () => X_AXES.find((axis) => axis.key === state.axis);
  const lossSeries = () => {
    const series = columnSeries(runs, "loss", state.axis);
    runs.forEach((run, index) => {
      Object.entries(run.curves.sources).filter(([name]) => name.startsWith("eval/")).forEach(([name, y], number) => {
        if (run.curves.columns[state.axis]) series.push({ name: `${runs.length > 1 ? `${run.name} ` : ""}${name}`, x: run.curves.columns[state.axis], y, order: color(index + 1 + number), isDots: true });
      });
      if (state.axis === "step" && run.void.step.length) series.push({ name: "made void", x: run.void.step, y: run.void.loss, attempts: run.void.attempt, isVoid: true });
    });
    return series;
  };
  const options = () => ({
    series: lossSeries(), isLog: state.isLog, showX: axisOf().show, xTitle: axisOf().title, isTime: axisOf().isTime,
    marks: runs.length === 1 ? restartMarks(runs[0], state.axis) : [],
  });
  const plot = curvePlot({ id: "plot-loss", title: "Training loss", unit: "nats per token", height: 300, show: format.loss, showTick: (value) => digits(value), nothing: "no loss was logged", ...options() });
  const known = X_AXES.filter((axis) => runs.some((run) => run.curves.columns[axis.key]));
  const log = el("label", { class: "choices" }, el("input", { type: "checkbox", onchange: (event) => { state.isLog = event.target.checked; plot.set(options()); } }), "logarithmic");
  plot.caption.append(el("span", { class: "choices" }, choices("axis", "against", known, "step", (key) => { state.axis = key; plot.set(options()); }), log));
  const entries = runsKey(runs) || [];
  const evals = lossSeries().filter((each) => each.isDots);
  evals.forEach((each) => entries.push({ className: `b${each.order}`, text: `${each.name} (held out)` }));
  if (runs.length === 1 && runs[0].void.num_rows) entries.push({ className: "line dashed", text: `${plural(runs[0].void.num_rows, "row")} made void by a restart or a roll-back` });
  if (runs.length === 1 && restartMarks(runs[0], "step").length) entries.push({ className: "line ending", text: "vertical: an attempt ended" });
  if (entries.length) plot.figure.insertBefore(legend(entries), plot.figure.lastChild);
  const thinned = runs.filter((run) => run.curves.is_thinned).map((run) => `${run.name}: ${format.count(run.curves.columns.step.length)} of ${format.count(run.curves.num_rows)} rows are drawn, those with the extremes among them`);
  return section("loss", "Loss", plot.figure, thinned.length ? el("p", { class: "quiet" }, thinned.join("; ")) : null);
}

function stepPlot(runs, key, options) {
  const series = columnSeries(runs, key, "step");
  if (!series.length) return null;
  return curvePlot({ id: `plot-${key}`, series, showX: format.count, xTitle: "step", marks: runs.length === 1 ? restartMarks(runs[0], "step") : [], key: options.key || runsKey(runs), ...options }).figure;
}

function gradientSection(runs) {
  const plots = [
    stepPlot(runs, "grad_norm", { title: "Gradient norm", unit: "before clipping", show: format.small }),
    stepPlot(runs, "lr", { title: "Learning rate", show: format.small, fromZero: true }),
  ].filter(Boolean);
  return section("gradients", "Gradients and learning rate", plots.length ? el("div", { class: "plots" }, plots) : el("p", { class: "quiet" }, "nothing was logged"));
}

function speedWords(run) {
  const s = run.speed;
  const peak = s.peak_flops_per_s ? `peak ${format.quantity(s.peak_flops_per_s)}FLOP/s a device (${s.device || "unknown"})` : "the device's peak is not known, so that MFU and HFU are not measured";
  const convention = s.mfu_convention === "palm" ? "MFU by PaLM, appendix B: 6·(N − embedding lookup) + 12·L·h·s FLOPs a token; HFU counts recomputation too" : "";
  const plan = isNumber(s.plan.tokens_per_s) ? `the plan said ${format.quantity(s.plan.tokens_per_s)} tokens/s on ${s.plan.device}` : `no plan: ${s.plan.why}`;
  return [convention, peak, plan].filter(Boolean).join("; ") + ".";
}

function speedSection(runs) {
  const plans = runs.filter((run) => isNumber(run.speed.plan.tokens_per_s));
  const rule = (key, show) => plans.filter((run) => isNumber(run.speed.plan[key])).map((run) => ({ y: run.speed.plan[key], text: `plan${runs.length > 1 ? ` of ${run.name}` : ""} ${show(run.speed.plan[key])}` }));
  // Where nothing is recomputed the two are the same.
  const isSame = runs.length === 1 && String(runs[0].curves.columns.mfu) === String(runs[0].curves.columns.hfu);
  const shares = runs.length === 1 ? (isSame ? ["mfu"] : ["mfu", "hfu"]).flatMap((key, index) => columnSeries(runs, key, "step").map((each) => ({ ...each, name: key.toUpperCase(), order: index, isNamed: true, isDashed: index === 1 }))) : columnSeries(runs, "mfu", "step");
  const plots = [
    stepPlot(runs, "tokens_per_s", { title: "Tokens per second", show: format.quantity, fromZero: true, rules: rule("tokens_per_s", format.quantity) }),
    shares.length ? curvePlot({ id: "plot-mfu", title: runs.length === 1 ? "MFU and HFU" : "MFU", unit: isSame ? "share of the peak; the same, as nothing is recomputed" : "share of the peak", series: shares, show: format.percent, showX: format.count, xTitle: "step", fromZero: true, rules: rule("mfu", format.percent), key: runs.length > 1 ? runsKey(runs) : isSame ? null : [{ className: "b0", text: "MFU" }, { className: "b1", text: "HFU (dashed)" }] }).figure : null,
    stepPlot(runs, "step_time_s", { title: "Step time", unit: "mean since the last row", show: format.seconds, fromZero: true, rules: rule("step_time_s", format.seconds) }),
    stepPlot(runs, "data_time_s", { title: "Wait for data", unit: "a step", show: format.seconds, fromZero: true }),
  ].filter(Boolean);
  return section("speed", "Speed", runs.map((run) => el("p", { class: "quiet" }, runs.length > 1 ? `${run.name}: ` : "", speedWords(run))), plots.length ? el("div", { class: "plots" }, plots) : el("p", { class: "quiet" }, "nothing was logged"));
}

function goodputSection(runs) {
  const parts = runs.map((run) => {
    const total = run.accounts.wall_s;
    if (!(total > 0)) return el("p", { class: "quiet" }, `${run.name}: no time has passed yet`);
    const own = ACCOUNTS.map(([key, name, words]) => ({ name, words, value: run.accounts[`${key}_s`], className: `p-${key}`, share: run.accounts[`${key}_s`] / total }));
    const sum = own.reduce((all, part) => all + part.value, 0);
    const columns = [
      { key: "name", title: "what", isText: true, show: (name, row) => [row.className ? el("span", { class: `swatch ${row.className}`, "aria-hidden": "true" }) : null, " ", name] },
      { key: "value", title: "time", show: format.seconds },
      { key: "share", title: "share", show: format.percent },
      { key: "words", title: "which is", isText: true },
    ];
    const shown = [...own.filter((part) => part.value > 0), { name: "wall time", value: sum, share: sum / total, words: "the parts above, summed" }];
    return el("figure", { id: `goodput-${run.name}` }, el("figcaption", null, el("h3", null, runs.length > 1 ? run.name : `Goodput ${format.percent(run.accounts.goodput)}`)), partsBar({ title: `Wall time of ${run.name}`, parts: own, total, show: format.seconds }), table(columns, shown, { label: `Wall time of ${run.name}`, isSortable: false }));
  });
  return section("goodput", "Where the time went", parts);
}

function timelinePlot(run) {
  const rows = run.attempts.slice(-40);
  const end = Math.max(...run.attempts.map((row) => row.ended_s), 1e-6);
  const view = responsive((width) => {
    const [left, row, top] = [78, 22, 4];
    const x = scale(0, end, left, width - 16);
    const height = top + rows.length * row + 44;
    const drawn = rows.flatMap((each, index) => {
      const y = top + index * row;
      const from = isNumber(each.training_s) ? Math.min(each.training_s, each.ended_s) : each.ended_s;
      const words = `attempt ${each.number}: ${each.kind ? KINDS[each.kind] || each.kind : "under way"}`;
      return [
        svg("text", { class: "strong", x: 0, y: y + 15 }, `attempt ${each.number}`),
        svg("rect", { class: "p-restart", x: x(each.started_s), y: y + 5, width: Math.max(0.5, x(from) - x(each.started_s)), height: 12 }),
        svg("rect", { class: "p-productive", x: x(from), y: y + 5, width: Math.max(0.5, x(each.ended_s) - x(from)), height: 12 }),
        each.kind ? svg("path", { class: each.is_failure ? "failed" : each.kind === "finished" ? "ended" : "asked", d: endGlyph(each, x(each.ended_s), y + 11) }, svg("title", null, words)) : null,
      ];
    });
    const under = top + rows.length * row;
    const saves = run.checkpoints.filter((save) => isNumber(save.time_s)).map((save) => svg("line", { class: save.state === "committed" ? "s0" : "mark", "stroke-width": 1.5, x1: x(save.time_s), x2: x(save.time_s), y1: under + 4, y2: under + 14 }));
    drawn.push(svg("text", { x: 0, y: under + 13 }, "saves"), saves);
    for (const tick of secondTicks(0, end, Math.max(2, Math.floor(width / 140)))) {
      drawn.push(svg("line", { class: "grid", x1: x(tick), x2: x(tick), y1: top, y2: under + 18 }), svg("text", { x: x(tick), y: height - 6, "text-anchor": x(tick) > width - 50 ? "end" : "middle" }, end < 60 ? `${digits(tick)} s` : format.duration(tick)));
    }
    const said = rows.map((each) => `attempt ${each.number} ${each.kind ? KINDS[each.kind] || each.kind : "under way"}`).join("; ");
    return svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Attempts of ${run.name} over ${format.seconds(end)}: ${said}` }, drawn);
  });
  return view.box;
}

function endGlyph(row, x, y) {
  if (row.is_failure) return `M${x - 5} ${y - 7}L${x} ${y - 2}L${x + 5} ${y - 7}L${x + 7} ${y - 5}L${x + 2} ${y}L${x + 7} ${y + 5}L${x + 5} ${y + 7}L${x} ${y + 2}L${x - 5} ${y + 7}L${x - 7} ${y + 5}L${x - 2} ${y}L${x - 7} ${y - 5}z`;
  return `M${x} ${y - 6}L${x + 6} ${y}L${x} ${y + 6}L${x - 6} ${y}z`;
}

function attemptColumns() {
  return [
    { key: "number", title: "attempt", show: (value) => String(value) },
    { key: "kind", title: "end", isText: true, show: (kind, row) => (kind ? el("span", { class: `tag ${row.is_failure ? "bad" : kind === "finished" ? "good" : ""}` }, KINDS[kind] || kind, row.is_planned && row.is_failure ? " (planned)" : "") : "under way") },
    { key: "cause", title: "cause and place", isText: true, value: (row) => (row.is_failure || row.cause !== row.kind ? row.cause || null : null), show: (cause, row) => [cause || "–", el("div", { class: "quiet" }, [isNumber(row.rank) ? `rank ${row.rank}` : null, row.host].filter(Boolean).join(" on "))] },
    { key: "reached_step", title: "to step", show: format.count },
    { key: "rule", title: "rule", isText: true, isWide: true, value: (row) => [row.decision, row.rule].filter(Boolean).join(": ") || null, show: (value, row) => [value || "–", row.reason ? el("div", { class: "quiet" }, row.reason) : null] },
    { key: "lost_steps", title: "steps lost", show: format.count },
    { key: "lost_s", title: "trained again", show: format.seconds },
    { key: "down_s", title: "until it trained", show: format.seconds },
    { key: "hosts", title: "nodes", isText: true, value: (row) => (row.hosts.length > 4 ? `${row.hosts.slice(0, 3).join(" ")} and ${row.hosts.length - 3} more` : row.hosts.join(" ")) || null },
  ];
}

function attemptsSection(runs) {
  const parts = runs.map((run) => {
    if (!run.attempts.length) return el("p", { class: "quiet" }, `${run.name}: no attempt has started`);
    const nodes = run.nodes.length ? behind(`What was seen of nodes (${run.nodes.length})`, () => table([
      { key: "time_s", title: "after", show: format.seconds },
      { key: "event", title: "event", isText: true, show: (value) => value.replaceAll("_", " ") },
      { key: "host", title: "node", isText: true }, { key: "rank", title: "rank", show: format.count }, { key: "what", title: "what", isText: true },
    ], run.nodes, { label: `Nodes of ${run.name}` })) : null;
    const moves = run.expert_moves.length ? behind(`Experts that moved to other ranks (${run.expert_moves.length})`, () => table([
      { key: "step", title: "after step", show: format.count }, { key: "time_s", title: "after", show: format.seconds },
      { key: "experts", title: "experts", show: format.count }, { key: "layers", title: "of layers", show: format.count },
      { key: "bytes", title: "bytes", show: format.bytes }, { key: "seconds", title: "took", show: format.seconds },
      { key: "load_before", title: "busiest over mean", show: format.small }, { key: "load_expected", title: "expected after it", show: format.small },
    ], run.expert_moves, { label: `Moves of experts of ${run.name}` })) : null;
    return el("figure", null, runs.length > 1 ? el("h3", null, run.name) : null, timelinePlot(run),
      legend([{ className: "p-restart", text: "starting" }, { className: "p-productive", text: "training" }]),
      table(attemptColumns(), run.attempts, { label: `Attempts of ${run.name}` }), nodes, moves);
  });
  return section("attempts", "Attempts and incidents", parts);
}

function heatSection(runs) {
  const parts = runs.map((run) => {
    const heat = run.heat;
    if (!heat) return el("p", { class: "quiet" }, runs.length > 1 ? `${run.name}: ` : "", `own step times: ${NOT_MEASURED} (one rank alone, recovery.straggler_every_steps=null, too few steps, or an older version)`);
    const steps = [];
    HEAT_BOUNDS.forEach((bound, index) => steps.push(`h${index}`));
    const ramp = el("span", { class: "ramp", "aria-hidden": "true" }, [...steps, `h${HEAT_BOUNDS.length}`].map((name) => el("i", { class: name })));
    return el("figure", { id: `heat-${run.name}` }, runs.length > 1 ? el("h3", null, run.name) : null,
      el("p", { class: "quiet" }, `Seconds of a step in which a rank waited for no other, beside the median of all (${format.seconds(heat.median_s)}). A stripe along a rank is a slow rank, one across all ranks a slow step.`),
      heatPlot(heat),
      el("ul", { class: "legend" }, el("li", null, "below 1.02 ×", ramp, "2 × and more")),
      behind("Table of ranks", () => table([
        { key: "rank", title: "rank", show: (value) => String(value) }, { key: "host", title: "node", isText: true },
        { key: "ratio", title: "to the others", show: format.ratio }, { key: "median_s", title: "median", show: format.seconds },
        { key: "slowest_s", title: "slowest", show: format.seconds }, { key: "steps", title: "steps timed", show: format.count },
      ], heat.ranks, { label: `Own step times of ${run.name}`, sortBy: "ratio", isDown: true })));
  });
  return section("ranks", "Ranks", parts);
}

function memorySection(runs) {
  const parts = runs.map((run) => {
    const memory = run.memory;
    const title = runs.length > 1 ? el("h3", null, run.name) : null;
    if (!memory) return [title, el("p", { class: "quiet" }, "no configuration that this version reads: not planned")];
    const items = Object.entries(memory.components).filter(([, value]) => value > 0).map(([name, value]) => ({ name, value, className: "f0" }));
    const peak = memory.measured_peak_bytes;
    if (items.length) items.push({ name: "planned in all", value: memory.planned_bytes, className: "f5" });
    if (isNumber(peak) && !memory.is_process) items.push({ name: "measured peak", value: peak, className: "f1" });
    const words = [
      memory.why ? `no plan: ${memory.why}` : null,
      !isNumber(peak) ? `measured: ${NOT_MEASURED}` : memory.is_process ? `Measured: ${format.bytes(peak)} resident in rank 0's process on a CPU, the interpreter and torch included; the plan counts tensors alone` : `Measured: at most ${format.bytes(peak)} allocated on rank 0's device, ${isNumber(memory.planned_bytes) ? `${format.ratio(peak / memory.planned_bytes)} the plan` : ""}`,
      memory.host_bytes ? `${format.bytes(memory.host_bytes)} planned in host memory` : null,
    ].filter(Boolean);
    return el("figure", { id: `memory-${run.name}` }, title, items.length ? bars({ title: `Memory of rank 0 of ${run.name}`, items, show: format.bytes }) : null, el("p", { class: "quiet" }, words.join(". "), "."),
      items.length ? behind("Table", () => table([{ key: "name", title: "component", isText: true }, { key: "value", title: "bytes", show: format.bytes }], items, { label: `Memory of ${run.name}` })) : null);
  });
  return section("memory", "Memory of a rank", parts);
}

function checkpointSection(runs) {
  const parts = runs.map((run) => {
    const title = runs.length > 1 ? el("h3", null, run.name) : null;
    if (!run.checkpoints.length) return [title, el("p", { class: "quiet" }, "no checkpoint was begun")];
    const newest = run.newest_checkpoint;
    const words = [
      newest ? `The newest is of step ${format.count(newest.step)}, ${format.seconds(newest.age_s)} old ${run.is_alive ? "now" : "when the run ended"}` : "None was committed",
      run.stall_s ? `the training waited ${format.seconds(run.stall_s)} in all` : null,
      run.num_checkpoints > run.checkpoints.length ? `the newest ${format.count(run.checkpoints.length)} of ${format.count(run.num_checkpoints)} follow` : null,
    ].filter(Boolean).join("; ");
    const columns = [
      { key: "step", title: "step", show: format.count }, { key: "attempt", title: "attempt", show: String },
      { key: "state", title: "what came of it", isText: true, show: (state, row) => [el("span", { class: `tag ${{ committed: "good", failed: "bad", skipped: "warn" }[state] || ""}` }, state), row.reason ? el("div", { class: "quiet" }, row.reason) : null] },
      { key: "time_s", title: "after", show: format.seconds }, { key: "stall_s", title: "stall", show: format.seconds },
      { key: "write_s", title: "writing", show: format.seconds }, { key: "bytes", title: "size", show: format.bytes },
    ];
    return el("figure", null, title, el("p", { class: "quiet" }, words, "."), table(columns, run.checkpoints, { label: `Checkpoints of ${run.name}`, most: 12 }),
      run.passed_over.length ? el("ul", { class: "notes" }, run.passed_over.map((text) => el("li", null, text))) : null);
  });
  return section("checkpoints", "Checkpoints", parts);
}

function expertSection(runs) {
  const known = runs.filter((run) => Object.keys(run.curves.experts).length);
  if (!known.length) return null;
  const parts = known.map((run) => {
    const own = Object.entries(run.curves.experts);
    const wanted = own.filter(([name]) => name.endsWith("/load") || name.endsWith("load_mean")).slice(0, 6);
    const series = (wanted.length ? wanted : own.slice(0, 6)).map(([name, y], index) => ({ name: name.replace("moe/", ""), x: run.curves.columns.step, y, order: index, isNamed: true }));
    const plot = curvePlot({ id: `plot-experts-${run.name}`, title: "Load of the fullest expert", unit: "over the mean", series, show: format.small, showX: format.count, xTitle: "step", key: series.map((each, index) => ({ className: `b${index}`, text: each.name })) }).figure;
    const layers = Object.entries(run.curves.tokens_per_expert);
    const items = layers.slice(0, 1).flatMap(([layer, counts]) => counts.slice(0, 64).map((value, index) => ({ name: `${layer}, expert ${index}`, value })));
    return [runs.length > 1 ? el("h3", null, run.name) : null, el("div", { class: "plots" }, plot, items.length ? el("figure", null, el("figcaption", null, el("h3", null, "Tokens of each expert in the last row")), bars({ title: "Tokens of each expert", items, show: format.quantity })) : null)];
  });
  return section("experts", "Experts", parts);
}

function tracesOf(run) {
  const columns = [
    { key: "first_step", title: "steps", show: (value, row) => `${value} to ${row.last_step}` },
    { key: "rank", title: "rank", show: String },
    { key: "name", title: "file", isText: true, isWide: true, show: (name, row) => (row.link ? el("a", { href: row.link }, name) : name) },
    { key: "kind", title: "what it is", isText: true },
    { key: "bytes", title: "size", show: format.bytes },
  ];
  return [
    el("p", { class: "quiet" }, "A trace opens in a browser: go to ui.perfetto.dev and drop the file there, as it is. Perfetto reads it on your machine and uploads nothing. A memory history opens the same way at pytorch.org/memory_viz. Links work for as long as the page lies where it was written."),
    table(columns, run.traces, { label: `Traces of ${run.name}`, most: 12 }),
  ];
}

function sharesOf(run, runs) {
  const profile = run.profile;
  const items = Object.entries(profile.parts_s).map(([name, value]) => ({ name, value, share: value / profile.step_s }));
  const columns = [{ key: "name", title: "part", isText: true }, { key: "value", title: "a step", show: format.seconds }, { key: "share", title: "share", show: format.percent }];
  const sent = Object.entries(profile.bytes_sent || {}).map(([kind, size]) => `${kind} ${format.bytes(Math.round(size))}`).join(", ");
  return [
    el("p", { class: "quiet" }, `${runs.length > 1 ? `${run.name}: ` : ""}steps ${profile.first_step} to ${profile.last_step} of rank ${profile.rank}, ${format.seconds(profile.step_s)} a step`, isNumber(profile.hidden_share) ? `; ${format.percent(profile.hidden_share)} of the communication hidden` : "", sent ? `; sent a step: ${sent}` : "", "."),
    bars({ title: "Parts of a step", items, show: (value) => `${format.seconds(value)}` }),
    table(columns, items, { label: `Parts of a step of ${run.name}`, isSortable: false }),
  ];
}

function profileSection(runs) {
  const known = runs.filter((run) => run.profile || run.traces.length);
  if (!known.length) return section("profile", "Profile", el("p", { class: "quiet" }, prose(`${NOT_MEASURED}: train.profile.enabled=true traces a few steps, \`orchestra profile RUN\` those of a run that trains`)));
  return section("profile", "Profile", known.map((run) => el("figure", { id: `profile-${run.name}` }, run.profile ? sharesOf(run, runs) : null, run.traces.length ? tracesOf(run) : null)));
}

function energySection(runs) {
  const items = runs.map((run) => {
    const used = run.used;
    const perToken = isNumber(used.joules_per_token) ? `${format.small(used.joules_per_token)} J a token that counts` : null;
    const shown = [
      ["Energy of the GPUs", isNumber(used.joules) ? `${format.quantity(used.joules)}J` : NOT_MEASURED, used.no_energy || perToken],
      ["GPU-hours", isNumber(used.gpu_hours) ? digits(used.gpu_hours) : NOT_MEASURED, used.no_gpu_hours || "held by the run: starts, restarts and idle nodes too"],
      // Where the hours are not known the row above says why.
      ...(isNumber(used.idle_gpu_hours) ? [["of them idle", digits(used.idle_gpu_hours), "nodes that stood by, or that a smaller layout left out"]] : []),
      ["Cost", isNumber(used.cost) ? [used.cost.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 }), used.currency].filter(Boolean).join(" ") : NOT_MEASURED, used.no_cost || "GPU-hours × cluster.price_per_gpu_hour"],
    ];
    return [runs.length > 1 ? el("h3", null, run.name) : null, el("dl", { class: "figures" }, shown.map(([title, value, note]) => el("div", null, el("dt", null, title), el("dd", null, value, note ? el("small", null, note) : null))))];
  });
  const power = stepPlot(runs, "power_w", { title: "Power of a GPU", unit: "watts, mean since the reading before", show: format.small, fromZero: true });
  return section("energy", "Energy and cost", items, power ? el("div", { class: "plots" }, power) : null);
}

function keyTable(titles, keys, label) {
  const rows = Object.entries(keys).map(([key, values]) => ({ key, values }));
  const columns = [{ key: "key", title: "key", isText: true }, ...titles.map((title, index) => ({ key: `v${index}`, title, isText: true, value: (row) => row.values[index] ?? null, show: format.value }))];
  return table(columns, rows, { label, isFiltered: rows.length > 12, most: 400, example: "part of a key" });
}

function configSection(runs, differences) {
  const parts = [];
  if (differences) parts.push(Object.keys(differences).length ? [el("h3", null, "What differs between the runs"), keyTable(runs.map((run) => run.name), differences, "What differs between the runs")] : el("p", { class: "quiet" }, "the runs' configurations are the same"));
  for (const run of runs) {
    if (runs.length > 1) parts.push(el("h3", null, run.name));
    if (run.overrides.length) parts.push(el("p", null, run.overrides.map((text) => [el("code", null, text), " "])));
    if (run.changes) parts.push(el("h3", null, "What resumes changed"), keyTable(run.changes.titles, run.changes.keys, `What resumes of ${run.name} changed`));
    const keys = Object.fromEntries(Object.entries(run.config).map(([key, value]) => [key, [value]]));
    parts.push(Object.keys(keys).length ? behind(`All ${Object.keys(keys).length} keys`, () => keyTable(["value"], keys, `Configuration of ${run.name}`)) : el("p", { class: "quiet" }, "config.yaml is missing or damaged"));
  }
  return section("configuration", "Configuration", parts);
}

function runSections(data) {
  const runs = data.runs;
  const isAlone = runs.length === 1;
  const top = isAlone ? head(runs[0], true) : [el("h1", null, `${runs.length} runs side by side`), runs.map((run) => el("div", { class: "section" }, head(run, false)))];
  return [top, lossSection(runs), gradientSection(runs), speedSection(runs), goodputSection(runs), attemptsSection(runs), heatSection(runs), memorySection(runs), checkpointSection(runs), expertSection(runs), profileSection(runs), energySection(runs), configSection(runs, data.differences)];
}
