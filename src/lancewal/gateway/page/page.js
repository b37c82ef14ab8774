// The operator's page: asks /status.json from time to time and draws it. Texts of the table are set as text,
// never as markup.
"use strict";

const REFRESH = 5000;
let shown = null;      // the name of the table that is shown
let token = sessionStorage.getItem("lancewal-token");

function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

function count(number) {
  return number === null || number === undefined ? "?" : number.toLocaleString("en");
}

function plural(number, one) {
  return `${count(number)} ${one}${number === 1 ? "" : "s"}`;
}

function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (bytes >= 1000 && power < units.length - 1) { bytes /= 1000; power += 1; }
  return `${power ? bytes.toFixed(1) : bytes} ${units[power]}`;
}

function age(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

function milliseconds(value) {
  return value === undefined ? "–" : value < 10 ? `${value.toFixed(2)} ms` : `${Math.round(value)} ms`;
}

// Lines over the last looks; a look without a value leaves a gap.
function chart(series) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const length = Math.max(2, ...series.map((each) => each.values.length));
  const top = Math.max(1e-9, ...series.flatMap((each) => each.values.filter((v) => v !== undefined)));
  svg.setAttribute("viewBox", `0 0 ${length - 1} 100`);
  svg.setAttribute("preserveAspectRatio", "none");
  for (const { values, color } of series) {
    let pen = "M";
    let path = "";
    values.forEach((value, place) => {
      if (value === undefined) { pen = "M"; return; }
      path += `${pen}${place} ${98 - (value / top) * 94}`;
      pen = "L";
    });
    const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
    line.setAttribute("d", path);
    line.style.stroke = `var(--${color})`;
    svg.append(line);
  }
  return { svg, top };
}

function chartCard(title, now, looks, series, format) {
  const { svg, top } = chart(series);
  const span = looks.length > 1 ? (new Date(looks.at(-1).at) - new Date(looks[0].at)) / 1000 : 0;
  const since = span ? `the last ${age(span)}` : "no history yet";
  const none = series.every((each) => each.values.every((value) => value === undefined));
  return make("section", { class: "card" },
    make("h2", {}, title), make("div", { class: "figure" }, now), svg,
    make("div", { class: "legend" }, make("span", {}, since), make("span", {}, none ? "" : `most ${format(top < 1e-6 ? 0 : top)}`)));
}

function levelCard(title, looks, name, color) {
  const values = looks.map((look) => look[name]);
  return chartCard(title, count(values.at(-1)), looks, [{ values, color }], count);
}

function card(title, figure, ...lines) {
  return make("section", { class: "card" }, make("h2", {}, title), make("div", { class: "figure" }, figure),
    ...lines.map((line) => make("div", { class: "quiet" }, line)));
}

function calls(looks, kinds) {
  const found = looks.map((look) => kinds.map((kind) => look.calls[kind]).filter(Boolean));
  const of = (name) => found.map((each) => (each.length ? Math.max(...each.map((one) => one[name])) : undefined));
  const last = [...found].reverse().find((each) => each.length);
  return { half: of("p50_ms"), most: of("p99_ms"), last: last && Math.max(...last.map((one) => one.p50_ms)) };
}

function latencyCard(title, looks, kinds) {
  const { half, most, last } = calls(looks, kinds);
  const series = [{ values: most, color: "second" }, { values: half, color: "sst" }];
  return chartCard(title, last === undefined ? "none yet" : `${milliseconds(last)} p50`, looks, series, (top) => `${milliseconds(top)} p99`);
}

function levels(shard, widest) {
  const wal = shard.unflushed.bytes;
  const sst = shard.uncompacted.bytes;
  const bar = make("div", { class: "bar", title: `log ${size(wal)}, SSTables ${size(sst)}` });
  for (const [kind, bytes] of [["wal", wal], ["sst", sst]]) {
    const part = make("i", { class: kind });
    part.style.width = `${widest ? (bytes / widest) * 100 : 0}%`;
    bar.append(part);
  }
  return bar;
}

