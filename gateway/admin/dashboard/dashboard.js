// The dashboard: asks /api/v1/overview once a second while the page is looked at, and draws what it says.
"use strict";

const ASK_MS = 1000;
const ASK_AGAIN_MS = [1000, 2000, 3000, 5000];
const TIMEOUT_MS = 8000;
const SHOWN_SECONDS = 900; // as long as the gateway keeps its counts, one every 5 seconds
const GAP_SECONDS = 15; // with no counts for so long, charts show a gap
const FINE_SECONDS = 60; // what is older is drawn every 5 seconds
const RATE_SECONDS = 3; // a rate is that of so long a time: workers count in steps of up to a second
const TOKEN = "forebay-token";
const THEME = "forebay-theme";

const byId = (id) => document.getElementById(id);
let token = sessionStorage.getItem(TOKEN) || "";
let series = [];
let buckets = [];
let failures = 0;
let answeredAt = 0;
let timer = 0;
let asking = false;
let last = null;
let charts = []; // what is drawn, so that it can be drawn again with the pointer over it
let pointed = null; // the chart under the pointer, and where: 0 is its left end, 1 now
const unfolded = new Set();

// ---- building elements: what is shown is always text, never markup

function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}
function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}
function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(3)) if (child !== null && child !== false) element.append(child);
  return element;
}
function show(id, ...children) {
  // Nothing is replaced that stays the same; where something is, the focus stays on the button of the same name.
  const place = byId(id), made = h("div", {}, ...children);
  if (place.dataset.shown === made.innerHTML) return;
  const held = place.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  place.dataset.shown = made.innerHTML;
  place.replaceChildren(...made.childNodes);
  if (held) [...place.querySelectorAll("[data-key]")].find((one) => one.dataset.key === held)?.focus();
}
const button = (text, key, onclick, kind = "small") => h("button", { type: "button", class: kind, "data-key": key, onclick }, text);
const tag = (text, kind = "") => h("span", { class: `tag ${kind}` }, text);
// More than most want to see: closed until somebody opens it, and then open though it is drawn anew.
const fold = (key, title, ...content) => h("details", { open: unfolded.has(key), ontoggle: (event) => (event.target.open ? unfolded.add(key) : unfolded.delete(key)) }, h("summary", { "data-key": `fold ${key}` }, title), ...content);
const some = (key, noun, rows, count, drawn) => [drawn(rows.slice(0, count)), rows.length > count ? fold(key, `${counted(rows.length - count, noun)} more`, drawn(rows.slice(count))) : null];
const empty = (text) => h("p", { class: "empty" }, text);

// ---- figures as people read them

function bytes(count) {
  if (count === null || count === undefined) return "–";
  let unit = 0;
  for (; count >= 1024 && unit < 5; unit++) count /= 1024;
  return `${unit && count < 100 ? count.toFixed(1) : Math.round(count)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
}
const rate = (count) => (count === null || count === undefined ? "–" : `${bytes(count)}/s`);
const number = (count) => Math.round(count).toLocaleString("en");
const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
const perSecond = (count) => (count < 10 ? count.toFixed(1) : number(count)) + "/s";
const percent = (part) => (part === null || part === undefined ? "–" : `${(part * 100).toFixed(part >= 0.9995 ? 0 : 1)} %`);
function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds <= 0) return "0 s";
  if (seconds < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return seconds % 60 < 0.5 ? `${Math.floor(seconds / 60)} min` : `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}
// Of times that are known to the second at best.
const age = (seconds) => (seconds === null || seconds === undefined ? "–" : seconds < 1 ? "under a second" : span(Math.round(seconds)));
const ago = (at, now) => age(at === null || at === undefined ? null : now - at);
const date = (at) => (at === null || at === undefined ? "not known" : new Date(at * 1000).toLocaleString());
const limited = (text, most = 60) => (text.length > most ? `${text.slice(0, most / 2)}…${text.slice(-most / 2)}` : text);

// ---- asking the gateway

async function call(path, method = "GET", document = null) {
  const headers = {};
  if (token) headers.authorization = `Bearer ${token}`;
  if (document !== null) headers["content-type"] = "application/json";
  const answer = await fetch(path, {
    method, headers, body: document === null ? null : JSON.stringify(document),
    cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(method === "GET" ? TIMEOUT_MS : 120000),
  });
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw Object.assign(new Error(body.error || `the gateway has answered ${answer.status}`), { status: answer.status });
  return body;
}
async function ask() {
  clearTimeout(timer);
  if (asking || document.hidden) return;
  asking = true;
  let pause = ASK_MS;
  try {
    const overview = await call(`api/v1/overview${Date.now() - answeredAt < GAP_SECONDS * 1000 ? "" : "?history=true"}`);
    failures = 0;
    answeredAt = Date.now();
    byId("trouble").hidden = true;
    document.body.classList.remove("stale");
    take(overview);
  } catch (error) {
    pause = ASK_AGAIN_MS[Math.min(failures++, ASK_AGAIN_MS.length - 1)];
    if (error.status === 401) {
      pause = 0;
      askForToken();
    } else {
      const why = error.status ? error.message : "The gateway does not answer";
      byId("trouble").textContent = `${why}. ${answeredAt ? `These are the figures of ${new Date(answeredAt).toLocaleTimeString()}. ` : ""}This page goes on by itself when it answers again.`;
      byId("trouble").hidden = false;
      document.body.classList.add("stale");
    }
  } finally {
    asking = false;
  }
  if (pause) timer = setTimeout(ask, pause);
}
document.addEventListener("visibilitychange", ask);

// ---- series for the charts

