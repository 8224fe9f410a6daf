"use strict";
const page = JSON.parse(document.getElementById("data").textContent);
// Name, title and width: columns of longer texts have shares of the table.
const COLUMNS = [
  ["id", "#", "46px"], ["role", "role", "70px"], ["call", "call", "14%"], ["operator", "operator", "17%"],
  ["scope", "scope", "9%"], ["source", "source", "10.5%"], ["shape", "shape", "7%"], ["input", "input", "64px"],
  ["output", "output", "68px"], ["bad", "NaN/Inf", "76px"], ["rule", "paired by", "80px"],
];
const NUMBERS = new Set(["id", "input", "output", "bad"]);
const AT_ONCE = 100;
const state = { sort: "id", down: false, query: "", scope: "", rows: page.rows, drawn: 0, chosen: page.first };

const element = (tag, text, className) => {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  if (className) made.className = className;
  return made;
};
const short = (value) => {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number" || Number.isInteger(value)) return String(value);
  return value.toPrecision(3);
};
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function layout(extra) {
  const axis = { gridcolor: colour("line"), zerolinecolor: colour("line"), automargin: true };
  return {
    margin: { l: 50, r: 10, t: 10, b: 30 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("text"), size: 11 }, ...extra,
    xaxis: { ...axis, ...(extra.xaxis || {}) }, yaxis: { ...axis, ...(extra.yaxis || {}) },
  };
}

function drawChart() {
  const traces = Object.keys(page.roles).map((role) => {
    const rows = page.rows.filter((row) => row.role === role);
    return {
      type: "scatter", mode: "markers", name: role, x: rows.map((row) => row.id), y: rows.map((row) => row.drawn),
      customdata: rows.map((row) => row.id),
      text: rows.map((row) => `${row.operator}<br>${row.call}<br>${row.source}<br>${row.shape}`),
      hovertemplate: "%{text}<br>%{y:.3g}<extra>" + role + "</extra>",
      marker: { color: colour(role), size: role === "made" ? 11 : 6, symbol: role === "made" ? "diamond" : "circle" },
    };
  }).filter((trace) => trace.x.length);
  const chart = document.getElementById("chart");
  Plotly.react(chart, traces, layout({
    xaxis: { title: { text: "execution order" } }, yaxis: { type: "log", exponentformat: "e", title: { text: page.measure } },
    legend: { orientation: "h", y: 1.12 }, hovermode: "closest",
  }), { responsive: true, displaylogo: false });
  chart.removeAllListeners("plotly_click");
  chart.on("plotly_click", (event) => choose(event.points[0].customdata));
}

function matches(row) {
  const words = state.query.toLowerCase().split(/\s+/).filter(Boolean);
  const text = [row.operator, row.call, row.scope, row.module, row.source, row.code, row.role, row.shape].join(" ").toLowerCase();
  const inside = !state.scope || row.scope === state.scope || row.scope.startsWith(state.scope + "/");
  return inside && words.every((word) => text.includes(word));
}

function compareRows(one, other) {
  const [a, b] = [one[state.sort], other[state.sort]];
  const order = typeof a === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });
  return (state.down ? -order : order) || one.id - other.id;
}

function fill() {
  state.rows = page.rows.filter(matches).sort(compareRows);
  state.drawn = 0;
  document.querySelector("#calls tbody").replaceChildren();
  document.getElementById("shown").textContent = `${state.rows.length} of ${page.rows.length} calls`;
  for (const button of document.querySelectorAll("#calls th button")) {
    const sorted = button.dataset.name === state.sort;
    button.parentElement.setAttribute("aria-sort", sorted ? (state.down ? "descending" : "ascending") : "none");
    button.textContent = button.dataset.title + (sorted ? (state.down ? " ▾" : " ▴") : "");
  }
  drawMore();
}

function drawMore() {
  const body = document.querySelector("#calls tbody");
  for (const row of state.rows.slice(state.drawn, state.drawn + AT_ONCE)) {
    const line = element("tr");
    line.tabIndex = 0;
    line.dataset.id = row.id;
    for (const [name, , width] of COLUMNS) {
      const className = name === "role" ? row.role : NUMBERS.has(name) ? "number" : "";
      const text = NUMBERS.has(name) ? short(row[name]) : row[name];
      const cell = line.appendChild(element("td", width.endsWith("%") ? null : text, className));
      if (width.endsWith("%")) {
        cell.append(element("div", text));
        cell.title = text;
      }
    }
    body.append(line);
  }
  state.drawn = Math.min(state.drawn + AT_ONCE, state.rows.length);
}

