// pi, in JavaScript: `agentLoop`, its low-level API, with a stream function of one's own.
//
// Takes a workload and a size, and prints the figures that measure.py prints for Python. The
// history is trimmed by `transformContext`, which gets a function that keeps the newest messages.

import { readFileSync, writeFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { agentLoop } from "@earendil-works/pi-agent-core";
import { createAssistantMessageEventStream, Type } from "@earendil-works/pi-ai";

const work = JSON.parse(process.argv[2]); // the constants of work.py
const [workload, size] = [process.argv[3], Number(process.argv[4])];
const seen = { events: 0, tools: 0, secondTurn: 0, lastTurn: 0 };

const model = { id: "scripted", api: "scripted", provider: "scripted" };
const parameters = Type.Object({ x: Type.Number(), s: Type.String() });
const result = (text) => ({ content: [{ type: "text", text }], details: {} });
const tool = (name, execute) => ({ name, label: name, description: name, parameters, execute });
const echo = tool("echo", async (_id, { s }) => {
  seen.tools++;
  return result("ok: " + s);
});
const rest = tool("rest", async (id, args) => {
  await sleep(1000 * work.TOOL_NAP);
  return echo.execute(id, args);
});

const usage = { input: 0, output: 0, cacheRead: 0, cacheWrite: 0, totalTokens: 0, cost: {} };
const message = (content, stopReason) => ({
  role: "assistant", content, ...model, model: "scripted", usage, stopReason, timestamp: Date.now(),
});
const call = (id, name) => ({ type: "toolCall", id, name, arguments: JSON.parse(work.ARGUMENTS) });
const user = (content) => ({ role: "user", content, timestamp: Date.now() });

function say(deltas) {
  const stream = createAssistantMessageEventStream();
  const partial = message([{ type: "text", text: "" }], "stop");
  stream.push({ type: "start", partial });
  for (const delta of deltas) {
    partial.content[0].text += delta;
    stream.push({ type: "text_delta", contentIndex: 0, delta, partial });
  }
  stream.push({ type: "done", reason: "stop", message: partial });
  return stream;
}

function calling(turns, { name = "echo", calls = 1, nap = 0, watch = false } = {}) {
  let turn = -1;
  return async () => {
    if (nap) await sleep(1000 * nap);
    turn++;
    if (watch) seen.lastTurn = performance.now();
    if (watch && turn === 1) seen.secondTurn = seen.lastTurn;
    if (turn >= turns) return say(["done"]);
    const stream = createAssistantMessageEventStream();
    const content = Array.from({ length: calls }, (_, i) => call(`c${turn}-${i}`, name));
    stream.push({ type: "start", partial: message([], "pending") });
    stream.push({ type: "done", reason: "toolUse", message: message(content, "toolUse") });
    return stream;
  };
}

async function run(streamFn, { tools = [echo], listeners = 1, past = [], ...options } = {}) {
  const config = { model, convertToLlm: (messages) => messages, ...options };
  const context = { messages: past, tools };
  let last;
  for await (const event of agentLoop([user("go")], context, config, undefined, streamFn)) {
    seen.events += listeners;
    last = event;
  }
  return last.messages.at(-1).content[0].text;
}

function history(count) {
  const messages = [];
  for (let n = 0; n < count / 4; n++) {
    const text = `line ${String(n).padStart(5, "0")} ` + "x".repeat(1989);
    messages.push(
      user(`question ${n}`),
      message([{ type: "text", text: "I look." }, call(`old${n}`, "echo")], "toolUse"),
      { role: "toolResult", toolCallId: `old${n}`, toolName: "echo", isError: false,
        timestamp: 0, ...result(text) },
      message([{ type: "text", text: "Here it is." }], "stop"),
    );
  }
  return messages;
}

const short = () => run(calling(work.SHORT_RUN, { nap: work.MODEL_NAP }));
const many = (count) => Promise.all(Array.from({ length: count }, short));
const newest = async (messages) => messages.slice(-100);
const workloads = {
  w1: (count) => run(calling(count)),
  w2: (count) => run(() => say(Array(count).fill(work.DELTA)), { tools: [] }),
  "w2-unheard": (count) => run(() => say(Array(count).fill(work.DELTA)), { tools: [], listeners: 0 }),
  w3: (count) => run(calling(1, { name: "rest", calls: count }), { tools: [rest] }),
  w4: async (count) => (await many(count)).join(" "),
  w6: (count, past = history(work.HISTORY)) =>
    run(calling(count, { watch: true }), { past, transformContext: newest }),
};

const status = (key) => 1024 * readFileSync("/proc/self/status", "utf8").match(`${key}:\\s+(\\d+)`)[1];
const warm = { w1: 20, w3: 8, w4: 2, w6: 2 }[workload] ?? 100;
await workloads[workload](Math.min(warm, size));
const walls = [], cpus = [];
let memory;
const begun = performance.now();
const enough = () => walls.length >= work.REPEATS || performance.now() - begun > 1000 * work.ENOUGH;
while (!walls.length || !enough()) {
  Object.assign(seen, { events: 0, tools: 0, secondTurn: 0, lastTurn: 0 });
  const past = workload === "w6" ? history(work.HISTORY) : undefined;
  globalThis.gc?.();
  if (memory === undefined) writeFileSync("/proc/self/clear_refs", "5");
  const before = status("VmRSS");
  const cpu = process.cpuUsage(), started = performance.now();
  const text = await workloads[workload](size, past);
  const wall = performance.now() - started, used = process.cpuUsage(cpu);
  memory ??= status("VmHWM") - before;
  walls.push((workload === "w6" ? seen.lastTurn - seen.secondTurn : wall) / 1000);
  cpus.push((used.user + used.system) / 1e6);
  const tools = { w1: size, w3: size, w4: size * work.SHORT_RUN, w6: size }[workload] ?? 0;
  if (seen.tools !== tools) throw new Error(`${seen.tools} of ${tools} tools ran`);
  const expected = workload.startsWith("w2") ? work.DELTA.repeat(size) : "done";
  if (!text.startsWith(expected)) throw new Error("the model was not heard");
  if (workload !== "w2-unheard" && seen.events < size) throw new Error("events are missing");
}
console.log(JSON.stringify({
  wall: Math.min(...walls), cpu: Math.min(...cpus), memory, repeats: walls.length,
}));