function take(overview) {
  last = overview;
  buckets = overview.latency_buckets_seconds;
  const now = overview.counts.at;
  const found = [...series, ...overview.history, overview.counts].filter((one) => one.at <= now && one.at > now - SHOWN_SECONDS - GAP_SECONDS);
  series = [];
  for (const one of found.sort((first, second) => first.at - second.at)) {
    if (!series.length || one.at - series[series.length - 1].at > (one.at > now - FINE_SECONDS ? 0.2 : 4)) series.push(one);
  }
  if (series[series.length - 1] !== overview.counts) series[series.length - 1] = overview.counts;
  draw(overview, now);
}
// The counts between which rates at a place are taken; null where some are missing, or the gateway was started anew.
function pair(index) {
  let first = index - 1;
  while (first > 0 && series[index].at - series[first].at < RATE_SECONDS - 0.2) first--;
  const before = series[first], now = series[index];
  return now.at - before.at > GAP_SECONDS || now.requests < before.requests ? null : [before, now];
}
function points(value) {
  const found = [];
  for (let index = 1; index < series.length; index++) {
    const both = pair(index);
    found.push([series[index].at, both && value(...both)]);
  }
  return found;
}
const rates = (value) => points((before, now) => Math.max(0, value(now) - value(before)) / (now.at - before.at));
function quantile(name, part, before, now) {
  const counts = now[name].map((count, place) => Math.max(0, count - before[name][place]));
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (!total) return null;
  let left = total * part;
  for (let place = 0; place < counts.length; place++) {
    const low = place ? buckets[place - 1] : 0, high = place < buckets.length ? buckets[place] : low;
    if (left <= counts[place]) return low + (high - low) * (left / (counts[place] || 1));
    left -= counts[place];
  }
  return buckets[buckets.length - 1];
}
const quantiles = (name, part) => points((before, now) => quantile(name, part, before, now));
const latest = (points) => (points.length ? points[points.length - 1][1] : null);

