"""Configurations of mergekit, and what is expected when both programs merge them.

The models are those of `tiny_models`. Where no type is said, mergekit is told to compute in
float32. Examples are those of mergekit's repository, with other models and fewer layers.
"""

from __future__ import annotations

from dataclasses import dataclass

AGREES = "agrees"
IN_DISTRIBUTION = "agrees in distribution"
DIFFERS = "differs"
ONLY_HERE = "merges only here"
REFUSED = "refused by both"
REFUSED_HERE = "refused only here"

MASKS = "other elements are dropped, at the same rate"
THRESHOLD = "mergekit's divergence of rows that are nearly equal is mostly rounding in float32"


@dataclass(frozen=True)
class Configuration:
    """A configuration, and what is expected of the two programs."""

    name: str
    text: str
    verdict: str = AGREES
    why: str = ""
    share: float = 0.0  # of the norm that the results may be apart where they differ

    @property
    def yaml(self) -> str:
        """The text of the file."""
        is_typed = "dtype:" in self.text or "experts:" in self.text
        return self.text if is_typed else _typed(self.text)


def _typed(text: str) -> str:
    return "\n---\n".join(f"{part.strip()}\ndtype: float32" for part in text.split("\n---\n"))


def slices(*parts: str, method: str = "passthrough", more: str = "") -> str:
    """Write slices: each is its sources, MODEL BEGIN END {PARAMETERS}, with / between them."""
    lines = [f"merge_method: {method}", more, "slices:"]
    for part in parts:
        sources, _, shared = part.partition(" | ")
        lines.append("  - sources:")
        for source in sources.split(" / "):
            model, begin, end, *parameters = source.split(" ", 3)
            own = f", parameters: {parameters[0]}" if parameters else ""
            lines.append(f"      - {{model: {model}, layer_range: [{begin}, {end}]{own}}}")
        lines += [f"    {shared}"] if shared else []
    return "\n".join(line for line in lines if line)


def models(method: str, *given: str, more: str = "", base: str = "base") -> str:
    """Write a merge of models: each is MODEL {PARAMETERS}."""
    lines = [f"merge_method: {method}", *([f"base_model: {base}"] if base else []), "models:"]
    for entry in given:
        model, _, parameters = entry.partition(" ")
        own = f", parameters: {parameters}" if parameters else ""
        lines.append(f"  - {{model: {model}{own}}}")
    return "\n".join([*lines, more])


C = Configuration

ARCS = """
parameters:
  t:
    - filter: self_attn
      value: [0, 0.5, 0.3, 0.7, 1]
    - filter: mlp
      value: [1, 0.5, 0.7, 0.3, 0]
    - value: 0.5 # fallback for rest of tensors
"""
TIES_EXAMPLE = """
models:
  - model: math
    parameters:
      density: [1, 0.7, 0.1] # density gradient
      weight: 1.0
  - model: code
    parameters:
      density: 0.5
      weight: [0, 0.3, 0.7, 1] # weight gradient
  - model: chat
    parameters:
      density: 0.33
      weight:
        - filter: mlp
          value: 0.5
        - value: 0
merge_method: ties
base_model: base
parameters:
  normalize: true
  int8_mask: true
"""
MEGA = """
slices:
  - sources:
      - model: math
        layer_range: [0, 4]
      - model: far
        layer_range: [0, 4]
merge_method: slerp
base_model: math
parameters:
  t:
    - filter: self_attn
      value: [0, 0.5, 0.3, 0.7, 1]
    - filter: mlp
      value: [1, 0.5, 0.7, 0.3, 0]
    - value: 0.5 # fallback for rest of tensors
out_path: ./models/gradient-slerp
---
models:
  - model: ./models/gradient-slerp
    parameters:
      density: [1, 0.7, 0.1] # density gradient
      weight: 1.0
  - model: chat
    parameters:
      density: 0.33
      weight:
        - filter: mlp
          value: 0.5
        - value: 0
merge_method: ties
base_model: base
parameters:
  normalize: true
  int8_mask: true
out_path: ./models/gradient-slerp-ties
"""
SPEECH = models("encoder_decoder_weighted", "math {encoder_weight: 0.8}", "code", base="")

