// The demo's models in this browser: what src/dare/demo/llama.py does, with the arithmetic of
// llama.c. A token is a byte, and a text has a character for each. The texts that are handed in
// together are equally long, so a batch needs no padding.
import { toFloats } from "./core.js";

/** What config.json says of all of them and their weights do not. */
export const CONFIG = { heads: 4, context: 256, epsilon: 1e-5, theta: 10000 };
export const END = "\n";
const PANEL = 8;  // the columns that llama.c stores together
const PAGE_BYTES = 65536;

const roundUp = (count, step) => Math.ceil(count / step) * step;

export class Llama {
  #kernels;
  #end;  // where free memory begins, in bytes
  #scratch;  // where memory begins that each batch takes anew
  #hidden;
  #inner;
  #vocabulary;
  #embedding;
  #head;
  #norm;
  #layers = [];
  #cosine;
  #sine;

  /** `kernels` are the exports of an instance of llama.wasm, whose memory the model takes. */
  constructor(kernels, tensors) {
    this.#kernels = kernels;
    this.#end = roundUp(kernels.__heap_base.value, 16);
    const find = (name) => tensors.get(`model.${name}.weight`);
    const embedding = find("embed_tokens");
    [this.#vocabulary, this.#hidden] = embedding.shape;
    this.#embedding = this.#place(toFloats(embedding));
    this.#head = this.#pack([embedding]);
    this.#norm = this.#place(toFloats(find("norm")));
    while (find(`layers.${this.#layers.length}.mlp.up_proj`)) {
      const within = `layers.${this.#layers.length}.`;
      const pack = (...names) => this.#pack(names.map((name) => find(within + name)));
      this.#inner = find(`${within}mlp.up_proj`).shape[0];
      this.#layers.push({
        attentionNorm: this.#place(toFloats(find(`${within}input_layernorm`))),
        queryKeyValue: pack("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output: pack("self_attn.o_proj"),
        innerNorm: this.#place(toFloats(find(`${within}post_attention_layernorm`))),
        gateUp: pack("mlp.gate_proj", "mlp.up_proj"),
        down: pack("mlp.down_proj"),
      });
    }
    this.#placeAngles();
    this.#scratch = this.#end;
  }

  /** The logits [texts, positions from `first` on, 256] that each next byte gets. */
  logits(texts, first = 0) {
    const batch = this.#begin(texts.length, texts[0].length, texts[0].length);
    const at = this.#forward(batch, encode(texts), first) / 4;
    const count = texts.length * (texts[0].length - first) * this.#vocabulary;
    return this.#floats().slice(at, at + count);
  }

  /** Whether each prompt is answered exactly right: pairs of a prompt and its answer.
   *
   * Greedy decoding writes an answer if and only if each of its bytes, and the end of the line
   * after it, is the likeliest after those before.
   */
  areRight(examples) {
    const [prompt, answer] = examples[0];
    const length = prompt.length + answer.length;
    const batch = this.#begin(examples.length, length, length);
    const texts = examples.map((example) => example.join(""));
    const best = this.#likeliest(batch, encode(texts), prompt.length - 1);
    const wanted = encode(examples.map((example) => example[1] + END));
    const each = answer.length + END.length;
    return examples.map((_, row) => {
      const range = [row * each, (row + 1) * each];
      const written = best.subarray(...range);
      return wanted.subarray(...range).every((byte, at) => byte === written[at]);
    });
  }

  /** The mean bits that the bytes of each text need, but for its first. */
  bitsPerByte(texts) {
    const columns = this.#vocabulary;
    const targets = encode(texts.map((text) => text.slice(1)));
    const batch = this.#begin(texts.length, texts[0].length - 1, texts[0].length - 1);
    const logits = this.#forward(batch, encode(texts.map((text) => text.slice(0, -1))));
    this.#kernels.totals(logits, targets.length, columns, batch.normed);
    const floats = this.#floats();
    const totals = floats.subarray(batch.normed / 4);
    const each = targets.length / texts.length;
    return texts.map((_, row) => {
      let nats = 0;
      for (let at = row * each; at < (row + 1) * each; at++) {
        const chosen = floats[logits / 4 + at * columns + targets[at]];
        nats += Math.log(totals[2 * at + 1]) + totals[2 * at] - chosen;
      }
      return nats / Math.LN2 / each;
    });
  }

  /** Continue each prompt greedily: to the end of the line, `limit` bytes, or the context's end. */
  write(prompts, limit = 40) {
    const length = prompts[0].length;
    const most = Math.min(limit, CONFIG.context - length + 1);
    const batch = this.#begin(prompts.length, length, length + most);
    const written = prompts.map(() => "");
    let best = this.#likeliest(batch, encode(prompts), length - 1);
    for (let count = 1; ; count++) {
      best.forEach((byte, row) => (written[row] += String.fromCharCode(byte)));
      if (count === most || written.every((text) => text.includes(END))) break;
      best = this.#likeliest(batch, Uint8Array.from(best));
    }
    return written.map((text) => text.split(END)[0]);
  }

  #floats() {
    return new Float32Array(this.#kernels.memory.buffer);
  }

