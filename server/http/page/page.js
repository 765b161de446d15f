"use strict";
// Draws what GET /events says, and chats over /v1/chat/completions. Text from outside only ever
// becomes text: nothing here parses HTML. `watch` is what a test looks at.

const byId = (id) => document.getElementById(id);
const [FREE, CACHED, OWN, PUBLISHED, SHARED, COPIED] = [0, 1, 2, 3, 4, 5];
const NOBODY = 8191;
const WORDS = {
  [FREE]: "free", [CACHED]: "cached: can be found, held by nobody", [OWN]: "held by one sequence",
  [PUBLISHED]: "held by one, and can be found", [SHARED]: "held by several", [COPIED]: "being copied",
};
const RETRY_MS = 2000;
const RATE_MS = 1000;
const POOL_HEIGHT = 380;

let key = sessionStorage.getItem("mlxtape-key") || "";
const watch = { snapshot: null, pools: [], chosen: -1, drawn: 0 };

function make(tag, text, properties = {}) {
  const made = Object.assign(document.createElement(tag), properties);
  if (text !== undefined) made.textContent = text;
  return made;
}

function say(id, text) {
  const at = byId(id);
  if (at.textContent !== text) at.textContent = text;
}

const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});

// ---- API key

function askForKey() {
  say("key-said", key ? "That key is not known here." : "");
  byId("key-form").hidden = false;
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  sessionStorage.setItem("mlxtape-key", key);
  byId("key").value = "";
  byId("key-form").hidden = true;
  follow();
});

// ---- Server-sent events over fetch, which unlike EventSource can send a key

async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    for (let end; (end = held.indexOf("\n\n")) >= 0; held = held.slice(end + 2)) {
      const data = held.slice(0, end).split("\n").filter((line) => line.startsWith("data: "));
      if (data.length) yield data.map((line) => line.slice(6)).join("\n");
    }
  }
}

async function errorOf(response) {
  const body = await response.json().catch(() => ({}));
  return (body.error && body.error.message) || `The server answered ${response.status}.`;
}

function showState(kind, text) {
  byId("state").className = `state ${kind}`;
  say("status", text);
}

let following = false;
async function follow() {
  if (following) return;
  following = true;
  try {
    for (;;) {
      try {
        const response = await fetch("/events", { headers: headers() });
        if (response.status === 401) { showState("waiting", "asks for a key"); askForKey(); return; }
        if (!response.ok) throw new Error(await errorOf(response));
        name();
        for await (const data of eventsOf(response)) show(JSON.parse(data));
        showState("down", "no longer there; looking again");
      } catch (error) {
        showState("down", `cannot be watched: ${error.message}`);
      }
      await new Promise((done) => setTimeout(done, RETRY_MS));
    }
  } finally {
    following = false;
  }
}

async function name() {
  const read = async (path) => {
    const response = await fetch(path, { headers: headers() });
    return response.ok ? response.json() : {};
  };
  const [models, version] = await Promise.all([read("/v1/models"), read("/version")]);
  const model = models.data && models.data[0];
  if (model) say("model", model.id);
  const context = model && model.max_model_len ? `, ${model.max_model_len} tokens of context` : "";
  say("about", `mlxtape ${version.version || ""}${context}`);
  document.title = model ? `${model.id} - mlxtape` : "mlxtape";
}

// ---- Load

let rateFrom = null;
function rateOf(now) {
  if (!now.running) { rateFrom = null; return 0; }
  if (!rateFrom) rateFrom = { at: now.at_ms, tokens: now.generation_tokens, rate: null };
  const passed = now.at_ms - rateFrom.at;
  if (passed >= RATE_MS) {
    const rate = (now.generation_tokens - rateFrom.tokens) * 1000 / passed;
    rateFrom = { at: now.at_ms, tokens: now.generation_tokens, rate };
  }
  return rateFrom.rate;
}

const percent = (part, whole) => (whole ? `${Math.round(100 * part / whole)} %` : "\u2013");