EXAMPLES = [
    C(
        "example arcee_fusion.yml",
        models("arcee_fusion", "math", "code", base="math"),
        DIFFERS,
        THRESHOLD,
        share=0.1,
    ),
    C(
        "example bio-merge.yml",
        models(
            "ties",
            *("math {density: 0.5, weight: 0.5}", "code {density: 0.5, weight: 0.5}"),
            more="parameters: {normalize: false, int8_mask: true}",
        ),
    ),
    C(
        "example cabs.yml",
        models("cabs", "math {weight: 0.6, n_val: 8, m_val: 32}", more="default_n_val: 8"),
        REFUSED,
        "mergekit 0.1.5 has no method cabs; here it is a method of recipes",
    ),
    C(
        "example chipalign.yml",
        models(
            "nuslerp",
            *("math", "code"),
            more="parameters: {geodesic: true, lambda: 0.5, nuslerp_flatten: true}",
            base="",
        ),
        REFUSED,
        "weight is missing; geodesic is of another version",
    ),
    C(
        "example core_space.yml",
        models("core_space", "math {weight: 0.5}", "code {weight: 1.0}"),
        REFUSED,
        "mergekit 0.1.5 has no method core_space",
    ),
    C(
        "example evo_bert_large.yml",
        "genome: {models: [math, code], merge_method: dare_ties, base_model: base}\ntasks: [x]",
        REFUSED,
        "it describes a search, not a merge: dare search",
    ),
    C("example gpt2-small.yml", slices("gpt2 0 3")),
    C(
        "example gradient-slerp.yml",
        slices("math 0 4 / far 0 4", method="slerp", more="base_model: math") + ARCS,
    ),
    C(
        "example gradient-slerp.yml, first version",
        slices("math 0 4 / far 0 4", method="slerp", more="base_model: math")
        + ARCS.replace("filter", "pattern"),
        AGREES,
        "pattern means nothing to mergekit, so the first value is for all tensors",
    ),
    C(
        "example linear.yml",
        models("linear", "math {weight: 1.0}", "code {weight: 0.3}", "far {weight: 0.5}", base=""),
    ),
    C(
        "example linear_small.yml",
        "models: [{model: math}, {model: code}]\nmetric_method: scale",
        REFUSED,
        "it measures models, and merges nothing: dare analyze",
    ),
    C(
        "example lrp.yml",
        models("lrp", "math {weight: 1.0}", "code {weight: 1.0}"),
        REFUSED,
        "mergekit 0.1.5 has no method lrp",
    ),
    C(
        "example mega.yml",
        MEGA,
        ONLY_HERE,
        "out_path was a key of an older program; mergekit 0.1.5 wants name",
    ),
    *(
        C(
            f"example {name}.yml",
            "models: [{model: math}, {model: code}]\nmetric_method: all",
            REFUSED,
            "it measures models, and merges nothing: dare analyze",
        )
        for name in ("metrics-1", "metrics-llama-1v2", "metrics-llama-codev2", "metrics-small")
    ),
    C("example orcamini-platy-44layer.yml", slices("math 0 3", "code 2 4")),
    C("example ties.yml", TIES_EXAMPLE),
    C(
        "example ties.yml, another version",
        models("ranked_ties", "math {density: [0.8, 0.3, 0.1], weight: [1.0, 0.8, 0.5]}"),
        REFUSED,
        "mergekit 0.1.5 has no method ranked_ties",
    ),
    C(
        "example vlm-linear.yml",
        models("linear", "vlm {weight: 1}", "vlm-tuned {weight: 1}", base=""),
    ),
    C(
        "example vlm-ties.yml",
        models(
            "ties",
            *("vlm-tuned {density: [1, 0.7, 0.1], weight: 1.0}",),
            *("vlm {density: 0.5, weight: [0, 0.3, 0.7, 1]}",),
            more="parameters: {normalize: true, int8_mask: true}",
            base="vlm",
        ),
    ),
    *(
        C(f"example {name}.yml", SPEECH, REFUSED, "mergekit 0.1.5 has no such method")
        for name in ("whisper-encoder-decoder-test", "whisper-encoder-decoder-weighted")
    ),
    C(
        "example whisper-lora-multilingual.yml",
        "models:\n"
        "  - {model: base, lora: lora, parameters: {weight: 0.6}}\n"
        "  - {model: base, lora: lora-too, parameters: {weight: 0.4}}\n"
        "merge_method: slerp",
        REFUSED,
        "lora beside model means nothing, and slerp needs base_model and two models",
    ),
    C(
        "example whisper-merge-multilingual.yml",
        models("slerp", "math {weight: 0.7}", "code {weight: 0.3}", base=""),
        REFUSED,
        "slerp needs base_model and t",
    ),
    C("example zipit.yml", TIES_EXAMPLE + 'align_weights: "zipit"\n'),
]

