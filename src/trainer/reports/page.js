"use strict";
// Draws the curves of the report and keeps them together: one legend, one x axis, one zoom for all plots.

const report = JSON.parse(document.getElementById("report").textContent);
const COLOURS = [
  "#3b7ddd", "#e0702c", "#2f9e63", "#b0519f", "#c99a1c", "#1fa2b3", "#d5455c", "#7c6cd5", "#81893a", "#8e6c58",
];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const DASH_ARRAYS = ["", "6 4", "2 3", "6 3 2 3", "11 4", "11 3 2 3"];
const AXES = {
  step: { title: "step", hover: ",d" },
  tokens: { title: "tokens", hover: ",d" },
  hours: { title: "hours", hover: ".3~f" },
};
const MARKS = {
  skipped: { symbol: "x-thin-open", size: 9, width: 2, text: "update skipped" },
  spike: { symbol: "triangle-up-open", size: 9, width: 1.5, text: "spike" },
};
const SPARSE = 60;
const CLIPPED = 0.02;
const STORE = "report:" + location.pathname;

// What the reader has chosen outlives a reload.
const state = { axis: "step", logX: false, smooth: true, clip: false, hidden: [], range: null, logY: {}, open: {}, scroll: 0 };
try {
  Object.assign(state, JSON.parse(sessionStorage.getItem(STORE) || "{}"));
} catch {
  // Storage may be barred for local files: then every load starts anew.
}

function save() {
  state.scroll = window.scrollY;
  try {
    sessionStorage.setItem(STORE, JSON.stringify(state));
  } catch {
    // As above.
  }
}

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") node.addEventListener("click", value);
    else if (value !== null) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// Plotly reads a small markup in its texts.