function rowsOf(head, rows) {
  const cell = (tag, [text, kind]) => make(tag, kind ? { class: kind } : {}, text);
  return make("table", {},
    make("thead", {}, make("tr", {}, ...head.map((each) => cell("th", each)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((each) => cell("td", each))))));
}

function shardTable(status) {
  const widest = Math.max(0, ...status.shards.map((shard) => shard.unflushed.bytes + shard.uncompacted.bytes));
  const owner = {};
  for (const each of status.owners) {
    if (!each.gone) for (const shard of Object.keys(each.shards)) owner[shard] = `${each.pid} on ${each.host}`;
  }
  const head = [["shard"], ["what waits: log, SSTables"], ["log entries", "number"], ["oldest", "number"],
    ["SSTables", "number"], ["rows", "number"], ["oldest", "number"], ["base holds", "number"], ["epoch", "number"], ["owner"], ["state"]];
  const rows = status.shards.map((shard) => {
    const values = Object.values(shard.values);
    const { unflushed, uncompacted } = shard;
    return [
      [values.length ? values.join(", ") : shard.shard_id.slice(0, 8)], [levels(shard, widest)],
      [count(unflushed.count), "number"], [unflushed.count ? age(unflushed.seconds) : "", "number"],
      [count(uncompacted.count), "number"], [count(uncompacted.rows), "number"],
      [uncompacted.count ? age(uncompacted.seconds) : "", "number"],
      [count(shard.compacted_generation), "number"], [count(shard.epoch), "number"],
      [owner[shard.shard_id] || "nobody"], [shard.status, shard.status === "sealed" ? "warn" : ""],
    ];
  });
  return make("section", { class: "card wide", id: "shards" }, make("h2", {}, plural(rows.length, "shard")), rowsOf(head, rows));
}

function ownerTable(status) {
  if (!status.owners.length) return null;
  const head = [["process"], ["address"], ["shards", "number"], ["heard of", "number"], ["state"]];
  const rows = status.owners.map((each) => [
    [`${each.pid} on ${each.host}`], [each.address || "none"], [count(Object.keys(each.shards).length), "number"],
    [`${age(each.age_seconds)} ago`, "number"], [each.gone ? "gone" : "writes", each.gone ? "warn" : "good"],
  ]);
  return make("section", { class: "card wide" }, make("h2", {}, "who writes"), rowsOf(head, rows));
}

function indexTable(status) {
  if (!status.indexes.length) return null;
  const head = [["index"], ["kind"], ["columns"], ["rows", "number"], ["behind", "number"]];
  const rows = status.indexes.map((each) => [
    [each.name], [each.kind], [each.columns.join(", ")], [count(each.rows_covered), "number"],
    [count(each.rows_behind), each.rows_behind ? "number warn" : "number"],
  ]);
  return make("section", { class: "card wide" }, make("h2", {}, "indexes of the base table"), rowsOf(head, rows));
}

function draw(table) {
  const { status, looks } = table;
  if (status === null) return [make("p", { class: "quiet" }, "the first look at the table is under way …")];
  const { unflushed, uncompacted, base } = status;
  return [
    make("p", { class: "quiet", id: "uri" }, `${table.uri} · ${status.sharding} · ${status.primary_key.length ? `key ${status.primary_key.join(", ")}` : "append-only"}`),
    make("div", { class: "cards" },
      card("base table", plural(base.rows, "row"), `${plural(base.fragments, "fragment")}, version ${count(base.version)}`),
      card("in logs only", `${count(unflushed.count)} ${unflushed.count === 1 ? "entry" : "entries"}`, size(unflushed.bytes), unflushed.count ? `oldest ${age(unflushed.seconds)}` : "nothing waits"),
      card("in SSTables", plural(uncompacted.count, "SSTable"), `${uncompacted.rows === null ? "" : `${plural(uncompacted.rows, "row")}, `}${size(uncompacted.bytes)}`, uncompacted.count ? `oldest ${age(uncompacted.seconds)}` : "nothing waits")),
    make("div", { class: "cards" },
      latencyCard("put", looks, ["put", "delete"]),
      latencyCard("search", looks, ["vector_search", "full_text_search", "hybrid_search"]),
      latencyCard("lookup", looks, ["lookup"]),
      levelCard("SSTables of the fullest shard", looks, "sstables_of_a_shard", "sst"),
      levelCard("log entries that wait", looks, "unflushed_entries", "wal"),
      levelCard("rows that an index lacks", looks, "index_rows_behind", "base")),
    shardTable(status), indexTable(status), ownerTable(status), checkpointTable(status),
    upkeepTable(table.upkeep),
  ];
}