function niceBytes(most) {
  let top = 1024;
  while (top < most) top *= 2;
  return top;
}
function niceCount(most) {
  let power = 10 ** Math.floor(Math.log10(Math.max(most, 1)));
  return [1, 2, 5, 10].map((one) => one * power).find((one) => one >= most) || 1;
}
function niceSeconds(most) {
  return [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60].find((one) => one >= most) || 60;
}
function charted(...drawn) {
  charts.push(drawn);
  chart(...drawn);
}
function point(id, event) {
  const box = byId(id).querySelector(".plot")?.getBoundingClientRect();
  pointed = event.type === "pointerleave" || !box ? null : { id, part: Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) };
  for (const drawn of charts) chart(...drawn);
}
for (const id of ["throughput", "latency", "requests", "ratio"]) {
  for (const type of ["pointermove", "pointerdown", "pointerleave"]) byId(id).addEventListener(type, (event) => point(id, event));
}
// What every line was at a time, in words.
function valuesAt(at, lines, text) {
  const value = (line) => line.points.reduce((best, one) => (Math.abs(one[0] - at) < Math.abs(best[0] - at) ? one : best), [-Infinity, null]);
  return lines.map((line) => {
    const [when, found] = value(line);
    return h("div", {}, h("span", { class: line.kind }, h("i")), `${line.name} `, h("b", {}, Math.abs(when - at) > GAP_SECONDS || found === null ? "–" : text(found)));
  });
}
function chart(id, lines, text, nice, fixedTop = null) {
  const width = 600, now = last.counts.at, shown = Math.min(SHOWN_SECONDS, Math.max(60, now - series[0].at));
  const at = pointed && now - shown * (1 - pointed.part);
  const most = Math.max(0, ...lines.flatMap((line) => line.points.map(([, value]) => value ?? 0)));
  const top = fixedTop ?? nice(most);
  const x = (at) => width * (1 - (now - at) / shown), y = (value) => 118 - (104 * Math.min(value, top)) / top;
  const paths = [];
  for (const line of lines) {
    let path = "", area = "", from = null, to = null;
    const close = () => { if (from !== null) area += `L${to} 118L${from} 118Z`; from = null; };
    for (const [at, value] of line.points) {
      if (value === null || at < now - shown) { close(); continue; }
      const place = `${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
      const step = from === null ? `M${place}h.1` : `L${place}`; // one that stands alone is a dot
      if (from === null) from = x(at).toFixed(1);
      to = x(at).toFixed(1);
      path += step; area += step;
    }
    close();
    paths.push(svg("path", { class: `area ${line.kind}`, d: area }), svg("path", { class: line.kind, d: path }));
  }
  const grid = [0, 0.5, 1].map((part) => svg("line", { class: "grid", x1: 0, x2: width, y1: y(top * part), y2: y(top * part), "vector-effect": "non-scaling-stroke" }));
  const said = lines.map((line) => `${line.name}: ${line.now}`).join(", ");
  show(id,
    h("div", { class: "axis" }, h("span", {}, text(top))),
    h("div", { class: "plot" },
      svg("svg", { viewBox: `0 10 ${width} 112`, preserveAspectRatio: "none", role: "img", "aria-label": said }, ...grid, ...paths, at && svg("line", { class: "cursor", x1: x(at), x2: x(at), y1: 10, y2: 118, "vector-effect": "non-scaling-stroke" })),
      at && pointed.id === id && h("div", { class: pointed.part > 0.5 ? "tip left" : "tip", style: { left: `${(100 * pointed.part).toFixed(1)}%` } }, h("b", {}, new Date(at * 1000).toLocaleTimeString()), valuesAt(at, lines, text))),
    h("div", { class: "axis" }, h("span", {}, `${span(Math.round(shown))} ago`), h("span", {}, "now")),
    h("ul", { class: "legend" }, lines.map((line) => h("li", { class: line.kind }, h("i"), h("span", {}, `${line.name} `, h("b", {}, line.now), line.more ? ` ${line.more}` : "")))));
}

// ---- drawing

function draw(overview, now) {
  const { status, counts, link, slots } = overview;
  const gateway = status.gateway, cache = status.cache, pending = status.writeback;
  byId("version").textContent = gateway ? gateway.version : "";
  byId("host").textContent = overview.host;
  document.title = `${overview.troubles.length ? "⚠ " : ""}${overview.host} · Forebay`;
  drawHealth(status);
  drawTroubles(overview.troubles);
  charts = [];

  const served = rates((one) => one.sent_bytes + one.received_bytes), fromOrigin = rates((one) => one.origin_read_bytes), flushed = rates((one) => one.flush_bytes);
  charted("throughput", [
    { name: "served", kind: "served", points: served, now: rate(latest(served)) },
    { name: "from the origin", kind: "origin", points: fromOrigin, now: rate(latest(fromOrigin)) },
    { name: "flushed", kind: "flush", points: flushed, now: rate(latest(flushed)) },
  ], rate, niceBytes);
  const latency = (name, kind, title) => {
    const points = quantiles(name, 0.5), most = latest(quantiles(name, 0.99));
    return { name: title, kind, points, now: span(latest(points)), more: most === null ? "" : `(99 %: ${span(most)})` };
  };
  charted("latency", [latency("served_latencies", "served", "served"), latency("origin_latencies", "origin", "origin"), latency("flush_latencies", "flush", "flush")], span, niceSeconds);
  const requests = rates((one) => one.requests), asked = rates((one) => one.origin_requests), failed = rates((one) => one.failed + one.origin_failed);
  charted("requests", [
    { name: "served", kind: "served", points: requests, now: perSecond(latest(requests) ?? 0) },
    { name: "to the origin", kind: "origin", points: asked, now: perSecond(latest(asked) ?? 0) },
    { name: "failed", kind: "failed", points: failed, now: perSecond(latest(failed) ?? 0), more: `(since the start: ${counted(counts.failed, "answer")}, ${number(counts.origin_failed)} of the origin)` },
  ], perSecond, niceCount);
  const ratio = points((before, one) => {
    const hit = one.hit_bytes - before.hit_bytes, given = hit + one.miss_bytes - before.miss_bytes;
    return given > 0 ? hit / given : null;
  });
  charted("ratio", [{ name: "of the last seconds", kind: "served", points: ratio, now: percent(latest(ratio)), more: `(since the start: ${percent(cache.hit_ratio)})` }], percent, null, 1);
  const misses = Object.entries(counts.misses).sort((one, other) => other[1] - one[1]), allMissed = misses.reduce((sum, [, count]) => sum + count, 0);
  show("misses", misses.length ? misses.map(([reason, count]) => h("div", { class: "missing" }, h("span", {}, reason), bar([[count / allMissed, ""]], [], `${percent(count / allMissed)} of the misses`), h("span", {}, counted(count, "miss").replace("misss", "misses")))) : empty("No request has missed yet."));

  const pendingAge = pending ? Math.max(0, ...pending.slots.map((one) => (one.oldest_acknowledged_at ? now - one.oldest_acknowledged_at : 0))) : 0;
  show("tiles",
    tile(rate(latest(served)), "served now"), tile(perSecond(latest(requests) ?? 0), `${counted(counts.in_flight, "request")} in flight`),
    tile(percent(cache.hit_ratio), "of bytes from the cache"), tile(bytes(cache.usage_bytes), `of ${bytes(cache.capacity_bytes)} cached`),
    tile(pending ? bytes(pending.bytes) : "–", pending ? (pending.objects ? `unflushed, the oldest for ${age(pendingAge)}` : "unflushed") : "unflushed: not known"),
    tile(pending ? number(pending.conflicts + pending.failing + pending.damaged) : "–", "writes that need you", pending && pending.conflicts + pending.failing + pending.damaged > 0));

  drawSlots(slots, link, cache);
  drawCallers(overview.callers);
  drawUnflushed(overview, now);
  drawRequests(overview.requests, now);
  drawJobs(overview.jobs, now);
  drawCheckpoints(overview.checkpoints, now);
  show("snapshots", overview.snapshots.length ? table(["snapshot", "prefix", "objects", "size", "state"], overview.snapshots.map((one) => [one.name, one.prefix, number(one.objects ?? 0), bytes(one.bytes ?? 0), one.problem ? tag(one.problem, "bad") : one.slots.length ? tag(`freezes ${one.slots.join(", ")}`, "good") : "not in use"])) : empty("There is no snapshot. The command forebay snapshot create makes one."),
    status.frozen.filter((one) => one.problem).map((one) => h("p", {}, tag(`slot ${one.slot}: ${one.problem}`, "bad"))));
  show("pins", status.pins.length ? table(["prefix", ""], status.pins.map((prefix) => [prefix, button("Unpin…", `unpin ${prefix}`, () => prefixAction("unpin", prefix))])) : empty("Nothing is pinned."));
  drawIndexes(status.indexes);
  drawCluster(status.cluster);
  drawGateway(overview, now);
  if (gateway && gateway.generation !== settingsOf && byId("settings").open) loadSettings();
}
const tile = (value, text, alert = false) => h("div", { class: alert ? "tile alert" : "tile" }, h("b", {}, value), h("span", {}, text));
// A bar says how much of a limit is taken: where there is no limit, there is none.
const bar = (parts, marks = [], text = null) => h("div", { class: "bar", ...(text ? { role: "img", "aria-label": text, title: text } : {}) },
  parts.map(([part, kind]) => h("i", { class: kind, style: { width: `${Math.min(100, 100 * part).toFixed(2)}%` } })),
  marks.map((part) => h("u", { style: { left: `${Math.min(99.5, 100 * part).toFixed(2)}%` } })));
function table(heads, rows) {
  const kinds = { objects: "number", size: "number", restarts: "number", took: "short", operation: "short", method: "short", status: "short", cache: "short", purpose: "short", state: "short", "": "short", id: "short", object: "long", "open upload": "long", prefix: "long", job: "long", "last end": "long", caller: "long", value: "long", setting: "long", default: "long", problem: "long", snapshot: "long", process: "short" };
  return h("table", { class: "stack" }, h("thead", {}, h("tr", {}, heads.map((head) => h("th", { class: kinds[head] ?? "", scope: "col" }, head)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, place) => h("td", { class: kinds[heads[place]] ?? "", "data-label": heads[place] }, cell))))));
}
function drawTroubles(troubles) {
  const line = (one) => h("li", { class: one.level }, h("b", {}, one.what), one.why ? `: ${one.why}` : "", h("span", {}, `${one.advice} `, h("a", { href: `docs/${one.page}` }, `docs/${one.page}`)));
  byId("banner").hidden = !troubles.length;
  show("banner", some("troubles", "problem", troubles, 5, (part) => h("ul", {}, part.map(line))));
}
const pill = (text, kind, title = null) => h("span", { class: `pill ${kind}`, title }, text);

function drawHealth(status) {
  const gateway = status.gateway;
  if (!gateway) return show("health", pill("starting", "warn"));
  const workers = gateway.processes.filter((one) => one.name.startsWith("worker")), up = workers.filter((one) => one.ready).length;
  const origins = [status.origin, ...status.origin.differing], bad = origins.find((one) => one.problem && one.replica == null);
  const disk = status.cache.disk;
  return show("health",
    pill(gateway.draining ? "draining" : gateway.ready ? "ready" : "not ready", gateway.ready ? "good" : "bad"),
    pill(bad ? `origin: ${bad.state}` : "origin up", bad ? "bad" : "good", bad?.problem),
    pill(`disk ${disk.state}`, disk.state === "well" ? "good" : "bad"),
    pill(`${up} of ${counted(workers.length, "worker")}`, up === workers.length ? "good" : "bad"),
    disk.journal_failing_processes ? pill("journal fails", "bad") : null,
    gateway.settings_problem ? pill("settings refused", "warn", gateway.settings_problem) : null,
    gateway.closed ? pill("no cache", "bad", gateway.closed) : null);
}

const BINDS = { "read-link": "the link, reading", "read-ceiling": "its read_bandwidth", "write-link": "the link, writing", "write-ceiling": "its write_bandwidth", "capacity-limit": "its capacity_limit", buffer: "its buffer", "request-rate": "the origin's request rate" };
function drawSlots(slots, link, cache) {
  const ofLink = (name, title) => `${title} ${rate(link[name].bytes_per_second)}${link[name].capacity ? ` of ${rate(link[name].capacity)}${link[name].capacity_found ? ", as found" : ""}` : ", no limit"}`;
  show("slots", h("p", { class: "note" }, `Link to the origin: ${ofLink("read", "read")}; ${ofLink("write", "write")}. A mark is the guarantee.`),
    slots.map((slot) => {
      const capacity = slot.capacity, limit = capacity.limit_bytes ?? cache.capacity_bytes, taken = capacity.used_bytes + capacity.reserved_bytes;
      const moved = (name, title) => {
        const one = slot[`${name}_bandwidth`], whole = one.ceiling ?? link[name].capacity;
        const bounds = [one.share !== null ? `share ${rate(one.share)}` : null, one.guarantee ? `guaranteed ${rate(one.guarantee)}` : null, one.ceiling ? `at most ${rate(one.ceiling)}` : null].filter(Boolean).join(", ");
        return h("div", {}, h("div", { class: "meter" }, h("b", {}, `${title} ${rate(one.bytes_per_second)}`), h("span", {}, bounds || "no limit")),
          whole ? bar([[one.bytes_per_second / whole, ""]], one.guarantee ? [one.guarantee / whole] : [], `${title} ${rate(one.bytes_per_second)} of ${rate(whole)}`) : null);
      };
      return h("div", { class: "slot" },
        h("div", {}, h("h3", {}, slot.name), h("span", { class: "note" }, slot.prefix),
          h("div", { class: "tags" }, slot.binds.map((one) => tag(`bound by ${BINDS[one] ?? one}`, "warn")), tag(`weight ${slot.weight}`), tag(slot.consistency), slot.write === "through" ? null : tag(`write = ${slot.write}`), slot.hit_ratio === null ? null : tag(`${percent(slot.hit_ratio)} from the cache`))),
        h("div", {}, h("div", { class: "meter" }, h("b", {}, `${bytes(taken)} cached`), h("span", {}, [capacity.guaranteed_bytes ? `guaranteed ${bytes(capacity.guaranteed_bytes)}` : null, `at most ${bytes(limit)}`, capacity.borrowed_bytes && capacity.guaranteed_bytes ? `borrows ${bytes(capacity.borrowed_bytes)}` : null, capacity.pinned_bytes ? `${bytes(capacity.pinned_bytes)} pinned` : null].filter(Boolean).join(", "))),
          bar([[taken / limit, ""], [capacity.pinned_bytes / limit, "pinned"]], capacity.guaranteed_bytes ? [capacity.guaranteed_bytes / limit] : [], `${bytes(taken)} of ${bytes(limit)} cached`)),
        moved("read", "Read"), moved("write", "Written"));
    }));
}

function drawCallers(callers) {
  const limits = (one) => [one.limits.max_concurrent_requests !== null ? `${one.limits.max_concurrent_requests} at a time` : null, one.limits.requests_per_second !== null ? `${one.limits.requests_per_second}/s` : null, one.limits.read_bandwidth ? `read ${rate(one.limits.read_bandwidth)}` : null, one.limits.write_bandwidth ? `write ${rate(one.limits.write_bandwidth)}` : null].filter(Boolean).join(", ") || "none";
  const counts = (found) => Object.entries(found).filter(([, count]) => count).map(([limit, count]) => `${limit} ${number(count)}`).join(", ") || "–";
  const row = (one) => [h("span", {}, one.name, one.scope === "class" ? h("span", { class: "note" }, "class") : null), one.per_second ? `${perSecond(one.per_second.requests)}, ${rate(one.per_second.sent_bytes)} read, ${rate(one.per_second.received_bytes)} written` : "–", limits(one), `${number(one.running)} running, ${number(one.waiting)} waiting`, counts(one.throttled), counts(one.refused), one.binds.length ? tag(one.binds.join(", "), "warn") : "–"];
  show("callers", callers.length ? some("callers", "caller", callers, 8, (part) => table(["caller", "now", "limits", "requests", "throttled", "refused", "bound by"], part.map(row))) : empty("Nobody has called yet."));
}

function drawIndexes(indexes) {
  byId("indexes-card").hidden = !indexes.length;
  const doing = { starting: "starting", inventory: "reading the inventory", waiting: "waits for the next crawl", failing: "fails" };
  const row = (one) => [one.slot, tag(one.complete ? "complete" : "not complete", one.complete ? "good" : "warn"), one.age_seconds === null ? "–" : age(one.age_seconds), number(one.keys_before ?? one.keys), one.state === "crawling" ? `crawling, ${counted(one.keys, "key")} so far` : doing[one.state] ?? one.state, [one.error, one.inventory_error].filter(Boolean).join("; ") || "–"];
  show("indexes", some("indexes", "index", indexes, 8, (part) => table(["slot", "state", "age", "objects", "now", "problem"], part.map(row))));
}

function drawUnflushed(overview, now) {
  const pending = overview.status.writeback;
  if (!pending) return show("unflushed", empty("The cache directory is not open, or its buffer cannot be read."));
  const slots = pending.slots.map((one) => {
    const wrong = [one.conflicts ? counted(one.conflicts, "conflict") : null, one.damaged ? `${one.damaged} damaged` : null, one.failing ? `${one.failing} failing` : null].filter(Boolean);
    return h("div", { class: "missing waiting" }, h("b", {}, one.slot),
      h("div", {}, one.buffer_bytes ? bar([[one.staged_bytes / one.buffer_bytes, ""]], [], `${bytes(one.staged_bytes)} of a buffer of ${bytes(one.buffer_bytes)}`) : null,
        h("span", { class: "note" }, [`${bytes(one.staged_bytes)}${one.buffer_bytes ? ` of ${bytes(one.buffer_bytes)}` : ""} in the buffer`, counted(one.objects, "object") + ` (${bytes(one.bytes)})`, one.oldest_acknowledged_at ? `the oldest for ${ago(one.oldest_acknowledged_at, now)}` : null, one.open_uploads ? counted(one.open_uploads, "open upload") : null, one.local_objects ? `${counted(one.local_objects, "object")} kept here only` : null, one.reason].filter(Boolean).join(", ")),
        wrong.length || one.waiting_for_bucket ? h("div", { class: "tags" }, wrong.map((text) => tag(text, "bad")), one.waiting_for_bucket ? tag(`${one.waiting_for_bucket} waiting for the bucket`, "warn") : null) : null),
      button("Flush…", `flush ${one.slot}`, () => prefixAction("flush", overview.slots.find((slot) => slot.name === one.slot)?.prefix ?? "s3://")));
  });
  const problems = overview.problems.map((one) => {
    const name = `s3://${one.bucket}/${one.key}`;
    return [h("span", {}, name, h("span", { class: "note" }, `${bytes(one.bytes)}, for ${ago(one.acknowledged_at, now)}${one.reason ? `: ${one.reason}` : ""}`)), tag(one.state, "bad"), button("Resolve…", `resolve ${one.sequence}`, () => resolveAction(one, name))];
  });
  const uploads = overview.uploads.map((one) => [h("span", {}, `s3://${one.bucket}/${one.key}`, h("span", { class: "note" }, `${counted(one.parts, "part")}, ${bytes(one.bytes)}, the last ${ago(one.touched_at, now)} ago`)), button("Abort…", `abort ${one.upload_id}`, () => abortAction(one))]);
  return show("unflushed", pending.journal_problem ? h("p", {}, tag(`the journal takes no writes: ${pending.journal_problem}`, "bad")) : null,
    slots.length ? slots : empty("No slot writes back: every write goes to the origin at once."),
    problems.length ? some("stuck", "object", problems, 5, (part) => table(["object", "state", ""], part)) : null, uploads.length ? some("uploads", "open upload", uploads, 5, (part) => table(["open upload", ""], part)) : null);
}