  /** Take room for so many floats; returns its address. */
  #allocate(count) {
    const { memory } = this.#kernels;
    const address = this.#end;
    this.#end += roundUp(4 * count, 16);
    const missing = this.#end - memory.buffer.byteLength;
    if (missing > 0) memory.grow(Math.ceil(missing / PAGE_BYTES));
    return address;
  }

  #place(values) {
    const address = this.#allocate(values.length);
    this.#floats().set(values, address / 4);
    return address;
  }

  /** Matrices side by side, as llama.c multiplies with them. */
  #pack(matrices) {
    const sizes = matrices.map(({ data }) => data.length);
    const address = this.#allocate(sizes.reduce((sum, size) => sum + size));
    const end = this.#end;
    let to = address;
    matrices.forEach((matrix, index) => {
      const from = this.#place(toFloats(matrix));
      this.#kernels.pack(from, ...matrix.shape, to);
      to += 4 * sizes[index];
      this.#end = end;
    });
    return address;
  }

  #placeAngles() {
    const size = this.#hidden / CONFIG.heads;
    const count = CONFIG.context * size;
    const angles = Array.from({ length: count }, (_, at) => {
      const pair = at % (size / 2);
      return Math.floor(at / size) * CONFIG.theta ** ((-2 * pair) / size);
    });
    this.#cosine = this.#place(angles.map(Math.cos));
    this.#sine = this.#place(angles.map(Math.sin));
  }

  /** Room for `rows` of up to `positions` new tokens, and for what is remembered of `capacity`. */
  #begin(rows, positions, capacity) {
    this.#end = this.#scratch;
    const cells = rows * positions;
    const room = roundUp(capacity, PANEL);
    const remembered = rows * room * this.#hidden;
    const batch = {
      rows,
      capacity: room,
      start: 0,  // where the next tokens go on
      tokens: this.#allocate(cells / 4),
      stream: this.#allocate(cells * this.#hidden),
      normed: this.#allocate(cells * this.#hidden),
      joined: this.#allocate(
        cells * Math.max(3 * this.#hidden, 2 * this.#inner, this.#vocabulary),
      ),
      scores: this.#allocate(4 * room),
      layers: this.#layers.map(() => ({
        keys: this.#allocate(remembered),
        values: this.#allocate(remembered),
      })),
    };
    this.#floats().fill(0, batch.layers[0].keys / 4, this.#end / 4);
    return batch;
  }

  /** Where the likeliest next bytes begin, at each position from `first` on. */
  #likeliest(batch, tokens, first = 0) {
    const rows = tokens.length - batch.rows * first;
    const logits = this.#forward(batch, tokens, first);
    this.#kernels.highest(logits, rows, this.#vocabulary, batch.normed);
    return new Int32Array(this.#kernels.memory.buffer, batch.normed, rows).slice();
  }

  /** The address of the logits of the tokens from `first` on, of each row. */
  #forward(batch, tokens, first = 0) {
    const { rows, start, capacity, stream, normed, joined } = batch;
    const kernels = this.#kernels;
    const hidden = this.#hidden;
    const inner = this.#inner;
    const size = hidden / CONFIG.heads;
    const positions = tokens.length / rows;
    const last = this.#layers.length - 1;
    let cells = tokens.length;
    new Uint8Array(kernels.memory.buffer).set(tokens, batch.tokens);
    kernels.embed(batch.tokens, cells, this.#embedding, hidden, stream);
    this.#layers.forEach((layer, index) => {
      const { keys, values } = batch.layers[index];
      const skipped = index === last ? first : 0;  // nobody needs these once they are remembered
      kernels.normalize(stream, cells, hidden, layer.attentionNorm, CONFIG.epsilon, normed);
      kernels.multiply(normed, cells, hidden, layer.queryKeyValue, hidden, 3 * hidden, joined);
      kernels.remember(
        joined, rows, positions, start, CONFIG.heads, size, this.#cosine, this.#sine,
        keys, values, capacity,
      );
      kernels.attend(
        joined, rows, positions, start, skipped, CONFIG.heads, size, keys, values, capacity,
        batch.scores, normed,
      );
      if (skipped) cells = this.#dropFirst(batch, positions, skipped);
      kernels.addProduct(normed, cells, hidden, layer.output, hidden, hidden, stream);
      kernels.normalize(stream, cells, hidden, layer.innerNorm, CONFIG.epsilon, normed);
      kernels.multiply(normed, cells, hidden, layer.gateUp, hidden, 2 * inner, joined);
      kernels.gate(joined, cells, inner);
      kernels.addProduct(joined, cells, 2 * inner, layer.down, inner, hidden, stream);
    });
    kernels.normalize(stream, cells, hidden, this.#norm, CONFIG.epsilon, normed);
    kernels.multiply(normed, cells, hidden, this.#head, hidden, this.#vocabulary, joined);
    batch.start += positions;
    return joined;
  }

  /** Close up the stream without the first positions of each row; returns how many are left. */
  #dropFirst({ rows, stream }, positions, first) {
    const floats = this.#floats();
    const kept = (positions - first) * this.#hidden;
    for (let row = 0; row < rows; row++) {
      const from = stream / 4 + (row * positions + first) * this.#hidden;
      floats.copyWithin(stream / 4 + row * kept, from, from + kept);
    }
    return rows * (positions - first);
  }
}

/** The bytes of texts one after the other. */
function encode(texts) {
  return Uint8Array.from(texts.join(""), (character) => character.charCodeAt(0));
}