FILTERS = "{weight: [{filter: mlp, value: [0.25, 1.5, 0.5]}, {filter: self_attn.q, value: 0.9}, "
FILTERS += "{value: [0.1, 0.8]}]}"
WEIGHTS = "[{filter: mlp, value: [1, 0]}, {value: 4}]"
LINEAR = [
    C("linear, a model at half", models("linear", "math {weight: 0.5}", base="")),
    C(
        "linear, filters and layers",
        models(
            "linear",
            "math {weight: [{filter: mlp, value: 3}, {value: 1}]}",
            f"code {{weight: {WEIGHTS}}}",
            "far {weight: [{filter: mlp, value: [2, 3]}, {value: 0.5}]}",
            base="",
        ),
    ),
    C(
        "linear, a sum that changes over the layers",
        models("linear", "math {weight: [0.2, 3]}", "code {weight: [1, 2, 0.5]}", base=""),
    ),
    C(
        "linear, filters of one model alone",
        models(
            "linear",
            "math {weight: [{filter: mlp, value: 3}, {value: 1}]}",
            "code {weight: [{filter: q_proj, value: 2}, {filter: norm, value: 0}, {value: 1}]}",
            base="",
        ),
    ),
    C(
        "linear, not normalised",
        models(
            "linear",
            *("math {weight: 0.6}", "code {weight: 0.6}"),
            more="parameters: {normalize: false}",
            base="",
        ),
    ),
    C(
        "linear, negative weight",
        models("linear", "math {weight: 1.5}", "code {weight: -0.5}", base=""),
    ),
    C(
        "linear, base among the models",
        models("linear", "base {weight: 1}", "math {weight: 0.5}", "code {weight: 0.25}"),
    ),
    C(
        "linear, base not among the models",
        models("linear", "math {weight: 0.5}", "code {weight: 0.25}"),
        REFUSED,
        "the base is one of the models, and has no weight",
    ),
    C(
        "linear, base with the weight of all",
        models("linear", "math", "code", more="parameters: {weight: 0.5}"),
    ),
    C("linear, weight missing", models("linear", "math", "code", base=""), REFUSED, "no weights"),
    C(
        "linear, stored in 16 bits",
        models("linear", "math {weight: 1}", "far {weight: 1}", more="out_dtype: bfloat16", base="")
        + "\ndtype: float32",
    ),
    C(
        "linear, computed in 16 bits",
        models("linear", "math {weight: 1}", "far {weight: 3}", more="dtype: bfloat16", base=""),
        DIFFERS,
        "models are rounded to bfloat16 first there, here once at the end",
        share=2**-7,
    ),
    C(
        "linear, YAML anchors",
        "merge_method: linear\nmodels:\n"
        "  - {model: math, parameters: &usual {weight: 0.5}}\n"
        "  - {model: code, parameters: *usual}\n"
        "  - {model: chat, parameters: {<<: *usual, weight: 2}}",
    ),
    C(
        "linear, unknown keys",
        models(
            "linear",
            *("math {weight: 1, wieght: 2}", "code {weight: 1}"),
            more="random_seed: 0\nallow_crimes: true",
            base="",
        ),
        AGREES,
        "they mean nothing to mergekit, and are noted",
    ),
]