function drawRequests(requests, now) {
  const object = (one) => (one.bucket === null ? "–" : `s3://${[one.bucket, one.key].filter((part) => part !== null).join("/")}`);
  const row = (one) => [span(one.seconds), one.operation,
    h("span", {}, object(one), h("span", { class: "note" }, `${ago(one.at, now)} ago, ${one.caller}, ${bytes(one.sent_bytes)} sent, ${bytes(one.received_bytes)} received, ${one.request_id}`)),
    tag([one.status, one.error].filter(Boolean).join(" "), /^[23]/.test(one.status) ? "" : /^4|^client/.test(one.status) ? "warn" : "bad"), [one.cache, one.reason].filter(Boolean).join(": ") || "–"];
  const ofOrigin = (one) => [span(one.seconds), one.method, h("span", {}, object(one), h("span", { class: "note" }, `${ago(one.at, now)} ago, ${one.slot}`)), tag(one.status, "bad"), one.purpose];
  const part = (title, rows, heads) => (rows.length ? [h("h3", {}, title), some(title, "request", rows, 4, (drawn) => table(heads, drawn))] : []);
  const heads = ["took", "operation", "object", "status", "cache"];
  const found = [...part("Slowest", requests.slowest.map(row), heads), ...part("Failed", requests.errors.map(row), heads), ...part("Refused", requests.refusals.map(row), heads),
    ...part("The origin failed", requests.origin_failures.map(ofOrigin), ["took", "method", "object", "status", "purpose"])];
  show("recent", found.length ? found : empty("No request in the last minutes."));
}