function show(now) {
  watch.snapshot = now;
  showState(now.healthy ? "ok" : "down", now.healthy ? "serves" : "its engine has stopped");
  const blocks = now.pools.reduce((sum, pool) => sum + pool.num_blocks, 0);
  const held = now.pools.reduce((sum, pool) => sum + pool.held, 0);
  const rate = rateOf(now);
  say("running", `${now.running}`);
  say("waiting", `${now.waiting}`);
  say("kv", blocks ? `${percent(held, blocks)}` : "no pool");
  say("rate", rate === null ? "\u2026" : rate.toFixed(rate < 10 ? 1 : 0));
  say("hits", percent(now.prefix_hits, now.prefix_queries));
  say("preempted", `${now.preemptions}`);
  say("wrong", `${now.divergences}`);
  byId("wrong-box").classList.toggle("alarm", now.divergences > 0);
  say("step", `after step ${now.step}`);
  showSequences(now);
  showPools(now);
  watch.drawn += 1;
}

// ---- Sequences

const hue = (seq) => Math.round(seq * 137.508 + 205) % 360;
const light = () => getComputedStyle(document.documentElement).getPropertyValue("--light").trim();
const colourOf = (seq) => `hsl(${hue(seq)} 62% ${light()})`;

function showSequences(now) {
  const box = byId("sequences");
  const focused = document.activeElement && document.activeElement.dataset.seq;
  if (!now.sequences.some((it) => it.seq === watch.chosen)) watch.chosen = -1;
  if (!now.sequences.length) { box.replaceChildren(make("p", "None has rows in the pool now.", { className: "hint" })); return; }
  const table = make("table"), head = table.insertRow();
  for (const title of ["sequence", "prompt", "answer", "rows", "shared at start"]) head.append(make("th", title, { scope: "col" }));
  for (const it of now.sequences) {
    const row = table.insertRow();
    const button = make("button", `${it.seq}`, { type: "button", title: "Show its blocks" });
    button.dataset.seq = it.seq;
    button.style.borderLeftColor = colourOf(it.seq);
    button.setAttribute("aria-pressed", `${it.seq === watch.chosen}`);
    button.addEventListener("click", () => { watch.chosen = it.seq === watch.chosen ? -1 : it.seq; show(watch.snapshot); });
    row.insertCell().append(button);
    for (const value of [it.prompt, it.answer, it.rows, it.adopted]) row.insertCell().textContent = value;
  }
  box.replaceChildren(table);
  if (now.sequences_left_out) box.append(make("p", `and ${now.sequences_left_out} more`, { className: "hint" }));
  if (focused) { const again = box.querySelector(`[data-seq="${focused}"]`); if (again) again.focus(); }
}

// ---- Pool map

function cellsOf(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Uint16Array(bytes.buffer);
}

function showPools(now) {
  const box = byId("pools");
  if (watch.pools.length !== now.pools.length) {
    watch.pools = now.pools.map((_, place) => newPool(place));
    box.replaceChildren(...watch.pools.flatMap((it) => [it.title, it.canvas]));
  }
  if (!now.pools.length) box.replaceChildren(make("p", "This model holds its own caches: there is no pool to show."));
  now.pools.forEach((pool, place) => {
    const it = watch.pools[place];
    it.pool = pool;
    it.cells = cellsOf(pool.cells);
    const each = pool.each > 1 ? `, ${pool.each} a cell` : "";
    const kind = now.pools.length > 1 ? `${pool.kind} layers: ` : "";
    const text = `${kind}${pool.num_blocks} blocks of ${now.block_size} tokens${each}: ${pool.held} held, ${pool.cached} cached, ${pool.free} free`;
    if (it.title.textContent !== text) { it.title.textContent = text; it.canvas.setAttribute("aria-label", `Map of ${text}`); }
    draw(it);
  });
}

function newPool(place) {
  const it = { place, title: make("p"), canvas: make("canvas", undefined, { tabIndex: 0 }), at: -1, columns: 1, size: 8 };
  it.canvas.setAttribute("role", "img");
  it.canvas.addEventListener("pointermove", (event) => {
    const box = it.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / it.size), row = Math.floor((event.clientY - box.top) / it.size);
    point(it, column < it.columns ? row * it.columns + column : -1);
  });
  it.canvas.addEventListener("pointerleave", () => point(it, -1));
  it.canvas.addEventListener("blur", () => point(it, -1));
  it.canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: it.columns, ArrowUp: -it.columns };
    const to = { Home: 0, End: it.cells.length - 1 }[event.key] ?? (event.key in moves ? it.at + moves[event.key] : null);
    if (to === null) return;
    event.preventDefault();
    point(it, Math.max(0, Math.min(it.cells.length - 1, to)));
  });
  return it;
}

function point(it, at) {
  it.at = at >= 0 && at < it.cells.length ? at : -1;
  if (it.at >= 0) say("readout", readout(it));
  draw(it);
}