DARE = "dare_linear"
DELTAS = [
    C(
        "task_arithmetic, filters and layers",
        models(
            "task_arithmetic",
            *(f"math {FILTERS}", "base", "code {weight: [{filter: norm, value: 2}]}", "chat"),
            more="parameters: {lambda: 0.7, weight: [-0.5, 0.5, 1e-1]}",
        ),
    ),
    C(
        "task_arithmetic, normalised",
        models(
            "task_arithmetic",
            *("math {weight: 3}", "code {weight: [1, 2]}", "chat {weight: [0, 5, 1]}"),
            more="parameters: {normalize: true}",
        ),
    ),
    C(
        "task_arithmetic, weights that cancel",
        models(
            "task_arithmetic",
            *("math {weight: 3}", "code {weight: -3}"),
            more="parameters: {normalize: true}",
        ),
    ),
    C("task_arithmetic, the base alone", models("task_arithmetic", "base")),
    C(
        "task_arithmetic, no base",
        models("task_arithmetic", "math {weight: 1}", base=""),
        REFUSED,
        "base_model is missing",
    ),
    C(
        "task_arithmetic, lambda over the layers",
        models("task_arithmetic", "math {weight: 1}", more="parameters: {lambda: [0.5, 1]}"),
    ),
    C(
        "task_arithmetic, lambda by filter",
        models(
            "task_arithmetic",
            f"math {FILTERS}",
            "code {weight: 0.7}",
            more="parameters: {lambda: [{filter: mlp.up, value: 0.5}, {filter: q_, value: 0}]}",
        ),
    ),
    C(
        "dare_ties, lambda by filter and over the layers",
        models(
            "dare_ties",
            "math {weight: [{filter: mlp, value: 0.3}, {value: 1}]}",
            "code {weight: -0.7}",
            more="parameters: {lambda: [{filter: up, value: [0.5, 2]}, {value: -1.5}]}",
        ),
    ),
    C(
        "ties, lambda by filter, normalised",
        models("ties", "math {weight: 1}", more="parameters: {lambda: [{filter: up, value: 2}]}"),
        REFUSED_HERE,
        "weights by which the result is divided cannot hold it",
    ),
    C(
        "dare_linear, all kept",
        models(DARE, "math {weight: 0.3, density: 1.0}", "code {weight: -0.7}"),
    ),
    C(
        "dare_linear, normalised",
        models(
            DARE,
            *("math {weight: [0.5, 2, 1.5], density: 1.0}", "code {weight: [2, 0.5, 1.0]}"),
            more="parameters: {normalize: true}",
        ),
    ),
    C("dare_linear", models(DARE, "math {weight: 0.5, density: 0.4}"), IN_DISTRIBUTION, MASKS),
    C(
        "dare_linear, density over the layers",
        models(DARE, "math {weight: 0.5, density: [0.2, 0.8]}", "code {weight: 1, density: 0.5}"),
        IN_DISTRIBUTION,
        MASKS,
    ),
    C(
        "dare_linear, not rescaled",
        models(DARE, "math {weight: 0.5, density: 0.4}", more="parameters: {rescale: false}"),
        IN_DISTRIBUTION,
        MASKS,
    ),
    C(
        "dare_ties, all kept",
        models(
            "dare_ties",
            *("math {weight: 0.5}", "code {weight: [0.25, 0.75]}", "chat {weight: -0.4}"),
            more="parameters: {int8_mask: true, lambda: 1.5}",
        ),
    ),
    C(
        "dare_ties, normalised",
        models(
            "dare_ties",
            *("math {weight: 0.5}", "code {weight: [0.25, 0.75]}", "chat {weight: 0.4}"),
            more="parameters: {normalize: true, lambda: 1.5}",
        ),
    ),
    C(
        "dare_ties, negative weight, normalised",
        models(
            "dare_ties",
            *("math {weight: 0.5}", "code {weight: [0.25, 0.75]}", "chat {weight: -0.4}"),
            more="parameters: {normalize: true}",
        ),
    ),
    C(
        "dare_ties",
        models(
            "dare_ties",
            *("math {weight: 0.5, density: 0.5}", "code {weight: 0.4, density: 0.3}"),
            more="parameters: {int8_mask: true}",
        ),
        IN_DISTRIBUTION,
        MASKS,
    ),
    C(
        "ties, filters and layers",
        models(
            "ties",
            "math {weight: 1, density: [{filter: mlp, value: 0.31}, {filter: embed, value: 0.9}]}",
            *("code {weight: [0.5, 2.0], density: [0.21, 0.93]}", "chat {weight: 0.7}"),
            more="parameters: {density: 0.43, lambda: 0.7}",
        ),
    ),
    C(
        "ties, negative weight",
        models("ties", "math {weight: 1}", "code {weight: -0.5}", "chat {weight: 0.7}"),
    ),
    C(
        "ties, rescaled",
        models(
            "ties",
            *("math {weight: 1, density: 0.31}", "code {weight: 0.5, density: 0.71}"),
            more="parameters: {rescale: true}",
        ),
    ),
    C(
        "ties, nothing kept of a model",
        models("ties", "math {weight: 1, density: 0.5}", "code {weight: 0.5, density: 0}"),
        REFUSED_HERE,
        "density 0 leaves nothing; take the model off the list",
    ),
    C(
        "breadcrumbs",
        models(
            "breadcrumbs",
            "math {weight: 0.7, density: [{filter: mlp, value: 0.31}, {filter: embed, value: 1}], "
            "gamma: 0.07}",
            *("code {weight: [0.5, -2.0], density: [0.21, 0.93]}", "chat {weight: 1, gamma: 0}"),
            more="parameters: {density: 0.43, lambda: 0.7}",
        ),
    ),
    C(
        "breadcrumbs, rescaled",
        models(
            "breadcrumbs",
            *("math {weight: 0.7, density: 0.31}", "code {weight: 0.5, density: 0.9}"),
            more="parameters: {rescale: true}",
        ),
    ),
    C(
        "breadcrumbs_ties",
        models(
            "breadcrumbs_ties",
            *("math {weight: 0.5, density: 0.71, gamma: [0.05, 0.2]}",),
            *("code {weight: [0.25, 0.75]}", "chat {weight: 0.4}"),
            more="parameters: {density: 0.53, gamma: 0.02}",
        ),
    ),
    C(
        "breadcrumbs_ties, normalised",
        models(
            "breadcrumbs_ties",
            *("math {weight: 0.5, density: 0.71}", "code {weight: [0.25, 0.75]}"),
            more="parameters: {density: 0.53, normalize: true}",
        ),
    ),
    C(
        "della, all kept",
        models("della", "math {weight: 0.5}", "code {weight: [0.25, 0.75]}", "chat {weight: 0.4}"),
    ),
    C(
        "della",
        models("della", "math {weight: 0.5, density: 0.5}", "code {weight: 0.4, density: 0.6}"),
        IN_DISTRIBUTION,
        MASKS,
    ),
    C(
        "della, epsilon too large",
        models("della", "math {weight: 0.5, density: 0.1}"),
        REFUSED,
        "densities below 0",
    ),
    C(
        "della_linear, all kept",
        models(
            "della_linear",
            *("math {weight: 0.3, density: 1.0}", "code {weight: -0.7}"),
            more="parameters: {epsilon: 0.1}",
        ),
    ),
    C(
        "della_linear",
        models("della_linear", "math {weight: 0.5, density: [0.4, 0.7], epsilon: 0.1}"),
        IN_DISTRIBUTION,
        MASKS,
    ),
    C("sce", models("sce", "math", "code", "chat")),
    C("sce, selected", models("sce", "math", "related", more="parameters: {select_topk: 0.31}")),
    C(
        "sce, filters and layers",
        models(
            "sce",
            *("math", "related", "chat"),
            more="parameters: {int8_mask: true, "
            "select_topk: [{filter: mlp, value: [0.2, 0.7]}, {filter: attn, value: 0.5}]}",
        ),
    ),
    C("ram", models("ram", "math", "code", "chat", more="parameters: {epsilon: 0.001}")),
    C("ram, as usual", models("ram", "math", "code")),
    C("ramplus_tl", models("ramplus_tl", "math", "code", more="parameters: {epsilon: 0.001}")),
    C(
        "ramplus_tl, all parameters",
        models(
            "ramplus_tl",
            *("math", "code", "chat"),
            more="parameters: {epsilon: 0.001, r: 0.3, alpha: [0.5, 1]}",
        ),
    ),
    C("nearswap", models("nearswap", "math", more="parameters: {t: 0.001}")),
    C(
        "nearswap, filters and layers",
        models(
            "nearswap",
            *("base", "far"),
            more="parameters: {t: [{filter: mlp, value: 0.01}, {value: [0.001, 0.02]}]}",
        ),
    ),
    C("arcee_fusion", models("arcee_fusion", "far"), DIFFERS, THRESHOLD, share=0.2),
    C(
        "arcee_fusion, computed in 64 bits",
        models("arcee_fusion", "far", more="dtype: float64\nout_dtype: float32"),
    ),
    C("model_stock", models("model_stock", "related", "math", "alike")),
    C(
        "model_stock, filter_wise",
        models("model_stock", "related", "math", "alike", more="parameters: {filter_wise: true}"),
    ),
    C(
        "model_stock, models that disagree",
        models("model_stock", "math", "code", "chat"),
        DIFFERS,
        "where models point away from each other the base is kept; mergekit goes beyond it",
        share=0.05,
    ),
    C("model_stock, one model", models("model_stock", "math"), REFUSED, "it takes two"),
]