const JOB = { running: "", done: "good", failed: "bad", cancelled: "warn" };
function drawJobs(jobs, now) {
  const row = (job) => {
    const part = job.state === "done" ? 1 : job.bytes_found ? job.bytes_done / job.bytes_found : job.objects_found ? job.objects_done / job.objects_found : 0;
    const more = [`${number(job.objects_done)} of ${counted(job.objects_found, "object")}${job.found_all ? "" : " so far"}`, job.bytes_found ? `${bytes(job.bytes_done)} of ${bytes(job.bytes_found)}` : null, job.state === "running" && job.bytes_per_second ? rate(job.bytes_per_second) : null, job.state === "running" && job.seconds_left !== null ? `${age(job.seconds_left)} left` : null, job.objects_failed ? `${job.objects_failed} failed` : null, job.full ? "no room for the rest" : null].filter(Boolean).join(", ");
    return [h("span", {}, `${job.kind} ${job.prefix || job.name || "of a list"}`, h("span", { class: "note" }, `${ago(job.created_at, now)} ago`)), h("div", {}, bar([[part, job.state === "done" ? "flushed" : ""]], [], percent(part)), h("span", { class: "note" }, more, job.errors.length ? `: ${job.errors[0]}` : "")),
      h("div", { class: "row-actions" }, tag(job.state, JOB[job.state]), job.state === "running" ? button("Abort…", `cancel ${job.id}`, () => cancelAction(job)) : null)];
  };
  const drawn = (part) => table(["job", "progress", "state"], part.map(row)), ended = jobs.filter((job) => job.state !== "running"), running = jobs.filter((job) => job.state === "running");
  const failed = ended.filter((job) => job.state === "failed").length;
  show("jobs", running.length ? drawn(running) : empty(ended.length ? "No job is running." : "No job yet. Actions… starts one."),
    ended.length ? fold("jobs", h("span", {}, `The last ${counted(ended.length, "job")} that ended `, failed ? tag(`${failed} failed`, "bad") : ""), drawn(ended)) : null);
}