function plotlyText(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function numbers(packed) {
  const bytes = Uint8Array.from(atob(packed.bdata), (c) => c.charCodeAt(0));
  return packed.dtype === "i4" ? new Int32Array(bytes.buffer) : new Float64Array(bytes.buffer);
}

const colour = (run) => COLOURS[run % COLOURS.length];
const isHidden = (run) => state.hidden.includes(report.runs[run]);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const isDark = window.matchMedia("(prefers-color-scheme: dark)");
const cards = [];
for (const section of report.sections) {
  for (const card of section.cards) {
    for (const curve of card.curves) {
      curve.y = numbers(curve.y);
      for (const axis in curve.x) curve.x[axis] = numbers(curve.x[axis]);
    }
    cards.push(card);
  }
}
const hasAxis = (axis) => cards.some((card) => card.curves.some((curve) => curve.x[axis].some(Number.isFinite)));
if (!hasAxis(state.axis)) state.axis = "step";

function traceOf(card, curve) {
  const mark = MARKS[curve.kind];
  const faint = card.smoothed && state.smooth && curve.kind === "raw";
  const bare = curve.kind === "smooth" && !state.smooth;
  const variant = card.variants.length > 1 ? ` ${card.variants[curve.variant]}` : "";
  const name = plotlyText(report.runs[curve.run] + variant);
  const few = curve.y.length <= SPARSE && !card.smoothed;
  return {
    type: "scatter",
    x: curve.x[state.axis],
    y: curve.y,
    name: mark ? `${name}: ${mark.text}` : name,
    mode: mark ? "markers" : few ? "lines+markers" : "lines",
    visible: !isHidden(curve.run) && !bare,
    opacity: faint ? (isDark.matches ? 0.5 : 0.35) : 1,
    hoverinfo: faint || mark ? "skip" : "all",
    hovertemplate: faint || mark ? null : "%{fullData.name}: %{y:.5~g}<extra></extra>",
    line: { color: colour(curve.run), width: curve.kind === "smooth" ? 2 : faint ? 1 : 1.6, dash: dashOf(curve) },
    marker: mark
      ? { symbol: mark.symbol, size: mark.size, color: colour(curve.run), line: { width: mark.width, color: colour(curve.run) } }
      : { size: 5, color: colour(curve.run) },
  };
}

// More runs than colours: the next round of them is dashed.
function dashOf(curve) {
  return DASHES[(curve.variant + Math.floor(curve.run / COLOURS.length)) % DASHES.length];
}

function isLog(card) {
  return state.logY[card.key] ?? card.log;
}

function layoutOf(card) {
  const axis = AXES[state.axis];
  const line = { gridcolor: css("--line"), linecolor: css("--line"), zeroline: false, automargin: true };
  return {
    margin: { l: 52, r: 10, t: 8, b: 36 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 11.5, color: css("--soft") },
    showlegend: false,
    modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--soft"), activecolor: css("--accent") },
    hovermode: report.runs.length > 6 ? "closest" : "x unified",
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink"), size: 12 }, namelength: 40 },
    xaxis: {
      ...line,
      title: { text: axis.title, standoff: 4 },
      type: state.logX ? "log" : "linear",
      exponentformat: "B",
      spikecolor: css("--soft"),
      spikethickness: 1,
      hoverformat: axis.hover,
      ...xRange(),
    },
    yaxis: {
      ...line,
      type: isLog(card) ? "log" : "linear",
      tickformat: card.number,
      ...(isLog(card) ? { dtick: logTicks(card) } : {}),
      ...fitted(card),
    },
  };
}

// Between two powers of ten the ticks 1, 2, 5 are worth having; over many they would crowd.
function logTicks(card) {
  const [low, high] = extent(card, -Infinity, Infinity, true);
  return high / low > 1000 ? 1 : "D2";
}

// All plots show the same stretch of x, so that one lies under the other.
function xRange() {
  if (state.range) return { range: state.range, autorange: false };
  if (state.logX) return { autorange: true };
  let [low, high] = [Infinity, -Infinity];
  for (const card of cards) {
    for (const curve of card.curves) {
      if (isHidden(curve.run)) continue;
      for (const x of curve.x[state.axis]) {
        if (x < low) low = x;
        if (x > high) high = x;
      }
    }
  }
  if (low > high) return { autorange: true };
  const room = (high - low) * 0.015 || 1;
  return { range: [low - room, high + room], autorange: false };
}

function inView(card, from, to, positive) {
  const found = [];
  for (const curve of card.curves) {
    if (isHidden(curve.run) || (curve.kind === "smooth" && !state.smooth)) continue;
    const x = curve.x[state.axis];
    for (let i = 0; i < x.length; i++) {
      const y = curve.y[i];
      if (x[i] >= from && x[i] <= to && Number.isFinite(y) && (!positive || y > 0)) found.push(y);
    }
  }
  return Float64Array.from(found).sort();
}

function extent(card, from, to, positive) {
  const sorted = inView(card, from, to, positive);
  const cut = state.clip ? Math.floor(sorted.length * CLIPPED) : 0;
  return sorted.length ? [sorted[cut], sorted[sorted.length - 1 - cut]] : [Infinity, -Infinity];
}

// Zoomed along x, or without outliers, the y axis takes what is in view.
function fitted(card) {
  if (!state.range && !state.clip) return { autorange: true };
  const log = isLog(card);
  const range = state.range ?? [-Infinity, Infinity];
  const ends = state.range && state.logX ? range.map((end) => 10 ** end) : range;
  let [low, high] = extent(card, ends[0], ends[1], log);
  if (low > high) return { autorange: true };
  if (log) [low, high] = [Math.log10(low), Math.log10(high)];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.05 || 0.1;
  return { range: [low - room, high + room], autorange: false };
}

const OPTIONS = {
  responsive: true,
  displaylogo: false,
  // Named one by one: among the default buttons is one that sends the plot to a server.
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
};

function draw(card) {
  if (!card.plot || card.plot.closest("details:not([open])")) return;
  const traces = card.curves.map((curve) => traceOf(card, curve));
  Plotly.react(card.plot, traces, layoutOf(card), OPTIONS);
  if (!card.drawn) card.plot.on("plotly_relayout", (change) => zoomed(card, change));
  card.drawn = true;
}

const drawAll = () => cards.forEach(draw);

function zoomed(card, change) {
  if ("xaxis.range[0]" in change) state.range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
  else if (change["xaxis.autorange"]) state.range = null;
  else return;
  save();
  const others = "yaxis.range[0]" in change ? cards.filter((other) => other !== card) : cards;
  others.forEach(draw);
  drawControls();
}

function set(name, value) {
  state[name] = value;
  // A range of one axis says nothing on another.
  if (name === "axis" || name === "logX") state.range = null;
  save();
  drawControls();
  drawAll();
}

function choice(label, pressed, onclick, disabled = false) {
  const button = element("button", { class: "choice", type: "button", "aria-pressed": String(pressed), onclick }, label);
  button.disabled = disabled;
  return button;
}

function runButton(name, run) {
  const swatch = element("i", { class: "swatch" });
  swatch.style.background = colour(run);
  const toggle = (event) => {
    if (event.altKey || event.shiftKey) {
      const others = report.runs.filter((other) => other !== name);
      set("hidden", others.every((other) => state.hidden.includes(other)) ? [] : others);
    } else set("hidden", isHidden(run) ? state.hidden.filter((other) => other !== name) : [...state.hidden, name]);
  };
  const hint = `${name}\nClick: hide or show. Shift-click: this one alone.`;
  const attributes = { class: "run", type: "button", title: hint, "aria-pressed": String(!isHidden(run)), onclick: toggle };
  return element("button", attributes, swatch, name);
}

function drawControls() {
  const axes = Object.keys(AXES).map((axis) =>
    choice(AXES[axis].title, state.axis === axis, () => set("axis", axis), !hasAxis(axis)));
  const groups = [
    element("div", { class: "group" }, element("span", {}, "x axis"), ...axes,
      choice("log", state.logX, () => set("logX", !state.logX))),
    element("div", { class: "group" }, choice("smooth", state.smooth, () => set("smooth", !state.smooth)),
      choice("clip outliers", state.clip, () => set("clip", !state.clip))),
  ];
  if (report.runs.length > 1) groups.unshift(element("div", { class: "group" }, ...report.runs.map(runButton)));
  if (state.range) {
    groups.push(element("div", { class: "group" },
      element("button", { type: "button", onclick: () => set("range", null) }, "reset zoom")));
  }
  document.getElementById("controls").replaceChildren(...groups);
}

function dashSample(index) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const line = document.createElementNS(space, "line");
  for (const [name, value] of Object.entries({ width: 24, height: 8 })) svg.setAttribute(name, value);
  const attributes = { x1: 0, y1: 4, x2: 24, y2: 4, stroke: "currentColor", "stroke-width": 2 };
  for (const [name, value] of Object.entries(attributes)) line.setAttribute(name, value);
  line.setAttribute("stroke-dasharray", DASH_ARRAYS[index % DASH_ARRAYS.length]);
  svg.append(line);
  return svg;
}