ARC = "parameters: {t: 0.3}"
THREE = ("math {weight: [1, 2]}", "far {weight: 2}", "chat {weight: 1}")
SPHERES = [
    C("slerp", models("slerp", "math", "far", more=ARC, base="math")),
    C("slerp, base listed last", models("slerp", "far", "math", more=ARC, base="math")),
    C("slerp, base not listed", models("slerp", "far", more=ARC, base="math")),
    C(
        "slerp, a t for each slice",
        slices(
            "math 0 2 / far 0 2 | parameters: {t: [0, 1]}",
            "math 2 4 / far 2 4 | parameters: {t: [{filter: mlp, value: 0.7}, {value: 0.2}]}",
            method="slerp",
            more="base_model: math",
        ),
    ),
    C("slerp, three models", models("slerp", "math", "far", "code", more=ARC), REFUSED, "two"),
    C("nuslerp", models("nuslerp", "math {weight: 1}", "far {weight: 3}")),
    C(
        "nuslerp, no base",
        models("nuslerp", "far {weight: [0.2, 0.9]}", "base {weight: [0.8, 0.1]}", base=""),
    ),
    C(
        "nuslerp, rows",
        models(
            "nuslerp",
            *("math {weight: 1}", "far {weight: 3}"),
            more="parameters: {nuslerp_flatten: false}",
        ),
    ),
    C(
        "nuslerp, columns",
        models(
            "nuslerp",
            *("math {weight: 1}", "far {weight: 3}"),
            more="parameters: {nuslerp_flatten: false, nuslerp_row_wise: true}",
        ),
    ),
    C(
        "multislerp",
        models("multislerp", *THREE),
    ),
    C(
        "multislerp, no base",
        models("multislerp", *THREE, base=""),
    ),
    C(
        "multislerp, weights as they are",
        models(
            "multislerp",
            *("math {weight: 0.5}", "far {weight: 0.4}"),
            more="parameters: {normalize_weights: false}",
        ),
    ),
    C(
        "karcher",
        models(
            "karcher", "math", "far", "chat", more="parameters: {max_iter: 100, tol: 1e-9}", base=""
        ),
    ),
    C(
        "karcher, with a base",
        models("karcher", "math", "far", more="parameters: {max_iter: 100, tol: 1e-9}"),
    ),
    C("karcher, as usual", models("karcher", "math", "code", "chat", base="")),
]