const CHECKPOINT = { writing: "", acknowledged: "", flushing: "", durable: "good", local: "", "waiting for the bucket": "warn", stalled: "warn", failed: "bad", conflict: "bad" };
function drawCheckpoints(checkpoints, now) {
  if (!checkpoints.length) return show("checkpoints", empty("No checkpoint has been saved in a slot that writes back."));
  const first = Math.min(...checkpoints.map((one) => one.began_at ?? now)), length = Math.max(60, now - first);
  const end = (one) => (one.state === "durable" ? one.last_at : one.state === "stalled" || one.state === "failed" ? one.last_at : now) ?? now;
  return show("checkpoints", h("div", { class: "axis" }, h("span", {}, `${span(Math.round(length))} ago`), h("span", {}, "now")),
    some("checkpoints", "checkpoint", checkpoints, 6, (part) => part.map((one) => {
      const from = one.began_at ?? now, wide = Math.max(0, end(one) - from);
      const absent = one.missing.ranks, ranks = [...new Set([...one.ranks_seen, ...absent])].sort((a, b) => a - b).slice(0, 64);
      const notes = [counted(one.files, "file"), bytes(one.bytes), one.save_seconds ? `saved in ${span(one.save_seconds)}` : null, one.flush_seconds_left !== null ? `durable in ${age(one.flush_seconds_left)}` : null, one.restore && one.restore.state !== "over" ? `restore ${one.restore.state}: ${bytes(one.restore.bytes_read)} of ${bytes(one.restore.bytes)}` : null, one.exposed_seconds !== null ? `exposed for ${age(one.exposed_seconds)}` : null, one.kept ? "kept in the cache" : one.kept_reason, absent.length ? `ranks missing: ${absent.slice(0, 12).join(", ")}` : null, one.missing.objects.length ? `missing: ${one.missing.objects.slice(0, 3).join(", ")}` : null, one.reason].filter(Boolean).join(" · ");
      return h("div", { class: "checkpoint" },
        h("div", {}, h("b", {}, one.step !== null ? `step ${number(one.step)}` : one.prefix), h("span", { class: "note" }, `s3://${one.bucket}/${one.prefix}`)),
        h("div", {}, h("div", { class: "lane" }, h("i", { class: CHECKPOINT[one.state], style: { left: `${(100 * (from - first) / length * 0.985).toFixed(2)}%`, width: `${Math.min(100, 100 * wide / length).toFixed(2)}%`, maxWidth: "100%" }, title: `began ${new Date(from * 1000).toLocaleTimeString()}` })),
          h("span", { class: "note" }, notes)),
        h("div", {}, tag(one.state, CHECKPOINT[one.state]), h("span", { class: "note" }, `${bytes(one.bytes_flushed)} of ${bytes(one.bytes)} at the origin, ${counted(one.ranks, "rank")}`), bar([[one.bytes ? one.bytes_flushed / one.bytes : Number(one.state === "durable"), "flushed"]]),
          ranks.length ? h("div", { class: "ranks", role: "img", "aria-label": `ranks that have written: ${one.ranks_seen.join(", ")}` }, ranks.map((rank) => h("i", { class: absent.includes(rank) ? "absent" : "", title: `rank ${rank}${absent.includes(rank) ? " is missing" : ""}` }))) : null));
    })));
}

function drawCluster(cluster) {
  byId("cluster-card").hidden = !cluster;
  if (!cluster) return;
  show("cluster", h("p", { class: "note" }, `${cluster.members.filter((one) => one.state === "up").length} of ${counted(cluster.members.length, "member")} of ${cluster.name} up. This node gave ${bytes(cluster.sent_bytes)} to others, and took ${bytes(cluster.received_bytes)} from them.`),
    some("cluster", "node", [...cluster.members].sort((one, other) => (one.state === "up") - (other.state === "up")), 12, (part) => table(["node", "zone", "state", "blocks", "given to it", "taken from it", "version", "problem"], part.map((one) => [`${one.name || one.address}${one.this_node ? " (this node)" : ""}`, one.zone || "–", tag(one.state, one.state === "up" ? "good" : "bad"), percent(one.share), one.this_node ? "–" : bytes(one.sent_bytes), one.this_node ? "–" : bytes(one.received_bytes), one.version ?? "–", one.problem ?? ""]))));
}

function drawGateway({ status, host }, now) {
  const gateway = status.gateway, disk = status.cache.disk, scrub = status.cache.scrub;
  if (!gateway) return show("gateway", empty("The gateway is starting."));
  const facts = [["host", host], ["S3", gateway.s3_url], ["running for", ago(gateway.started_at, now)], ["origin", `${status.origin.endpoint_url} (${status.origin.problem ?? "reachable"})`],
    ...status.origin.differing.map((one) => [`${one.prefix}${one.replica == null ? "" : " (replica)"}`, `${one.endpoint_url}, signed by ${one.credentials} (${one.problem ?? "reachable"})`]),
    ["cache", `${status.cache.directory}, ${bytes(status.cache.usage_bytes)} of ${bytes(status.cache.capacity_bytes)} in use`], ["disk", disk.state],
    scrub ? ["scrubber", `${percent(scrub.part_done)} of its pass, ${counted(scrub.dropped_blocks, "block")} dropped`] : null, gateway.settings_problem ? ["settings", `not in force: ${gateway.settings_problem}`] : null, gateway.closed ? ["no cache", gateway.closed] : null].filter(Boolean);
  return show("gateway", h("dl", { class: "facts" }, facts.map(([name, text]) => [h("dt", {}, name), h("dd", {}, text)])),
    table(["process", "id", "state", "restarts", "last end"], gateway.processes.map((one) => [one.name, String(one.process_id ?? "–"), tag(one.hangs ? "hangs" : one.ready ? "ready" : "down", one.ready && !one.hangs ? "good" : "bad"), number(one.restarts), one.last_end ?? "–"])));
}

let settingsOf = -1; // the generation of those that are shown
function flat(value, name = "") {
  if (value === null || typeof value !== "object" || (Array.isArray(value) && typeof value[0] !== "object")) return [[name, JSON.stringify(value)]];
  return Object.entries(value).flatMap(([key, inner]) => flat(inner, Array.isArray(value) ? `${name}[${key}]` : name ? `${name}.${key}` : key));
}
async function loadSettings() {
  settingsOf = last?.status.gateway?.generation ?? -1;
  try {
    const { settings, defaults } = await call("api/v1/settings");
    const usual = new Map(flat(defaults)), rows = flat(settings).map(([name, value]) => [name, value, usual.get(name) ?? "null"]);
    const drawn = (part) => table(["setting", "value", "default"], part);
    show("settings-shown", h("p", { class: "note" }, "What differs from the defaults; secrets are hidden."), drawn(rows.filter(([, value, other]) => value !== other)), fold("settings", "Those that have their default", drawn(rows.filter(([, value, other]) => value === other))));
  } catch (error) {
    settingsOf = -1;
    show("settings-shown", empty(`They cannot be shown now: ${error.message}`));
  }
}
byId("settings").addEventListener("toggle", (event) => { if (event.target === byId("settings") && event.target.open) loadSettings(); });

