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

#ifdef __cplusplus
static_assert(sizeof(Hash) <= 128, "HASH_BYTES in core.py");
#else
_Static_assert(sizeof(Hash) <= 128, "HASH_BYTES in core.py");
#endif

INLINE void begin_piece(Hash *hash, const void *data, i64 width, i64 first, i64 size) {
  i64 is_long = size * width > SHORTEST;
  *hash = begin_hash((const u8 *)data + first * width, is_long ? size * width : 0);
}

static void merge_chunk(Job *job, i64 chunk, i64 from, i64 chunk_size, u32 threshold,
                        CombineRoom *room, Hash *hashes) {
  i64 width = width_of((enum Kind)job->kind), tuned_width = width_of((enum Kind)job->models_kind);
  i64 out_width = width_of((enum Kind)job->out_kind), inputs = 1 + job->count;
  Array base = {(void *)job->base, job->size, job->size, job->kind};
  begin_piece(hashes, job->base, width, from, chunk_size);
  for (i64 i = 1; i < inputs; i++) {
    begin_piece(hashes + i, job->models[i - 1].tuned, tuned_width, from, chunk_size);
  }
  begin_piece(hashes + inputs, job->out, out_width, from, chunk_size);
  for (i64 first = from; first < from + chunk_size; first += TILE) {
    i64 size = least_i64(TILE, from + chunk_size - first), end = first + size - from;
    decode_tile(&base, first, size, room->base);
    combine_tile(job->models, job->count, job->models_kind, job->start, first, size, job->elects,
                 threshold, room->total, job->figures + 4 * chunk * job->count, room);
    u32 peak = round_tile(room->base, room->total, (f32)job->scale, (enum Kind)job->kind, job->base,
                        (enum Kind)job->out_kind, job->out, first, size);
    job->peak = most_i64(job->peak, peak);
    if (!job->is_known[0]) advance_hash(hashes, end * width);
    for (i64 i = 1; i < inputs; i++) {
      if (!job->is_known[i]) advance_hash(hashes + i, end * tuned_width);
    }
    advance_hash(hashes + inputs, end * out_width);
  }
  for (i64 i = 0; i <= inputs; i++) {
    int is_wanted = (i == inputs || !job->is_known[i]) && hashes[i].piece.size;
    if (is_wanted) job->digests[chunk * (inputs + 1) + i] = end_hash(hashes + i);
  }
}

// The hashes of a job's arrays are in the room behind ROOM_BYTES.
ENTRY(void, merge)(Job *jobs, i64 count, i64 threshold, i64 chunk, void *room) {
  Hash *hashes = (Hash *)((u8 *)room + ROOM_BYTES);
  for (Job *job = jobs; job < jobs + count; job++) {
    for (i64 first = 0; first < job->size; first += chunk) {
      merge_chunk(job, first / chunk, first, least_i64(chunk, job->size - first), (u32)threshold,
                  (CombineRoom *)room, hashes);
    }
  }
}