function cardOf(card) {
  const log = element("button", { class: "small", type: "button", title: "Logarithmic y axis" }, "log");
  log.setAttribute("aria-pressed", String(isLog(card)));
  log.addEventListener("click", () => {
    state.logY[card.key] = !isLog(card);
    log.setAttribute("aria-pressed", String(isLog(card)));
    save();
    draw(card);
  });
  const keys = element("span", { class: "keys" });
  if (card.variants.length > 1) {
    card.variants.forEach((variant, index) => keys.append(element("span", {}, dashSample(index), variant)));
  } else if (card.variants.length === 1) keys.append(card.variants[0]);
  const title = element("h3", {}, element("b", {}, card.title), element("span", { class: "unit" }, card.unit), keys, log);
  card.plot = element("div", { class: "plot" });
  return element("article", { class: card.wide ? "card wide" : "card" }, title, card.plot);
}

function sectionOf(section) {
  for (const card of section.cards) card.key = `${section.title}/${card.title}/${card.unit}`;
  const grid = element("div", { class: "grid" }, ...section.cards.map(cardOf));
  const heading = element("h2", {}, section.title);
  const note = section.note ? [element("p", { class: "note" }, section.note)] : [];
  if (!section.folded) return element("section", {}, heading, grid, ...note);
  const details = element("details", { "data-fold": section.title }, element("summary", {}, heading), grid, ...note);
  details.addEventListener("toggle", () => section.cards.forEach(draw));
  return details;
}

function keepFolds() {
  for (const details of document.querySelectorAll("details")) {
    details.open = Boolean(state.open[details.dataset.fold]);
    details.addEventListener("toggle", () => {
      state.open[details.dataset.fold] = details.open;
      save();
    });
  }
}

let isPressed = false;
function refresh() {
  // Not while somebody drags, and not where nobody looks.
  if (isPressed || document.hidden) return void setTimeout(refresh, 500);
  save();
  location.reload();
}

for (const swatch of document.querySelectorAll(".swatch[data-run]")) {
  swatch.style.background = colour(Number(swatch.dataset.run));
}
const plots = document.getElementById("plots");
plots.append(...report.sections.map(sectionOf));
if (!report.sections.length) plots.append(element("p", { class: "empty" }, "No step is on record yet."));
keepFolds();
drawControls();
drawAll();
history.scrollRestoration = "manual";
window.scrollTo(0, state.scroll);
window.addEventListener("scroll", save, { passive: true });
window.addEventListener("pointerdown", () => { isPressed = true; });
window.addEventListener("pointerup", () => { isPressed = false; });
isDark.addEventListener("change", drawAll);
if (report.refresh !== null) setTimeout(refresh, Math.max(1, report.refresh) * 1000);