BAND = "{weight: [0, 0.4, 1]}"
STACKS = [
    C("passthrough of a whole model", models("passthrough", "math", base="")),
    C("passthrough of the first layers", slices("math 0 2")),
    C("passthrough, overlapping", slices("math 0 3", "code 1 4")),
    C("passthrough, repeated", slices("math 0 2", "math 0 2", "math 1 2", "math 2 4")),
    C("passthrough, in another order", slices("far 3 4", "far 2 3", "far 1 2", "far 0 1")),
    C("passthrough, each layer twice", slices(*(f"math {n // 2} {n // 2 + 1}" for n in range(8)))),
    C("passthrough, with a base", slices("math 0 2", "code 2 4", more="base_model: base")),
    C(
        "passthrough, scaled",
        slices(
            "math 0 3",
            "math 1 4 {scale: [{filter: o_proj, value: 0.0}, {filter: down_proj, value: 0.5}, "
            "{value: 1.0}]}",
        ),
    ),
    C("passthrough, scaled as a whole", models("passthrough", "math {scale: 0.5}", base="")),
    C(
        "passthrough of two models",
        models("passthrough", "math", "code", base=""),
        REFUSED,
        "it copies one",
    ),
    C(
        "passthrough, a layer that is not there",
        slices("math 0 2", "code 3 6"),
        REFUSED,
        "there are 4 layers",
    ),
    C(
        "slices, linear bands",
        slices(
            f"math 0 2 {BAND} / code 0 2 {{weight: 1}}",
            "math 1 3 {weight: [1, 0]} / far 2 4 {weight: 0.5}",
            method="linear",
        ),
    ),
    C(
        "slices, fewer models first",
        slices(
            "math 0 2 {weight: 1}", "math 2 4 {weight: 1} / far 2 4 {weight: 1}", method="linear"
        ),
        DIFFERS,
        "mergekit takes last norm and head of only as many models as the first slice has",
        share=0.8,
    ),
    C(
        "slices, their own parameters and filters",
        slices(
            "base 0 1 / math 0 1 {weight: [{filter: mlp, value: 2}]} | parameters: {weight: 0.5}",
            "base 1 4 / math 1 4 | parameters: {weight: [0.5, 1, 2]}",
            method="task_arithmetic",
            more="base_model: base\nparameters: {lambda: 0.9}",
        ),
    ),
    C(
        "slices, each with a base",
        slices(
            "base 0 2 / math 0 2 {weight: 1, density: 0.5} / code 0 2 {weight: 1} "
            "| base_model: base",
            "math 1 3 / code 2 4 {weight: 1} / chat 2 4 {weight: 0.4} | base_model: math",
            method="ties",
            more="base_model: base",
        ),
    ),
    C(
        "slices, other layers of the base",
        slices(
            "base 0 2 / math 2 4 {weight: 1}",
            "base 2 4 / math 0 2 {weight: 1}",
            method="task_arithmetic",
            more="base_model: base",
        ),
    ),
    C(
        "slices, dare in bands",
        slices(
            "base 0 2 / math 0 2 {weight: 1, density: 0.5}",
            "base 2 4 / math 2 4 {weight: 0.3, density: [0.2, 0.9]}",
            method="dare_linear",
            more="base_model: base",
        ),
        IN_DISTRIBUTION,
        MASKS,
    ),
    C(
        "slices, ranges of different lengths",
        slices("math 0 2 {weight: 1} / code 0 3 {weight: 1}", method="linear"),
        REFUSED,
        "all must have the same number of layers",
    ),
    C(
        "slices, a model twice",
        slices("math 0 2 {weight: 1} / math 2 4 {weight: 1}", method="linear"),
        REFUSED,
        "each model once",
    ),
    C(
        "slices, base not among the sources",
        slices("math 0 4 {weight: 1}", method="task_arithmetic", more="base_model: base"),
        REFUSED,
        "base_model must be a source",
    ),
    C(
        "modules, default",
        "merge_method: linear\nmodules:\n  default:\n    models:\n"
        "      - {model: math, parameters: {weight: 1}}\n      - {model: code}\n"
        "    parameters: {weight: [0.5, 2]}",
    ),
    C(
        "modules, default with slices",
        "merge_method: passthrough\nmodules:\n  default:\n    slices:\n"
        "      - sources: [{model: math, layer_range: [0, 3]}]\n"
        "      - sources: [{model: code, layer_range: [2, 4]}]",
    ),
    C(
        "modules, text and vision",
        "merge_method: linear\nmodules:\n"
        "  text_decoder:\n    models: &models [{model: vlm}, {model: vlm-tuned}]\n"
        "    parameters: {weight: [0.1, 0.9]}\n"
        "  multi_modal_projector:\n    models: *models\n    parameters: {weight: 1}\n"
        "  vision_tower:\n"
        "    models: [{model: vlm}, {model: vlm-tuned, parameters: {weight: [0.2, 0.7]}}]\n"
        "    parameters: {weight: [{filter: mlp, value: 0.3}, {value: 0.5}]}",
    ),
    C(
        "modules, slices of all layers",
        "merge_method: linear\nmodules:\n  text_decoder:\n    slices:\n"
        "      - sources:\n          - {model: vlm, layer_range: [0, 2]}\n"
        "          - {model: vlm-tuned, layer_range: [0, 2], parameters: {weight: [0.2, 0.7]}}\n"
        "        parameters: {weight: [{filter: mlp, value: 0.3}]}\n"
        "    parameters: {weight: 1}\n"
        "  multi_modal_projector:\n    models: &models [{model: vlm}, {model: vlm-tuned}]\n"
        "    parameters: {weight: 1}\n"
        "  vision_tower:\n    models: *models\n    parameters: {weight: [0.1, 0.9]}",
    ),
    C(
        "modules, encoder and decoder",
        "merge_method: linear\nmodules:\n"
        "  encoder:\n    models: &models [{model: t5}, {model: t5-tuned}]\n"
        "    parameters: {weight: 1}\n"
        "  decoder:\n    models: [{model: t5, parameters: {weight: 3}}, {model: t5-tuned}]\n"
        "    parameters: {weight: [{filter: DenseReluDense, value: 0.2}, {value: 1}]}\n"
        "  shared:\n    models: *models\n    parameters: {weight: 1}",
    ),
]

