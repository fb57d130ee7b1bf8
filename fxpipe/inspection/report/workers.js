// The workers: what each runs and owns, what it takes, sends and holds.

function workerSection(host) {
  const { workers } = facts;
  const field = (label, name, format, kind = "n") => ({ label, name, format, kind });
  const span = known(([first, stop]) => (first < stop ? `${first} to ${stop - 1}` : "none"));
  const uneven = workers.some((w) => (w.speed ?? 1) !== 1);
  const work = [
    field("forward from", "forward_from", text, "name mono"), field("units", "forward_units", span, "nobreak"), field("backward from", "backward_from", text, "name mono"), field("units", "backward_units", span, "nobreak"),
    field("W units", "weight_units", span, "nobreak"), field("F ms", "forward_ms", number), field("B ms", "backward_ms", number), field("update ms", "update_ms", number), field("engines", "engines", (e) => list(e && [...new Set(e)]), "name"), uneven && field("speed", "speed", number), field("file", "file", text, "name mono")].filter(Boolean);
  const held = [
    field("owned", "owned", count), field("owned bytes", "owned_bytes", bytes), field("replicas", "replicas", count), field("replica bytes", "replica_bytes", bytes),
    field("in, a minibatch", "bytes_in", bytes), field("out, a minibatch", "bytes_out", bytes), field("saved, a microbatch", "saved_bytes", bytes), field("in flight", "in_flight", count), field("memory", "memory_bytes", bytes)];
  const make = (caption, fields) => table(caption, [{ label: "worker" }, ...fields.map(({ label, kind }) => ({ label, kind: kind === "n" ? "n" : null }))], workers.length, (i) => [
    h("td", { class: "nobreak" }, chip(workers[i].worker), workers[i].edited && fields === work ? [" ", h("span", { class: "quiet" }, "edited")] : null),
    ...fields.map(({ name, format, kind }) => shown("td", `workers.${i}.${name}`, format, { class: kind }))]);
  put(host, h("h3", null, "Work"), make("Work of the workers", work), h("h3", null, "Parameters, messages, memory"), make("Parameters, messages and memory of the workers", held),
    fold("Parameters by worker", () => table("Parameters by worker", [{ label: "worker" }, { label: "owns" }, { label: "keeps replicas of" }], workers.length, (i) => [
      h("td", null, chip(workers[i].worker)), h("td", { class: "name mono" }, list(workers[i].owned_names)), h("td", { class: "name mono" }, list(workers[i].replica_names))])));
}