function checkpointTable(status) {
  if (!status.checkpoints.length) return null;
  const head = [["checkpoint"], ["age", "number"], ["base version", "number"], ["holds back", "number"], ["until"]];
  const rows = status.checkpoints.map((each) => [
    [each.name], [age(each.age_seconds), "number"], [each.version === null ? "" : count(each.version), "number"],
    [`${plural(each.held.count, "file")}, ${size(each.held.bytes)}`, "number"],
    each.problem ? [each.problem, "bad"] : [each.expires ? new Date(each.expires).toLocaleString() : "it is dropped"],
  ]);
  return make("section", { class: "card wide", id: "checkpoints" }, make("h2", {}, "checkpoints"), rowsOf(head, rows));
}

function upkeepTable(history) {
  if (!history.length) return null;
  const head = [["when"], ["what"], ["by"], ["took", "number"], ["outcome"]];
  const rows = history.map((each) => [
    [new Date(each.at).toLocaleTimeString()], [each.work], [`${each.pid} on ${each.host}`],
    [milliseconds(each.seconds * 1000), "number"],
    each.failures ? [Object.values(each.failed).join("; "), "bad"] : [each.done || "nothing was done", "good"],
  ]);
  return make("section", { class: "card wide", id: "upkeep" }, make("h2", {}, "upkeep"), rowsOf(head, rows));
}

function say(trouble) {
  const line = document.getElementById("trouble");
  line.hidden = !trouble;
  line.textContent = trouble || "";
  line.className = "bad";
}

function show(document_) {
  const state = document.getElementById("state");
  state.textContent = document_.ready ? `ready, ${plural(document_.calls, "call")} under way` : "stopping";
  state.className = `pill ${document_.ready ? "good" : "warn"}`;
  document.getElementById("address").textContent = document_.address;
  const names = Object.keys(document_.tables);
  if (!names.includes(shown)) shown = names[0];
  document.getElementById("tables").replaceChildren(...names.map((name) =>
    make("button", { type: "button", ...(name === shown ? { "aria-current": "page" } : {}), onclick: () => { shown = name; show(document_); } }, name)));
  const table = document_.tables[shown];
  document.getElementById("table").replaceChildren(...draw(table).filter((each) => each !== null));
  say(table.error);
}

async function ask() {
  try {
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    const answer = await fetch("status.json", { headers, cache: "no-store" });
    document.getElementById("token").hidden = answer.status !== 401;
    if (answer.status === 404) say("figures are shown on this machine alone, or with a read token (--read-tokens)");
    else if (answer.status === 401) say(token ? "this token is not the right one" : "");
    else show(await answer.json());
  } catch (error) {
    document.getElementById("state").textContent = "no answer";
    document.getElementById("state").className = "pill bad";
    say("the gateway does not answer");
  }
}

document.getElementById("token").addEventListener("submit", (event) => {
  event.preventDefault();
  token = event.target.querySelector("input").value;
  sessionStorage.setItem("lancewal-token", token);
  ask();
});
ask();
setInterval(ask, REFRESH);
