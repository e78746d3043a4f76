// The arithmetic, as one library: `reference.py` defines what each function computes, and has a
// function of the same name. Built by `hatch_build.py`. Nothing is allocated here, and nothing kept
// between calls; scratch room is given by the caller.
#ifdef ONE_LANE
#include "lane.h"
#else
#include "lanes.h"
#endif
#include "elements.h"
#include "mask.h"

#include "merging.h"
#include "trimming.h"
#include "ranking.h"
#include "voting.h"
#include "products.h"
#include "scoring.h"
#include "packing.h"
#include "digests.h"
#include "jobs.h"
#include "measuring.h"
