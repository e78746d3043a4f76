// Whole parts of a merge in one call: combined, added to the base, stored and digested tile by tile,
// while a tile is in a close cache.

enum { SHORTEST = 240 };  // bytes up to which a digest is computed in another way, by the caller

typedef struct {
  const void *base;
  i64 kind, start, size;  // of the base's elements: chunks that follow each other
  const Operand *models;
  i64 count, models_kind, elects;
  f64 scale;
  void *out;
  i64 out_kind;
  const u8 *is_known;  // of each input, whether its digests are not wanted
  i64 *figures;        // as those of `combine`
  Digest *digests;     // of each chunk's inputs, then of what is made of it
  i64 peak;            // the largest magnitude's bits before rounding; set here
} Job;

// Begin the hashes of base, models and result that are wanted; those of no size are left alone.
static void begin_hashes(const Job *job, i64 first, i64 size, Hash *hashes) {
  for (i64 i = 0; i < job->count + 2; i++) {
    int is_model = i > 0 && i <= job->count, is_result = i > job->count;
    i64 kind = is_result ? job->out_kind : is_model ? job->models_kind : job->kind;
    const void *data = is_result ? job->out : is_model ? job->models[i - 1].tuned : job->base;
    i64 width = width_of((enum Kind)kind);
    int is_wanted = size * width > SHORTEST && (is_result || !job->is_known[i]);
    hashes[i] = begin_hash((const u8 *)data + first * width, is_wanted ? size * width : 0);
  }
}

static void merge_chunk(Job *job, i64 chunk, i64 from, i64 chunk_size, u32 threshold,
                        CombineRoom *room, Hash *hashes) {
  Array base = {(void *)job->base, job->size, job->size, job->kind};
  begin_hashes(job, from, chunk_size, hashes);
  for (i64 first = from; first < from + chunk_size; first += TILE) {
    i64 size = least_i64(TILE, from + chunk_size - first), end = first + size - from;
    decode_tile(&base, first, size, room->base);
    combine_tile(job->models, job->count, job->models_kind, job->start, first, size, job->elects,
                 threshold, room->total, job->figures + 4 * chunk * job->count, room);
    u32 peak = round_tile(room->base, room->total, (f32)job->scale, (enum Kind)job->kind, job->base,
                          (enum Kind)job->out_kind, job->out, first, size);
    job->peak = most_i64(job->peak, peak);
    for (i64 i = 0; i < job->count + 2; i++) {
      advance_hash(hashes + i, hashes[i].piece.size / chunk_size * end);
    }
  }
  for (i64 i = 0; i < job->count + 2; i++) {
    if (hashes[i].piece.size) job->digests[chunk * (job->count + 2) + i] = end_hash(hashes + i);
  }
}

// The hashes are in the room behind ROOM_BYTES.
ENTRY(void, merge)(Job *jobs, i64 count, i64 threshold, i64 chunk, void *room) {
  Hash *hashes = (Hash *)((u8 *)room + ROOM_BYTES);
  for (Job *job = jobs; job < jobs + count; job++) {
    for (i64 first = 0; first < job->size; first += chunk) {
      merge_chunk(job, first / chunk, first, least_i64(chunk, job->size - first), (u32)threshold,
                  (CombineRoom *)room, hashes);
    }
  }
}