function readout(it) {
  const state = it.cells[it.at] >> 13, low = it.cells[it.at] & NOBODY, each = it.pool.each;
  if (each > 1) {
    const first = it.at * each, last = Math.min(first + each, it.pool.num_blocks) - 1;
    return `Blocks ${first} to ${last}: ${low} % held; ${WORDS[state]}`;
  }
  const holders = watch.snapshot.sequences.filter((_, place) => holds(it, place, it.at)).map((held) => held.seq);
  const named = holders.length > 12 ? `${holders.slice(0, 12).join(", ")} and others` : holders.join(", ");
  return `Block ${it.at}: ${WORDS[state]}${named ? ` (${holders.length > 1 ? "sequences" : "sequence"} ${named})` : ""}`;
}

// Whether the sequence at a place of the snapshot has a block: as its first holder, or beside it.
function holds(it, place, block) {
  if ((it.cells[block] & NOBODY) === place) return true;
  const runs = it.pool.also[place] || [];
  for (let at = 0; at < runs.length; at += 2) if (block >= runs[at] && block < runs[at] + runs[at + 1]) return true;
  return false;
}

function draw(it) {
  const style = getComputedStyle(document.documentElement);
  const colours = Object.fromEntries(["free", "cached", "shared", "mark", "focus", "line"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  const width = byId("pools").clientWidth, count = it.cells.length;
  it.size = [22, 18, 16, 14, 12, 10, 8, 7, 6, 5].find((size) => Math.ceil(count / Math.floor(width / size)) * size <= POOL_HEIGHT) || 4;
  it.columns = Math.max(1, Math.min(count, Math.floor(width / it.size)));
  const height = Math.ceil(count / it.columns) * it.size, scale = devicePixelRatio || 1;
  it.canvas.width = it.columns * it.size * scale;
  it.canvas.height = height * scale;
  it.canvas.style.width = `${it.columns * it.size}px`;
  it.canvas.style.height = `${height}px`;
  const pen = it.canvas.getContext("2d");
  pen.scale(scale, scale);
  const chosen = watch.snapshot.sequences.findIndex((held) => held.seq === watch.chosen);
  for (let at = 0; at < count; at += 1) {
    const state = it.cells[at] >> 13, low = it.cells[at] & NOBODY;
    const holder = it.pool.each > 1 ? null : watch.snapshot.sequences[low];
    const strength = it.pool.each > 1 ? Math.max(0.25, low / 100) : 1;
    const faded = chosen >= 0 && !(it.pool.each === 1 && holds(it, chosen, at));
    pen.globalAlpha = (faded ? 0.25 : 1) * strength;
    cell(pen, (at % it.columns) * it.size, Math.floor(at / it.columns) * it.size, it.size, state, holder, colours);
  }
  pen.globalAlpha = 1;
  if (it.at >= 0) {
    pen.strokeStyle = colours.focus;
    pen.lineWidth = 2;
    pen.strokeRect((it.at % it.columns) * it.size, Math.floor(it.at / it.columns) * it.size, it.size - 1, it.size - 1);
  }
}

// Five looks that differ in shape too: plain, hatched, filled, filled with a dot, filled and framed.
function cell(pen, x, y, size, state, holder, colours) {
  const gap = size > 6 ? 1 : 0.5, side = size - gap;
  pen.fillStyle = state === FREE || state === CACHED ? colours.free : holder ? colourAt(holder.seq) : colours.line;
  pen.fillRect(x, y, side, side);
  if (state === CACHED) {
    pen.fillStyle = colours.cached;
    pen.beginPath();
    pen.moveTo(x, y + side); pen.lineTo(x + side, y); pen.lineTo(x + side, y + side);
    pen.fill();
  } else if (state === PUBLISHED) {
    pen.fillStyle = colours.mark;
    const dot = Math.max(1.5, side * 0.32);
    pen.fillRect(x + (side - dot) / 2, y + (side - dot) / 2, dot, dot);
  } else if (state === SHARED || state === COPIED) {
    pen.strokeStyle = colours.shared;
    pen.lineWidth = Math.max(1, side * 0.16);
    const half = pen.lineWidth / 2;
    pen.setLineDash(state === COPIED ? [2, 2] : []);
    pen.strokeRect(x + half, y + half, side - 2 * half, side - 2 * half);
    pen.setLineDash([]);
  }
}

let known = new Map(), knownLight = "";
function colourAt(seq) {
  if (knownLight !== light()) { known = new Map(); knownLight = light(); }
  if (!known.has(seq)) { if (known.size > 4096) known.clear(); known.set(seq, colourOf(seq)); }
  return known.get(seq);
}

function showLegend() {
  const style = getComputedStyle(document.documentElement);
  const colours = Object.fromEntries(["free", "cached", "shared", "mark", "line"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  byId("legend").replaceChildren(...Object.entries(WORDS).map(([state, text]) => {
    const item = make("li"), canvas = make("canvas", undefined, { width: 16, height: 16 });
    canvas.setAttribute("aria-hidden", "true");
    cell(canvas.getContext("2d"), 0, 0, 16, Number(state), Number(state) >= OWN ? { seq: 0 } : null, colours);
    item.append(canvas, make("span", text));
    return item;
  }));
}

const redraw = () => { known.clear(); showLegend(); if (watch.snapshot) show(watch.snapshot); };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("resize", () => watch.pools.forEach((it) => it.cells && draw(it)));

// ---- Chat

let messages = [];
let asking = null;

function article(who) {
  const made = make("article"), text = make("p");
  made.append(make("h3", who), text);
  byId("log").append(made);
  return { made, text };
}

function append(at, text) {
  const log = byId("log"), end = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  at.append(document.createTextNode(text));
  if (end) log.scrollTop = log.scrollHeight;
}

function busy(on) {
  byId("send").disabled = on;
  byId("stop").disabled = !on;
  byId("log").setAttribute("aria-busy", `${on}`);
}

async function ask(content) {
  const said = messages;
  said.push({ role: "user", content });
  append(article("You").text, content);
  const { made, text } = article("Model"), started = performance.now();
  const answer = { content: "", first: 0, tokens: 0, finish: "" };
  asking = new AbortController();
  busy(true);
  try {
    await stream(said, made, text, answer, started);
  } catch (error) {
    if (error.name !== "AbortError") made.append(make("p", error.message, { className: "error" }));
    answer.finish = error.name === "AbortError" ? "stopped by you" : "failed";
  }
  // What was not answered at all is not part of the conversation.
  if (answer.content) said.push({ role: "assistant", content: answer.content });
  else said.pop();
  asking = null;
  busy(false);
  made.append(make("p", summary(answer, started), { className: "hint" }));
  byId("log").scrollTop = byId("log").scrollHeight;
}

async function stream(messages, made, text, answer, started) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST", signal: asking.signal, headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify({
      messages, stream: true, stream_options: { include_usage: true },
      max_tokens: byId("max").valueAsNumber || undefined,
      temperature: Number.isNaN(byId("temperature").valueAsNumber) ? undefined : byId("temperature").valueAsNumber,
    }),
  });
  if (response.status === 401) askForKey();
  if (!response.ok) throw new Error(await errorOf(response));
  let thought = null;
  for await (const data of eventsOf(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) answer.tokens = chunk.usage.completion_tokens;
    const choice = chunk.choices[0];
    if (!choice) continue;
    answer.finish = choice.finish_reason || answer.finish;
    if (choice.delta.reasoning_content) {
      if (!thought) { thought = make("p", undefined, { className: "thought" }); made.insertBefore(thought, text); }
      append(thought, choice.delta.reasoning_content);
    }
    if (!choice.delta.content) continue;
    answer.first = answer.first || performance.now();
    answer.content += choice.delta.content;
    append(text, choice.delta.content);
  }
}

function summary(answer, started) {
  const parts = [];
  if (answer.first) parts.push(`first text after ${((answer.first - started) / 1000).toFixed(2)} s`);
  if (answer.tokens) parts.push(`${answer.tokens} tokens`);
  const span = performance.now() - answer.first;
  if (answer.tokens > 1 && answer.first) parts.push(`${((answer.tokens - 1) * 1000 / span).toFixed(1)} a second`);
  return [...parts, `ended: ${answer.finish || "without a reason"}`].join(", ");
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const content = byId("message").value;
  if (asking || !content.trim()) return;
  byId("message").value = "";
  ask(content);
});
byId("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("ask").requestSubmit();
});
byId("stop").addEventListener("click", () => asking && asking.abort());
byId("clear").addEventListener("click", () => {
  if (asking) asking.abort();
  messages = [];
  byId("log").replaceChildren();
});

showLegend();
follow();
document.documentElement.dataset.ready = "yes";