// ---- dialogs

const dialog = byId("dialog");
let onSubmit = () => {};
let opener = null;
let openerCard = null;
byId("dialog-form").addEventListener("submit", (event) => { event.preventDefault(); onSubmit(); });

function openDialog(title, body, buttons, submit) {
  byId("dialog-title").textContent = title;
  byId("dialog-body").replaceChildren(...body);
  byId("dialog-buttons").replaceChildren(...buttons);
  onSubmit = submit;
  if (dialog.open) return;
  opener = document.activeElement;
  openerCard = opener.closest(".card");
  dialog.showModal();
}
dialog.addEventListener("close", () => {
  // The button may have been drawn anew meanwhile, or its row may be gone: the focus stays in the card all the same.
  if (!openerCard || opener.isConnected) return;
  const again = [...openerCard.querySelectorAll("[data-key]")].find((one) => one.dataset.key === opener.dataset.key);
  if (!again) openerCard.tabIndex = -1;
  (again ?? openerCard).focus();
});
function say(text) {
  const line = h("p", {}, text);
  byId("said").append(line);
  setTimeout(() => line.remove(), 12000);
}
// One action: `what` says what will happen, `yes` names it on its button (null: it cannot be done yet), `perform` does it and gives
// what came of it in words; `danger`: it gives up something.
function confirm(title, fields, what, yes, perform, danger = false) {
  const told = h("div"), outcome = h("div", { role: "alert" });
  const go = h("button", { type: "submit" }), cancel = h("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
  const tell = () => {
    const isDanger = typeof danger === "function" ? danger() : danger;
    const text = what(), label = typeof yes === "function" ? yes() : yes;
    told.textContent = text;
    told.className = isDanger ? "what danger" : "what";
    told.hidden = !text;
    go.textContent = label ?? "Choose first";
    go.disabled = label === null;
    go.className = isDanger && label !== null ? "danger" : "primary";
  };
  for (const field of fields) field.addEventListener("input", tell);
  tell();
  openDialog(title, [...fields, told, outcome], [cancel, go], async () => {
    go.disabled = true;
    outcome.replaceChildren();
    try {
      const result = await perform();
      say(result);
      outcome.replaceChildren(h("p", { class: "outcome good" }, result));
      go.remove();
      cancel.textContent = "Close";
      cancel.focus();
      ask();
    } catch (error) {
      go.disabled = false;
      outcome.replaceChildren(h("p", { class: "outcome bad" }, `Not done: ${error.message}`));
    }
  });
  (fields.map((field) => field.querySelector("input, select")).find(Boolean) ?? cancel).focus();
  return tell;
}
const PREFIX_ACTIONS = {
  warm: ["Warm", "Warm", (one) => `The gateway fetches every object under ${one} from the origin that is not cached yet. This uses the link to the origin and room in the cache; other blocks may be evicted for it.`, (job) => `Warming has begun: job ${job.id}.`],
  flush: ["Flush", "Flush", (one) => `The gateway tries at once to send every unflushed write under ${one} to the origin. What fails is tried again, as before. Conflicts and damaged objects stay as they are.`, (left) => `Flushing has begun: ${counted(left.objects, "object")}, ${bytes(left.bytes)} are on their way${left.stuck ? `; ${number(left.stuck)} are stuck and need a decision` : ""}.`],
  pin: ["Pin", "Pin", (one) => `The gateway fetches what lies under ${one}, and never evicts it until it is unpinned. The room that it takes is not there for anything else.`, (job) => `Pinning has begun: job ${job.id}.`],
  unpin: ["Unpin", "Unpin", (one) => `What lies under ${one} may be evicted again from now on. Nothing is dropped now.`, () => "Unpinned."],
  evict: ["Evict", "Evict", (one) => `The gateway drops everything cached under ${one}, pinned blocks too. The next reads come from the origin. Objects at the origin and unflushed writes stay.`, (job) => `Evicting has begun: job ${job.id}.`, true],
};
function prefixField(prefix) {
  const input = h("input", { type: "text", required: true, pattern: "s3://.*", placeholder: "s3://bucket/prefix", autocomplete: "off", spellcheck: "false", name: "prefix" });
  input.value = prefix;
  return [h("label", {}, "Prefix", input), input];
}
// How much an action is about, where that is known.
async function sizeOf(kind, prefix) {
  if (kind === "flush") {
    const left = await call(`api/v1/flush?prefix=${encodeURIComponent(prefix)}&through=999999999999999999`);
    return `${counted(left.objects, "object")}, ${bytes(left.bytes)}`;
  }
  const slot = last?.slots.find((one) => one.prefix === prefix && one.name !== "default");
  if (!slot) return null;
  if (kind === "evict") return bytes(last.slots.filter((one) => one.prefix.startsWith(prefix)).reduce((sum, one) => sum + one.capacity.used_bytes, 0));
  const index = last.status.indexes.find((one) => one.slot === slot.name && one.complete);
  return index && (kind === "warm" || kind === "pin") ? `up to ${counted(index.keys_before ?? index.keys, "object")}` : null;
}
function prefixDialog(title, fields, input, kind) {
  let size = null, asked = "", tell = () => {};
  const is = () => Boolean(kind()) && /^s3:\/\/([^/]|$)/.test(input.value) && (kind() === "flush" || input.value !== "s3://");
  const label = () => {
    const now = `${kind()} ${input.value}`;
    if (!is()) { asked = now; size = null; return null; }
    if (now !== asked) {
      asked = now;
      size = null;
      sizeOf(kind(), input.value).catch(() => null).then((found) => { if (asked === now && found) { size = found; tell(); } });
    }
    return `${PREFIX_ACTIONS[kind()][1]} ${size ?? limited(input.value)}`;
  };
  tell = confirm(title, fields, () => (kind() ? PREFIX_ACTIONS[kind()][2](input.value || "the prefix") : ""), label,
    async () => PREFIX_ACTIONS[kind()][3](await call(`api/v1/${kind()}`, "POST", { prefix: input.value })), () => Boolean(kind() && PREFIX_ACTIONS[kind()][4]));
}
function prefixAction(kind, prefix) {
  const [label, input] = prefixField(prefix);
  prefixDialog(PREFIX_ACTIONS[kind][0], [label], input, () => kind);
}
function startAction() {
  const choose = h("select", { name: "action", required: true }, h("option", { value: "" }, "choose…"), Object.entries(PREFIX_ACTIONS).map(([kind, [title]]) => h("option", { value: kind }, title)));
  const [label, input] = prefixField("");
  prefixDialog("Actions", [h("label", {}, "Action", choose), label], input, () => choose.value);
}
// What can be decided: what the button says, and what happens then.
const DECISIONS = {
  "keep-ours": [(size) => `Keep ours: send ${size}`, (name) => `The write of this node overwrites what the origin has under ${name} at this moment. Of a manifest that waits for files, it is sent without them.`],
  "keep-theirs": [(size) => `Keep theirs: give up ${size}`, (name) => `What only this node has of ${name} is given up for good. Readers get what the origin has.`],
  discard: [(size) => `Discard ${size}`, (name) => `What only this node has of ${name} is given up for good. Choose this for what is damaged, and for what the origin will never take.`],
};
function resolveAction(one, name) {
  const isConflict = one.state === "conflict", ours = one.deleted ? "a deletion" : bytes(one.bytes), place = h("div", { class: "versions" });
  const choices = isConflict ? ["keep-ours", "keep-theirs"] : one.state === "damaged" ? ["discard"] : ["keep-ours", "discard"];
  const choose = h("fieldset", {}, h("legend", {}, "Decide"), choices.map((decision) => h("label", { class: "choice" }, h("input", { type: "radio", name: "decision", value: decision, required: true }), decision)));
  const chosen = () => choose.querySelector(":checked")?.value;
  let shown;
  const look = async () => (await call(`api/v1/writeback/versions?object=${encodeURIComponent(name)}`)).at_origin;
  const compare = (theirs, problem = null) => {
    shown = theirs;
    const at = theirs ? [theirs.bytes === null ? "not known" : bytes(theirs.bytes), date(theirs.modified_at), theirs.etag] : problem ? [problem, "–", "–"] : ["nothing", "–", "–"];
    place.replaceChildren(h("table", {}, h("thead", {}, h("tr", {}, ["", "this node has", "the bucket has"].map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, [["size", ours, at[0]], ["date", date(one.acknowledged_at), at[1]], ["ETag", one.etag ?? "–", at[2]]].map(([head, mine, other]) => h("tr", {}, h("th", { scope: "row" }, head), h("td", { class: "long" }, mine), h("td", { class: "long" }, other))))));
  };
  compare(undefined, "asking…");
  look().then(compare, (error) => compare(undefined, error.message));
  confirm(isConflict ? "Resolve a conflict" : "Decide about a write", [h("p", { class: "name" }, name), place, choose], () => (chosen() ? DECISIONS[chosen()][1](name) : ""), () => (chosen() ? DECISIONS[chosen()][0](ours) : null), async () => {
    const decision = chosen(), before = shown;
    if (decision === "keep-ours" && before !== undefined) {
      const theirs = await look();
      if (theirs?.etag !== before?.etag) {
        compare(theirs);
        throw new Error("the bucket has another version by now: look again");
      }
    }
    await call("api/v1/writeback/resolve", "POST", { object: name, decision, sequence: one.sequence });
    return `Decided: ${decision} for ${name}.`;
  }, true);
}
function abortAction(one) {
  const name = `s3://${one.bucket}/${one.key}`;
  confirm("Abort an open upload", [], () => `The upload of ${name} ends here and at the origin. What it has sent so far is deleted: ${counted(one.parts, "part")}, ${bytes(one.bytes)}. A client that goes on with it is answered NoSuchUpload.`, `Abort the upload: give up ${bytes(one.bytes)}`, async () => {
    const answer = await call("api/v1/writeback/abort", "POST", { upload_ids: [one.upload_id] });
    return answer.aborted.length ? `The upload of ${name} is aborted.` : `The upload of ${name} was not open any more.`;
  }, true);
}
function cancelAction(job) {
  const name = `${job.kind} ${job.prefix || job.name || "of a list"}`;
  confirm("Abort a job", [], () => `The job "${name}" ends. What it has done stays done: ${counted(job.objects_done, "object")}, ${bytes(job.bytes_done)}.`, `Abort the job at ${number(job.objects_done)} of ${counted(job.objects_found, "object")}`, async () => `The job "${name}" is ${(await call(`api/v1/jobs/${encodeURIComponent(job.id)}`, "DELETE")).state}.`, true);
}
function askForToken() {
  const input = h("input", { type: "password", required: true, autocomplete: "off", name: "token" });
  const wrong = token !== "";
  openDialog("Token", [h("p", {}, "The admin port asks for its token (admin.token). This tab keeps it until it is closed."), h("label", {}, "Token", input), wrong ? h("p", { class: "outcome bad", role: "alert" }, "The gateway does not take this token.") : ""],
    [h("button", { type: "submit", class: "primary" }, "Continue")], () => {
      token = input.value.trim();
      sessionStorage.setItem(TOKEN, token);
      dialog.close();
      ask();
    });
  dialog.addEventListener("cancel", (event) => { if (!answeredAt) event.preventDefault(); }, { once: true });
  input.focus();
}
byId("start").addEventListener("click", startAction);

// ---- colours

const THEMES = ["system", "light", "dark"];
let theme = 0;
function useTheme(index) {
  theme = index;
  if (THEMES[theme] === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = THEMES[theme];
  byId("theme").textContent = `Theme: ${THEMES[theme]}`;
}
useTheme(Math.max(0, THEMES.indexOf(localStorage.getItem(THEME) ?? "system")));
byId("theme").addEventListener("click", () => {
  useTheme((theme + 1) % THEMES.length);
  localStorage.setItem(THEME, THEMES[theme]);
});
setInterval(() => { if (answeredAt && !document.hidden) byId("age").textContent = `as of ${new Date(answeredAt).toLocaleTimeString()}`; }, 1000);
ask();