NAMED = MEGA.replace("out_path: ./models/gradient-slerp-ties\n", "")
NAMED = NAMED.replace("out_path: ./models/gradient-slerp\n", "name: arcs\n")
FILES = [
    C("several merges in a file", NAMED.replace("./models/gradient-slerp", "arcs")),
    C(
        "several merges, one after the other",
        models("linear", "math {weight: 1}", "code {weight: 1}", more="name: first", base="")
        + "\n---\n"
        + models("slerp", "first", "far", more="name: second\nparameters: {t: 0.4}", base="first")
        + "\n---\n"
        + models("task_arithmetic", "second {weight: 0.5}", "first {weight: 0.5}"),
    ),
    C(
        "several merges, one is the base",
        models("linear", "math {weight: 1}", "code {weight: 3}", more="name: middle", base="")
        + "\n---\n"
        + models("ties", "math {weight: 1}", "code {weight: 1, density: 0.4}", base="middle"),
    ),
    C(
        "several merges, a stack of one",
        models("linear", "math {weight: 1}", "code {weight: 1}", more="name: middle", base="")
        + "\n---\n"
        + slices("middle 0 3", "far 1 4"),
    ),
    C(
        "several merges, all named",
        models("linear", "math {weight: 1}", "code {weight: 1}", more="name: one", base="")
        + "\n---\n"
        + models("linear", "one {weight: 1}", "chat {weight: 1}", more="name: two", base=""),
        AGREES,
        "the last one is the output",
    ),
    C(
        "several merges, two without a name",
        models("linear", "math {weight: 1}", base="")
        + "\n---\n"
        + models("linear", "code {weight: 1}", base=""),
        REFUSED,
        "which is the output?",
    ),
    C("a name of a single merge", models("linear", "math {weight: 1}", more="name: x", base="")),
    C(
        "an adapter on the base",
        models("task_arithmetic", "base+lora {weight: 0.5}", "math {weight: 0.5}"),
    ),
    C(
        "an adapter on another model",
        models("task_arithmetic", "math+lora {weight: 1}", "code {weight: 0.3}"),
    ),
    C("adapters, linear", models("linear", "base+lora {weight: 1}", "math {weight: 1}", base="")),
    C(
        "an adapter on the base that others change",
        models("task_arithmetic", "math {weight: 0.5}", base="base+lora"),
    ),
    C("an adapter in a stack", slices("base+lora 0 3", "math 2 4")),
    C(
        "an adapter as a table",
        "merge_method: linear\nmodels:\n"
        "  - {model: {model: {path: base}, lora: {path: lora}}, parameters: {weight: 1}}\n"
        "  - {model: {model: {path: math}}, parameters: {weight: 1}}",
    ),
]

