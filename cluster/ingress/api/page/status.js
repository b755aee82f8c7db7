// The status page: asks this server every two seconds and shows what it says. Text is never read as markup.
"use strict";

const EVERY_MS = 2000;
const DEADLINE_MS = 10000;
const byId = (id) => document.getElementById(id);
const KEY = "kopir-key"; // in this tab only

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text === null ? "–" : String(text);
  if (className) made.className = className;
  return made;
}

// columns: [title, value(row) -> text or element, class]
function table(where, columns, rows, none) {
  if (!rows.length) {
    byId(where).replaceChildren(element("p", none, "none"));
    return;
  }
  const made = element("table");
  const head = made.createTHead().insertRow();
  for (const [title, , kind] of columns) head.append(element("th", title, kind));
  const body = made.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    for (const [, value, kind] of columns) {
      const shown = value(row);
      const cell = element("td", shown instanceof Node ? undefined : shown, typeof kind === "function" ? kind(row) : kind);
      if (shown instanceof Node) cell.append(shown);
      line.append(cell);
    }
  }
  byId(where).replaceChildren(made);
}

function bar(used, all) {
  if (used === null || used === undefined || !all) return element("span", null);
  const made = element("span");
  const outer = element("span", undefined, "bar");
  const inner = element("i");
  inner.style.width = Math.min(100, (100 * used) / all) + "%";
  outer.append(inner);
  made.append(outer, `${used} of ${all}`);
  return made;
}

function duration(seconds) {
  if (seconds < 100) return Math.round(seconds) + " s";
  return seconds < 6000 ? Math.round(seconds / 60) + " min" : Math.round(seconds / 3600) + " h";
}

function show(facts) {
  table("workers", [
    ["worker", (w) => w.id, "id"],
    ["role", (w) => w.role],
    ["state", (w) => w.state, (w) => w.state],
    ["pool blocks", (w) => bar(w.used_blocks, w.pool_blocks)],
    ["fenced", (w) => w.quarantined_blocks, "number"],
    ["running", (w) => w.running, "number"],
    ["waiting", (w) => w.waiting, "number"],
    ["pid", (w) => w.pid, "number"],
    ["node", (w) => w.node],
  ], facts.workers || [], "no workers");
  const tiers = (facts.store || []).flatMap((node) => (node.tiers || []).map((tier) => ({ node: node.node, ...tier })));
  table("store", [
    ["node", (t) => t.node, "id"],
    ["tier", (t) => t.name],
    ["blocks", (t) => bar(t.used_blocks, t.blocks)],
    ["MiB", (t) => Math.round((t.bytes || 0) / 1048576), "number"],
  ], tiers, "no store");
  table("streams", [
    ["request", (s) => s.request_id, "id"],
    ["phase", (s) => s.phase],
    ["attempt", (s) => s.attempt, "number"],
    ["epoch", (s) => s.epoch, "number"],
    ["tokens delivered", (s) => s.delivered_output_tokens, "number"],
  ], facts.streams || [], "nothing runs");
  table("interruptions", [
    ["ago", (s) => duration(s.age_s), "number"],
    ["request", (s) => s.request_id, "id"],
    ["reason", (s) => s.reason],
    ["tokens delivered", (s) => s.delivered_output_tokens, "number"],
    ["message", (s) => s.message],
  ], facts.interruptions || [], "none");
  figures("promises", facts.promises);
  figures("tokens", facts.tokens);
}

function figures(where, values) {
  byId(where).replaceChildren(...Object.entries(values || {}).map(([name, value]) => {
    const pair = element("div");
    pair.append(element("dt", name.replaceAll("_", " ")), element("dd", value));
    return pair;
  }));
}

async function ask() {
  const note = byId("note");
  try {
    const key = sessionStorage.getItem(KEY);
    const answer = await fetch("/internal/status", {
      headers: key ? { authorization: `Bearer ${key}` } : {},
      signal: AbortSignal.timeout(DEADLINE_MS),
    });
    byId("key").hidden = answer.status !== 401 && answer.status !== 403;
    if (!byId("key").hidden) throw new Error(key ? "this key is not let in" : "an API key is needed");
    if (!answer.ok) throw new Error(`this server answers ${answer.status}`);
    const facts = await answer.json();
    show(facts);
    const workers = facts.workers || [];
    const ready = workers.filter((worker) => worker.state === "ready").length;
    note.textContent = `${ready} of ${workers.length} workers ready, ${facts.leases} leases`;
    note.className = workers.length && ready === workers.length ? "" : "bad";
    document.body.className = "";
  } catch (error) {
    note.textContent = error.name === "TimeoutError" ? "this server does not answer" : error.message;
    note.className = "bad";
    document.body.className = "stale"; // what is shown is the last that was heard
  }
}

async function askForEver() {
  await ask();
  setTimeout(askForEver, EVERY_MS);
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key-text").value.trim());
  byId("key-text").value = "";
  ask();
});
askForEver();
