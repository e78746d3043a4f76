// What a job is called, how far it is and what came of it, in words and elements.
import { coded, paragraph, tableOf } from "../../analysis/elements.js";
import { bytes, duration, listed, number, share, shortName, times, told } from "../../analysis/words.js";
import { make } from "../../controls.js";

const STATES = {
  waiting: "waiting for the previous job",
  running: "running",
  done: "done",
  failed: "failed",
  stopped: "stopped",
};
const TONES = { done: "ready", failed: "stop", stopped: "change" };
const VERDICTS = {
  "no defect found": "ready", "needs changes": "change", "cannot be merged": "stop",
};

const modelsOf = ({ request: { recipe } }) =>
  listed(recipe.models.merge_files.map((entry) => shortName(entry.file ?? entry)));
const outputOf = ({ request: { recipe } }) => shortName(recipe.models.output_file);

const TITLES = {
  analyze: (job) => `Analysis of ${modelsOf(job)}`,
  merge: (job) => `Merge of ${modelsOf(job)} to ${outputOf(job)}`,
  verify: (job) => `Verification of ${shortName(job.request.path)}`,
};

export const titleOf = (job) => TITLES[job.kind](job);
export const stateOf = ({ state, result }) => result?.verdict ?? STATES[state];
export const toneOf = ({ state, result }) => VERDICTS[result?.verdict] ?? TONES[state] ?? "note";

export function progressOf(job) {
  if (job.note) return job.note;
  if (!job.total_bytes) return "reading headers";
  const left = job.seconds_left === null ? "" : `, about ${duration(job.seconds_left)} left`;
  return `${job.verb}: ${bytes(job.done_bytes)} of ${bytes(job.total_bytes)}${left}`;
}

const sha = (code) =>
  code ? [paragraph("own-sha", "SHA-256 of the weights ", make("code", {}, code))] : [];
const warnings = (texts) => texts.map((text) => paragraph("own-warning", ...coded(text)));

function reportOf({ number: merge, result }) {
  const rows = result.models.map((model) => {
    const drops = model.drop_rate_asked !== null;
    const [realised, asked] = [model.drop_rate_realised, model.drop_rate_asked]
      .map((rate) => (drops ? share(rate) : "–"));
    return [model.name, realised, asked, number(model.largest_delta)];
  });
  const columns = ["model", "dropped", "drop rate", "largest |δ|"];
  const ariaLabel = `Models of merge ${merge}, to ${shortName(result.output)}`;  // like no other
  const resumed = result.resumed_chunks
    ? `; ${times(result.resumed_chunks, "chunk")} reused from the interrupted run` : "";
  return [
    paragraph("", `${times(result.tensors, "tensor")}, ${bytes(result.bytes_written)} written to `,
      make("code", {}, result.output), ` in ${duration(result.seconds)}${resumed}.`),
    make("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel },
      tableOf(columns, rows)),
    ...warnings(result.warnings),
    ...sha(result.sha256),
  ];
}

function checkOf({ result: { ok, tensors, bytes_checked: size, problems, changed, sha256 } }) {
  const intact = `${times(tensors, "tensor")}, ${bytes(size)}: intact.`;
  return [
    paragraph("", ok ? intact : "The output differs from its manifest:"),
    ...warnings([...problems, ...changed].map(told)),
    ...sha(sha256),
  ];
}

const RESULTS = { merge: reportOf, verify: checkOf, analyze: () => [] };

/** What came of a job, or what can be done about it. */
export function outcomeOf(job) {
  const parts = job.result ? RESULTS[job.kind](job) : [];
  if (job.problem) parts.push(paragraph("own-problem", job.problem));
  if (job.kind === "merge" && job.state === "stopped") {
    parts.push(paragraph("", "Finished work is kept. To continue, press “Resume” or run ",
      make("code", {}, "dare recipe.toml"), " with this recipe."));
  }
  return parts;
}