TOKENIZED = ("with-tokens-a {weight: 1}", "with-tokens-b {weight: 1}")
ROWS = """
tokenizer:
  source: union
  tokens:
    <|a|>: {source: with-tokens-a, force: true}
    <|b|>: {source: {kind: model_token, model: with-tokens-a, token: <|a|>}}
    "7": {source: {kind: model_token, model: with-tokens-b, token_id: 3}, force: true}
    "8": {source: {kind: zero}, force: true}
"""


def tokenized(more: str, method: str = "task_arithmetic") -> str:
    """Write a merge of the models with tokenizers."""
    return models(method, *TOKENIZED, more=more, base="with-tokens")


def sharing(method: str, *, own: str = "", base: str = "with-tokens", source: str = "union") -> str:
    """Write a merge of models with tokenizers, two of which add the same token."""
    weights = {"a": 1.0, "c": 0.3, "b": 0.6}
    given = [f"with-tokens-{name} {{weight: {w}{own}}}" for name, w in weights.items()]
    return models(method, *given, more=f"tokenizer_source: {source}", base=base)


TOKENS = [
    C("tokenizer_source: base", tokenized("tokenizer_source: base")),
    C("tokenizer_source: union", tokenized("tokenizer_source: union")),
    C("tokenizer_source: a model", tokenized("tokenizer_source: with-tokens-b")),
    C("tokenizer: as usual", tokenized("tokenizer: {}")),
    *(
        C(f"a token that two models add, {method}", sharing(method, own=own))
        for method, own in (
            ("task_arithmetic", ""),
            ("ties", ", density: 0.5"),
            ("breadcrumbs_ties", ", density: 0.6"),
            ("dare_linear", ", density: 1"),
            ("multislerp", ""),
            ("model_stock", ""),
            ("sce", ""),
        )
    ),
    C("a token that two models add, one is the source", sharing("ties", source="with-tokens-c")),
    C("linear, a token that two of three have", sharing("linear", base="")),
    C("karcher, a token that two of three have", sharing("karcher", base="")),
    C("tokenizer: rows of tokens", tokenized(ROWS)),
    C(
        "tokenizer: rows of a model",
        tokenized(ROWS.replace("source: union", "source: with-tokens-b")),
    ),
    C(
        "tokenizer: a new token",
        tokenized(
            "tokenizer: {source: base, tokens: "
            "{<|new|>: {source: {kind: model_token, model: with-tokens, token: '5'}}}}"
        ),
        ONLY_HERE,
        "mergekit 0.1.5 ends with a KeyError",
    ),
    C(
        "tokenizer: padded",
        tokenized("tokenizer: {source: union, pad_to_multiple_of: 16}"),
        DIFFERS,
        "rows that pad are zeros here, and the mean of the others there",
        share=0.5,
    ),
    C(
        "tokenizer of a model that is not merged",
        tokenized("tokenizer_source: with-tokens-c"),
        REFUSED_HERE,
        "its model is not read",
    ),
    C(
        "chat_template by name",
        tokenized("tokenizer_source: base\nchat_template: chatml"),
    ),
    C(
        "chat_template itself",
        tokenized("tokenizer_source: base\nchat_template: '{{ bos_token }}{{ messages }}'"),
    ),
    C("chat_template: auto", tokenized("tokenizer_source: union\nchat_template: auto")),
    C(
        "chat_template that is not known",
        tokenized("tokenizer_source: base\nchat_template: nobody"),
        REFUSED,
        "there is no such template",
    ),
]

EXPERTS = """
base_model: with-tokens
gate_mode: {gates}
dtype: float32
experts:
  - {{source_model: with-tokens-a, positive_prompts: ["1 2 3"]}}
  - {{source_model: with-tokens-b, positive_prompts: ["4 5"], negative_prompts: ["6"]}}
"""
APART = ("experts-math {weight: 1, density: 0.5}", "experts-code {weight: 0.3, density: 0.5}")
MIXTURES = [
    C("experts stored apart", models("task_arithmetic", *APART, base="experts-base")),
    C(
        "experts stored apart, ties",
        models("ties", *APART, base="experts-base"),
        DIFFERS,
        "mergekit joins the experts of a layer first, and cuts them together",
        share=0.1,
    ),
    C("mixture, cheap_embed", EXPERTS.format(gates="cheap_embed")),
    C(
        "mixture, hidden",
        EXPERTS.format(gates="hidden"),
        DIFFERS,
        "mergekit asks the base for its hidden states in bfloat16, here it is float32",
        share=2**-7,
    ),
    C(
        "mixture, random",
        EXPERTS.format(gates="random"),
        IN_DISTRIBUTION,
        "gates are drawn from another generator",
    ),
]

CONFIGURATIONS = [
    *(*EXAMPLES, *LINEAR, *DELTAS, *SPHERES, *STACKS, *FILES, *TOKENS, *MIXTURES),
]