function table(heads, rows) {
  const made = element("table");
  const head = element("tr");
  heads.forEach((text) => head.append(element("th", text)));
  made.append(head);
  for (const cells of rows) {
    const line = element("tr");
    cells.forEach((text, position) => line.append(element("td", short(text), position ? "number" : "")));
    made.append(line);
  }
  return made;
}

function drawTensor(tensor) {
  const box = element("div", null, "tensor");
  box.append(element("h3", `${tensor.slot}  ${tensor.dtypes.join(" → ")}  ${tensor.shape || ""}  ${tensor.agreement}`));
  if (tensor.reason) box.append(element("p", tensor.reason));
  if (tensor.metrics) box.append(table([], Object.entries(tensor.metrics)));
  const sides = ["golden", "target"].filter((side) => tensor[side]);
  if (sides.length) {
    const names = Object.keys(tensor[sides[0]]);
    box.append(table(["", ...sides], names.map((name) => [name, ...sides.map((side) => tensor[side][name])])));
  }
  document.getElementById("tensors").append(box);
  if (tensor.histogram) {
    const plot = box.appendChild(element("div", null, "plot"));
    const { edges, counts } = tensor.histogram;
    const traces = counts.map((values, side) => ({
      type: "scatter", mode: "lines", line: { shape: "hv" }, x: edges.slice(0, -1), y: values, name: sides[side] || "",
    }));
    Plotly.newPlot(plot, traces, layout({ showlegend: counts.length > 1, legend: { orientation: "h", y: 1.2 } }), { responsive: true, displayModeBar: false });
  }
  if (tensor.heat) {
    box.append(element("div", `errors in the worst slice ${tensor.heat.slice}`, "soft"));
    const plot = box.appendChild(element("div", null, "plot"));
    Plotly.newPlot(plot, [{ type: "heatmap", z: tensor.heat.cells, colorscale: "Viridis" }], layout({ yaxis: { autorange: "reversed" } }), { responsive: true, displayModeBar: false });
  }
}

function choose(id) {
  const row = page.rows[id];
  state.chosen = id;
  document.querySelectorAll("#calls tr.chosen").forEach((line) => line.classList.remove("chosen"));
  const line = document.querySelector(`#calls tr[data-id="${id}"]`);
  if (line) line.classList.add("chosen");
  const detail = document.getElementById("detail");
  detail.replaceChildren(element("h2", `${row.operator}  ${row.call}`));
  const told = [row.role + ": " + page.roles[row.role], row.reason, row.scope && `scope ${row.scope}`, row.module && `module ${row.module}`,
    row.source && `${row.source}  ${row.code}`, row.golden && `golden call ${row.golden}, paired by ${row.rule}: ${page.rules[row.rule]}`];
  told.filter(Boolean).forEach((text) => detail.append(element("div", text, "soft")));
  const tensors = element("div", null, "tensors");
  tensors.id = "tensors";
  detail.append(tensors);
  row.tensors.forEach(drawTensor);
}

const head = document.querySelector("#calls thead tr");
for (const [name, title, width] of COLUMNS) {
  const button = element("button", title);
  button.dataset.name = name;
  button.dataset.title = title;
  button.addEventListener("click", () => {
    state.down = state.sort === name ? !state.down : NUMBERS.has(name) && name !== "id";
    state.sort = name;
    fill();
  });
  const cell = head.appendChild(element("th"));
  cell.style.width = width;
  cell.append(button);
}
document.getElementById("search").addEventListener("input", (event) => { state.query = event.target.value; fill(); });
document.querySelectorAll("[data-scope]").forEach((button) => button.addEventListener("click", () => { state.scope = button.dataset.scope; fill(); }));
document.getElementById("scroll").addEventListener("scroll", (event) => {
  const box = event.target;
  if (box.scrollTop + box.clientHeight > box.scrollHeight - 200 && state.drawn < state.rows.length) drawMore();
});
const body = document.querySelector("#calls tbody");
const chosen = (event) => event.target.closest("tr") && choose(Number(event.target.closest("tr").dataset.id));
body.addEventListener("click", chosen);
body.addEventListener("keydown", (event) => { if (event.key === "Enter") chosen(event); });
function drawAll() {
  drawChart();
  if (state.chosen !== null) choose(state.chosen);
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
fill();
